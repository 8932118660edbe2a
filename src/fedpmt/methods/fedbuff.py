"""FedBuff: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022.

Replies go to a buffer as they arrive. When it holds K, the server steps by their mean, in which late ones count less:

    w <- w + η_g (1/K) Σ_k s(t - τ_k) Δ_k,   s(τ) = 1 / sqrt(1 + τ)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import Traits
from fedpmt.parts.depth import full

if TYPE_CHECKING:
    from fedpmt.methods.averaging import Weight
    from fedpmt.methods.base import Round
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Client


@dataclass(frozen=True)
class FedBuff(PartAveraging):
    """Every device trains the whole model; the server steps when a buffer of replies is full."""

    weight: Weight = "uniform"

    @property
    def traits(self) -> Traits:
        return Traits(sums="layers", events={"staleness": "polynomial:0.5"})

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return full(state.structure)

    def neutral(self) -> Self:
        return replace(self, weight="samples")
