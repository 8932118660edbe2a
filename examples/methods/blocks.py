"""Training by blocks, after Pfeiffer et al., "CoCoFL: Communication- and Computation-Aware Federated Learning via
Partial NN Freezing and Quantization", 2023, in full precision.

A device trains one block of consecutive layers anywhere in the net; all other layers stay as they were sent. Of the
blocks that it can afford it gets the longest one with a drawn layer in it, so that every layer has its turn:

    f_k = [0, .., 0, 1, .., 1, 0, .., 0]
"""

from dataclasses import dataclass
from itertools import combinations

from fedpmt.methods import Averaged, Client, Part, PartAveraging, Round, Traits, acts, block


@dataclass(frozen=True)
class Blocks(PartAveraging):
    """One block of layers on each device, as long as it can afford."""

    @property
    def traits(self) -> Traits:
        return Traits(needs_speeds=True, sums="layers", combines="overlap mean", budget=acts("device"))

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        net, drawn = state.structure, round.rng("block", client.id).choice(state.structure.parameters)
        ends = combinations(range(len(net.layers) + 1), 2)
        cuts = [block(net, first, last, f"layers {first + 1}-{last}") for first, last in ends]
        # The last one is the classifier alone, for a device that can afford nothing.
        return max([*filter(client.fits, cuts), cuts[-1]], key=lambda p: (drawn in p.trained, len(p.trained)))

    def neutral(self) -> "Blocks":
        return self
