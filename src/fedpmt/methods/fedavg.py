"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import Traits
from fedpmt.parts.depth import full

if TYPE_CHECKING:
    from fedpmt.methods.base import Round
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Client


@dataclass(frozen=True)
class FedAvg(PartAveraging):
    """Every device trains the whole model, however long it takes it."""

    @property
    def traits(self) -> Traits:
        return Traits(sums="layers")

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return full(state.structure)

    def neutral(self) -> Self:
        return self
