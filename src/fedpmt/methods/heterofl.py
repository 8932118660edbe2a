"""HeteroFL: Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", 2021.

A device of rate r trains the first ⌈r n_l⌉ channels of every hidden layer, so that narrow models are nested in
wider ones, and every entry is averaged over the devices that trained it:

    w_j <- Σ_{k in C_j} w_{k,j} / |C_j|
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from fedpmt.complexity.matching import rate_within
from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.submodel.width import HIDDEN, of_classes, thinned, without_buffers
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.methods.base import Predictor, Round
    from fedpmt.submodel.part import Part
    from fedpmt.training.local import LocalWork
    from fedpmt.training.messages import Client, Task

HALVING = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""The paper's levels a to e."""


@dataclass(frozen=True)
class HeteroFL(PartAveraging):
    """Static nested sub-models by width."""

    needs_speeds = True

    weight: Literal["samples", "uniform"] = "uniform"  # the mean counts devices, not samples
    rates: Literal["matched", "halving"] = "matched"  # r on the 0.01 grid, or the paper's a to e
    rate: float | None = None  # r, the same for all devices instead of one within the budget
    scaler: bool = True  # hidden outputs times 1 / r in training
    masked: bool = True  # masked cross-entropy: classes a device does not hold have logit 0
    clip: float | None = None  # the largest norm of a step's gradient
    norm: Literal["static", "averaged"] = "static"  # BatchNorm statistics: of data at the end, or averaged

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate <= 1:
            raise SettingError(
                f"heterofl.rate = '{self.rate}' is refused: a rate above 0, at most 1, is needed"
            )

    def rate_of(self, state: Averaged, client: Client, round: Round) -> float:
        """r_k: the largest rate within the device's budget, else the smallest there is."""
        if self.rate is not None:
            return self.rate
        among = HALVING if self.rates == "halving" else None
        return rate_within(client.budget, lambda rate: round.price(self.slice(state, rate)), among)

    def slice(self, state: Averaged, rate: float) -> Part:
        """I_l = {0, .., ⌈r n_l⌉ - 1}; both sides know it from r."""
        structure = state.structure
        part = thinned(structure, structure.require_axes("heterofl"), rate, HIDDEN, derivable=True)
        return without_buffers(structure, part) if self.norm == "static" else part

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        part = self.slice(state, self.rate_of(state, client, round))
        if not self.masked or client.label_counts is None:
            return part
        # A row of the classifier is averaged over the devices that hold its class.
        return of_classes(state.structure, part, client.label_counts.nonzero()[0])

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        task = super().assign(state, client, round)
        return replace(task, scalars={"rate": self.rate_of(state, client, round)})

    def local(self) -> LocalWork[None]:
        from fedpmt.training.scaled import ScaledWork

        return ScaledWork("rate" if self.scaler else None, self.masked, self.clip)

    def predictor(self, state: Averaged) -> Predictor:
        return replace(super().predictor(state), statistics="data" if self.norm == "static" else "stored")

    def neutral(self) -> Self:
        return replace(self, weight="samples", rate=1.0, masked=False, clip=None, norm="averaged")
