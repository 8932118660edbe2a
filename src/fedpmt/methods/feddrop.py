"""FedDrop: Wen, Jeon and Huang, "Federated Dropout: A Simple Approach for Enabling Federated Learning on
Resource Constrained Devices", 2022, as the FedPMT paper compares with it.

Each round each device gets a random sub-net of its own: a share `keep` of the hidden neurons, matched to
its budget. The paper's complexity table shows that only fully connected hidden layers are thinned there
(scope "fc") and that its rate is the share kept. Neither paper says how sub-nets are averaged: the overlap
mean follows equation 7; fill and zero fill are options. The mask is constant over a local round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from fedpmt.complexity.matching import match_keep
from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.submodel.depth import full
from fedpmt.submodel.width import kept_count, narrow, random_channels

if TYPE_CHECKING:
    import numpy as np

    from fedpmt.aggregation import Rule
    from fedpmt.methods.base import Round
    from fedpmt.submodel.part import Part
    from fedpmt.training.local import LocalWork
    from fedpmt.training.messages import Client


@dataclass(frozen=True)
class FedDrop(PartAveraging):
    """Random sub-nets by width."""

    scope: Literal["fc", "all"] = "fc"  # hidden fully connected layers, or convolutional filters too
    aggregation: Literal["overlap", "fill", "zero"] = "overlap"
    scaling: bool = False  # multiply kept activations by n / m while training (inverted dropout)
    keep: float | None = None  # the same share for all devices instead of one matched to the budget

    def part(self, state: Averaged, client: Client, round: Round) -> Part:  # noqa: A002
        keep = self.keep
        if (
            keep is None
            and client.budget is not None
            and not client.budget.allows(round.price(full(state.structure)))
        ):
            rate_cost = lambda rate: round.price(self.thinned(state, rate)).operations  # noqa: E731
            keep, _ = match_keep(rate_cost, client.budget.operations)
        return self.thinned(state, 1.0 if keep is None else keep, round.rng("channels", client.id))

    def thinned(self, state: Averaged, keep: float, rng: np.random.Generator | None = None) -> Part:
        """The sub-net of kept_count(n_l, keep) random neurons per hidden layer; the first ones without a generator."""
        axes = state.structure.require_axes("feddrop")
        kinds = ("linear",) if self.scope == "fc" else ("linear", "conv")
        if keep >= 1:
            return full(state.structure)
        kept = {}
        for group in axes.groups.values():
            if group.kind in kinds:
                count = kept_count(group.size, keep)
                kept[group.name] = _first(count) if rng is None else random_channels(group.size, count, rng)
        return narrow(state.structure, axes, kept, f"keep {keep:.2f}")

    def rule(self) -> Rule:
        return self.aggregation

    def local(self) -> LocalWork[None]:
        from fedpmt.training.local import LocalWork
        from fedpmt.training.scaled import ScaledWork

        return ScaledWork() if self.scaling else LocalWork()

    def neutral(self) -> Self:
        return replace(self, keep=1.0, aggregation="overlap", scaling=False)


def _first(count: int) -> np.ndarray:
    """Any channels of this count: prices do not depend on which."""
    import numpy as np

    return np.arange(count)
