"""Training by blocks, after Pfeiffer et al., "CoCoFL: Communication- and Computation-Aware Federated Learning via
Partial NN Freezing and Quantization", 2023, in full precision.

A device trains one block of consecutive layers anywhere in the net; all other layers stay as they were sent. The block
is as long as the device can afford; where it can afford several of that length, one is drawn:

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
        net, rng = state.structure, round.rng("block", client.id)
        ends = combinations(range(len(net.layers) + 1), 2)
        cuts = [block(net, first, last, f"layers {first + 1}-{last}") for first, last in ends]
        return max(filter(client.fits, cuts), key=lambda p: (len(p.trained), rng.random()), default=cuts[-1])

    def neutral(self) -> "Blocks":
        return self
