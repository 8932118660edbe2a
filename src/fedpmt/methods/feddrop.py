"""FedDrop: Wen, Jeon and Huang, "Federated Dropout: A Simple Approach for Enabling Federated Learning on
Resource Constrained Devices", 2022, as the FedPMT paper compares with it.

Each round each device gets a random sub-net of its own: a share `keep` of the hidden neurons, matched to
its budget. The paper's complexity table shows that only fully connected hidden layers are thinned there
(scope "fc") and that its rate is the share kept. Neither paper says how sub-nets are averaged: the overlap
mean follows equation 7; fill and zero fill are options. The mask is constant over a local round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import SHARE
from fedpmt.parts.depth import full
from fedpmt.parts.width import first_channels, random_channels, thinned
from fedpmt.pricing.matching import match_keep, rate_within

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fedpmt.aggregation import Rule
    from fedpmt.methods.base import Action, Round
    from fedpmt.parts.part import Part
    from fedpmt.resources import Resource
    from fedpmt.training.local import LocalWork
    from fedpmt.training.messages import Client


@dataclass(frozen=True)
class FedDrop(PartAveraging):
    """Random sub-nets by width."""

    needs_speeds = True
    under_budget: ClassVar = {"scope": "all", "match": "within"}

    scope: Literal["fc", "all"] = "fc"  # hidden fully connected layers, or convolutional filters too
    aggregation: Literal["overlap", "fill", "zero"] = "overlap"
    scaling: bool = False  # multiply kept activations by n / m while training (inverted dropout)
    keep: float | None = None  # the same share for all devices instead of one matched to the budget
    match: Literal["nearest", "within"] = "nearest"  # what costs nearest to the budget, or the most within it

    def __post_init__(self) -> None:
        self.require(keep=(self.keep is None or 0 < self.keep <= 1, SHARE))

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        keep = self.keep or self.matched(state, client, round)
        if keep == 1:
            return full(state.structure)
        rng = round.rng("channels", client.id)
        return self.thin(state, keep, lambda size, count: random_channels(size, count, rng))

    def matched(self, state: Averaged, client: Client, round: Round) -> float:
        """The share to keep that costs nearest to the budget, or the largest within it."""
        budget, fits = client.budget, self.fits(client, state.structure, round.price)
        if budget is None or fits(full(state.structure)):
            return 1.0
        if self.match == "within":
            return rate_within(lambda rate: fits(self.thin(state, rate)))
        keep, _ = match_keep(lambda rate: round.price(self.thin(state, rate)).sustained, budget.operations)
        return keep

    def action(self, resource: Resource) -> Action:
        return "device" if self.keep is None else "none"

    def thin(
        self, state: Averaged, keep: float, pick: Callable[[int, int], np.ndarray] = first_channels
    ) -> Part:
        """A sub-net of exactly kept_count(n_l, keep) neurons of each layer in scope."""
        axes = state.structure.require_axes("feddrop")
        return thinned(
            state.structure, axes, keep, ("linear",) if self.scope == "fc" else ("linear", "conv"), pick
        )

    def rule(self) -> Rule:
        return self.aggregation

    def local(self) -> LocalWork[None]:
        from fedpmt.training.local import LocalWork
        from fedpmt.training.scaled import ScaledWork

        return ScaledWork() if self.scaling else LocalWork()

    def neutral(self) -> Self:
        return replace(self, keep=1.0, aggregation="overlap", scaling=False)
