"""FedDrop: Wen, Jeon and Huang, "Federated Dropout: A Simple Approach for Enabling Federated Learning on
Resource Constrained Devices", 2022, as the FedPMT paper compares with it.

Each round each device gets a random sub-net of its own: a share `keep` of the hidden neurons, matched to
its budget. The paper's complexity table shows that only fully connected hidden layers are thinned there
(scope "fc", which "auto" chooses for models that have such layers) and that its rate is the share kept. Neither
paper says how sub-nets are averaged: the overlap mean follows equation 7; fill and zero fill are options. The mask
is constant over a local round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import Traits, acts, require
from fedpmt.models.structure import HIDDEN
from fedpmt.parts.depth import full
from fedpmt.parts.width import first_channels, hidden_groups, random_channels, thinned
from fedpmt.pricing.matching import match_keep, rate_within
from fedpmt.training.local import LocalWork
from fedpmt.training.scaled import ScaledWork
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fedpmt.aggregation import Rule
    from fedpmt.methods.base import Round, Setup
    from fedpmt.models.structure import Axes, Kind
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Client


@dataclass(frozen=True)
class FedDrop(PartAveraging):
    """Random sub-nets by width."""

    scope: Literal["auto", "fc", "all"] = (
        "auto"  # hidden fully connected layers, or filters and heads too; auto: those, where there is no such layer
    )
    aggregation: Literal["overlap", "fill", "zero"] = "overlap"
    scaling: bool = False  # multiply kept activations by n / m while training (inverted dropout)
    keep: float | None = None  # the same share for all devices instead of one matched to the budget
    match: Literal["nearest", "within"] = "nearest"  # what costs nearest to the budget, or the most within it

    def __post_init__(self) -> None:
        require(
            self,
            keep=(self.keep is None or 0 < self.keep <= 1, "> 0 and <= 1"),
            # Zeros in place of what others did not train are no changes, which could be normalised.
            normalise=(
                self.aggregation != "zero" or self.normalise == "none",
                "none with aggregation = zero",
            ),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            sums="entries",
            combines=f"{self.rule} mean",
            budget=acts("device") if self.keep is None else {},
            under_budget={"scope": "all", "match": "within"},
        )

    @property
    def rule(self) -> Rule:
        return self.aggregation

    @property
    def local(self) -> LocalWork[Any]:
        return ScaledWork() if self.scaling else LocalWork()

    def init(self, setup: Setup) -> Averaged:
        state = super().init(setup)
        if self.keep != 1:
            self.thinned_kinds(state.structure.require_axes("feddrop"))
        return state

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        keep = self.keep or self.matched(state, client, round)
        if keep == 1:
            return full(state.structure)
        rng = round.rng("channels", client.id)
        return self.thin(state, keep, lambda size, count: random_channels(size, count, rng))

    def matched(self, state: Averaged, client: Client, round: Round) -> float:
        """The share to keep that costs nearest to the limit, or the largest within it."""
        if client.limit is None or client.fits(full(state.structure)):
            return 1.0
        if self.match == "within":
            return rate_within(lambda rate: client.fits(self.thin(state, rate)))
        keep, _ = match_keep(
            lambda rate: client.usage(self.thin(state, rate)).operations, client.limit.operations
        )
        return keep

    def thin(
        self, state: Averaged, keep: float, pick: Callable[[int, int], np.ndarray] = first_channels
    ) -> Part:
        """A sub-net of exactly kept_count(n_l, keep) neurons of each layer in scope."""
        axes = state.structure.require_axes("feddrop")
        return thinned(state.structure, axes, keep, self.thinned_kinds(axes), pick)

    def thinned_kinds(self, axes: Axes) -> tuple[Kind, ...]:
        """What is thinned."""
        connected: tuple[Kind, ...] = ("linear",)
        if self.scope == "all" or (self.scope == "auto" and not hidden_groups(axes, connected)):
            return HIDDEN
        if not hidden_groups(axes, connected):
            raise SettingError(
                "feddrop.scope = 'fc' thins nothing: the model has no hidden fully connected layer (use all)"
            )
        return connected

    def neutral(self) -> Self:
        return replace(self, keep=1.0, aggregation="overlap", scaling=False)
