"""FedAsync: Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019.

The server mixes every model into its own as soon as it arrives, the less the older the model is that it started from:

    w <- (1 - α_s) w + α_s w_k,   α_s = α s(t - τ)

On a device the loss may have a proximal term, μ/2 ||w_k - w_τ||², with the model that it started from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from fedpmt.methods.averaging import Averaged, MeanFold, PartAveraging, weight_of
from fedpmt.methods.base import Traits, require
from fedpmt.methods.proximal import Proximal
from fedpmt.parts.depth import full
from fedpmt.training.local import LocalWork

if TYPE_CHECKING:
    from fedpmt.methods.base import Fold, Round
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Client, Reply


class MixingFold(MeanFold):
    """Mixes the mean of all replies into the model; with one reply per server step, as usual, it is the paper's."""

    def __init__(self, method: FedAsync, state: Averaged) -> None:
        super().__init__(state, method.rule, method.weight, method.server, method.mean)
        self._mixing = method.mixing

    def add(self, reply: Reply) -> None:
        update = reply.update
        if reply.sent is not None:
            # w_k - w = (w_k - w_τ) + (w_τ - w): a reply is a difference to the model that the device started from.
            now = self._state.tensors
            update = {name: change + (reply.sent[name] - now[name]) for name, change in update.items()}
        weight = weight_of(self._weight, reply.samples)
        # w <- w + α s(t - τ) (w_k - w)
        self._mean.add(reply.part, update, weight, discount=self._mixing * reply.discount)


@dataclass(frozen=True)
class FedAsync(PartAveraging):
    """Every device trains the whole model, and its reply is mixed in when it arrives."""

    mixing: float = 0.6  # α
    mu: float = 0.0  # μ of the proximal term, the paper's ρ; 0: without it

    def __post_init__(self) -> None:
        require(
            self,
            mixing=(0 < self.mixing <= 1, "> 0 and <= 1"),
            mu=(0 <= self.mu < math.inf, ">= 0 and finite"),
            # It mixes models, and of a late one only a part is the device's own steps.
            normalise=(self.normalise == "none", "none"),
        )

    @property
    def traits(self) -> Traits:
        return Traits(combines="mixed in one by one", events={"buffer": 1, "staleness": "polynomial:0.5"})

    @property
    def local(self) -> LocalWork[Any]:
        return Proximal(self.mu, "fedasync.mu") if self.mu else LocalWork()

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return full(state.structure)

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return MixingFold(self, state)

    def neutral(self) -> Self:
        return replace(self, mixing=1.0, mu=0.0)
