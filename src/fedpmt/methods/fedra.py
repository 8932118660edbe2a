"""FedRA: Su et al., "FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous
Clients", 2024.

Fine-tuning with adapters. In each round a device gets a random subset of the blocks, as many as it can afford, and runs
a shorter net of these alone: what enters a block that it did not get goes on to the next one. It trains the adapters
in its blocks, and the server averages each adapter over the devices that had its block:

    w^{t+1}[l] = w^t[l] + Σ_{k: l in L_k} a_k (w_k^{t+1}[l] - w^t[l]) / Σ_{k: l in L_k} a_k
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import Traits, acts, require
from fedpmt.models.adapters import find_adapters
from fedpmt.parts.part import GLOBAL, WHOLE, Part
from fedpmt.pricing.matching import largest

if TYPE_CHECKING:
    from collections.abc import Collection

    from fedpmt.methods.base import Round
    from fedpmt.models.structure import Structure
    from fedpmt.training.messages import Client


@dataclass(frozen=True)
class FedRA(PartAveraging):
    """Random blocks with adapters; the others are left out."""

    blocks: int | None = None  # the same number on every device instead of as many as it can afford

    def __post_init__(self) -> None:
        require(self, blocks=(self.blocks is None or self.blocks >= 1, ">= 1"))

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            needs_adapters=True,
            sums="layers",
            combines="overlap mean",
            budget=acts("device") if self.blocks is None else {},
        )

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        """The blocks that were drawn first, as many of them as fit."""
        net = state.structure
        adapted = {adapter.layer for adapter in find_adapters(net)}
        blocks = [place for place in sorted(adapted) if net.layers[place].optional]
        drawn = [int(place) for place in round.rng("blocks", client.id).permutation(blocks)]
        counts = range(1, len(blocks) + 1) if self.blocks is None else [min(self.blocks, len(blocks))]
        parts = [shortened(net, set(blocks) - set(drawn[:count]), len(blocks)) for count in counts]
        return largest(parts or [shortened(net, (), 0)], client.fits)

    def neutral(self) -> Self:
        return replace(self, blocks=None)


def shortened(structure: Structure, missing: Collection[int], blocks: int) -> Part:
    """The model without some of its blocks; what is sent is trained."""
    layers = [layer for place, layer in enumerate(structure.layers) if place not in missing]
    kept = dict.fromkeys((name for layer in layers for name in layer.tensors), WHOLE)
    label = f"{blocks - len(missing)} of {blocks} blocks"
    return Part(GLOBAL, kept, kept, label, math.ceil(blocks / 8))
