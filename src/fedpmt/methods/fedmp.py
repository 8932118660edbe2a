"""FedMP: Jiang et al., "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge Computing",
2022.

Each round each worker gets a structured-pruned model: the server drops the share α of every hidden layer's filters
and neurons, those of the smallest L1 norm. α is chosen by a bandit per worker (E-UCB) whose reward is the worker's
loss decrease over how far its time was from the mean of all. What comes back is made whole by what the worker did not
get, and then averaged (R2SP):

    w <- 1/|S| Σ_k (embed(w_k) + r_k),   r_k = w - embed(w restricted to what k got)

which is the fill mean: an entry counts as unchanged for each worker that did not have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from fedpmt.methods.averaging import PLAIN, Averaged, MeanFold, Weight, send
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits, acts, require
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, Part
from fedpmt.parts.width import (
    channel_norms,
    hidden_groups,
    important_channels,
    kept_count,
    narrow,
    thinned,
)
from fedpmt.pricing.matching import largest_rate
from fedpmt.training.local import LocalWork
from fedpmt.training.server import REPLACE, ServerOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.training.messages import Client, Reply, Task

FORGOTTEN = 1e-12
"""A weight λ^(t - s) that no sum would show."""


@dataclass(frozen=True)
class Bandit:
    """What the server has learned of one worker. Arms are the intervals between borders."""

    borders: tuple[float, ...]
    ratios: tuple[float, ...] = ()  # α_s, oldest first
    rewards: tuple[float, ...] = ()
    loss: float | None = None  # of its last round

    def draw(self, discount: float, rng: np.random.Generator) -> float:
        """α, uniform in the interval j of highest Rbar(j) + sqrt(2 ln Σ N / N(j)); one without a visit comes first."""
        # λ^(t - s): what was learned long ago counts less.
        ages = np.arange(len(self.ratios))[::-1]
        weights = discount**ages
        arms = np.searchsorted(self.borders, self.ratios, side="right") - 1
        visits = np.bincount(arms, weights, len(self.borders) - 1)  # N(j)
        totals = np.bincount(arms, weights * self.rewards, len(self.borders) - 1)
        bounds = np.full(len(visits), math.inf)
        seen = visits > 0
        spread = 2 * math.log(max(1.0, visits.sum()))
        bounds[seen] = totals[seen] / visits[seen] + np.sqrt(spread / visits[seen])
        best = int(np.argmax(bounds))
        return float(rng.uniform(self.borders[best], self.borders[best + 1]))

    def rewarded(self, ratio: float, reward: float, finest: float, discount: float) -> Bandit:
        """With one more experience; an interval wider than θ is split where it was made.

        What has a weight below rounding is forgotten, so that long runs do not carry it along.
        """
        arm = int(np.searchsorted(self.borders, ratio, side="right"))
        low, high = self.borders[arm - 1], self.borders[arm]
        borders = self.borders
        if high - low > finest and ratio > low:
            borders = (*borders[:arm], ratio, *borders[arm:])
        kept = (
            slice(-math.ceil(math.log(FORGOTTEN) / math.log(discount)), None) if discount < 1 else slice(None)
        )
        ratios, rewards = (*self.ratios, ratio)[kept], (*self.rewards, reward)[kept]
        return replace(self, borders=borders, ratios=ratios, rewards=rewards)


@dataclass(frozen=True)
class Pruning:
    """The server's state."""

    model: Averaged  # w
    bandits: Mapping[int, Bandit]  # of the workers that have replied

    @property
    def structure(self) -> Structure:
        """The model's."""
        return self.model.structure

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The global model."""
        return self.model.tensors


class FillFold(Fold[Pruning]):
    """R2SP, and what the bandits learn of the round."""

    def __init__(self, method: FedMP, state: Pruning, round: Round) -> None:
        self._method, self._state, self._round = method, state, round
        self._mean = MeanFold(state.model, "fill", method.weight, method.server, method.mean)
        self._heard: list[tuple[int, float, float]] = []  # worker, seconds, loss

    def add(self, reply: Reply) -> None:
        self._mean.add(reply)
        if self._method.learns:
            self._heard.append((reply.device, reply.seconds, reply.metrics["train_loss"]))

    def finish(self, server: Server) -> Step[Pruning]:
        bandits, metrics = self._state.bandits, dict[str, float]()
        if self._method.learns:
            bandits, metrics = self._method.taught(self._state, self._heard, self._round)
        return Step(Pruning(self._mean.finish(server).state, bandits), metrics)


@dataclass(frozen=True)
class FedMP(Method[Pruning, None]):
    """Adaptive structured pruning; without the bandit, α = 1 - r of the worker's budget."""

    weight: Weight = "uniform"
    bandit: bool = True  # α is learned from loss and time, else it follows from the budget
    ratio: float | None = None  # α, the same for all workers and rounds
    discount: float = 0.99  # λ
    finest: float = 0.1  # θ, the width from which on an interval is split no more
    most: float = 0.8  # the largest α that is tried
    gap: float = 1e-3  # ε, added to the gap in time
    clip: float = 5.0  # rewards beyond this are cut
    mean: str = PLAIN
    server: ServerOptimizer = REPLACE

    def __post_init__(self) -> None:
        require(
            self,
            ratio=(self.ratio is None or 0 <= self.ratio < 1, ">= 0 and < 1"),
            discount=(0 < self.discount <= 1, "> 0 and <= 1"),
            finest=(self.finest > 0, "> 0"),
            most=(0 < self.most < 1, "> 0 and < 1"),
            gap=(self.gap > 0, "> 0"),
            clip=(0 < self.clip < math.inf, "> 0 and finite"),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_losses=True,
            combines="fill mean",
            discounts=True,
            needs_round="its bandits compare the times of a round's devices" if self.learns else "",
            discloses="training losses" if self.bandit else "",
            # On each worker's ratio, where neither the bandit nor the user chooses it.
            budget={} if self.bandit or self.ratio is not None else acts("device"),
            under_budget={"bandit": False},
        )

    @property
    def local(self) -> LocalWork[None]:
        return LocalWork()

    @property
    def learns(self) -> bool:
        """Whether the bandits decide."""
        return self.bandit and self.ratio is None

    def init(self, setup: Setup) -> Pruning:
        prototype = setup.prototypes[GLOBAL]
        return Pruning(Averaged(prototype.structure, prototype.tensors), {})

    def assign(self, state: Pruning, client: Client, round: Round) -> Task:
        return send(state.tensors, (self.pruned(state, self.alpha(state, client, round)),))

    def alpha(self, state: Pruning, client: Client, round: Round) -> float:
        """The share of channels that this worker does without."""
        if self.ratio is not None:
            return self.ratio
        if self.bandit:
            return self.drawn(state, client.id, round)
        structure = state.structure
        axes = structure.require_axes("fedmp")
        return 1 - largest_rate(lambda rate: client.fits(thinned(structure, axes, rate)))

    def drawn(self, state: Pruning, worker: int, round: Round) -> float:
        """What the worker's bandit draws in this round: the same wherever it is asked for."""
        return self.known(state, worker).draw(self.discount, round.rng("ratio", worker))

    def known(self, state: Pruning, worker: int) -> Bandit:
        """The worker's bandit; one that knows nothing for a new worker."""
        return state.bandits.get(worker, Bandit((0.0, self.most)))

    def pruned(self, state: Pruning, alpha: float) -> Part:
        """The model without the share α of the channels of least L1 norm, the same share in every hidden layer."""
        # To the hundredth: each new shape has to be priced, which takes longer than to train it.
        alpha = round(alpha, 2)
        if alpha == 0:
            return full(state.structure)
        axes = state.structure.require_axes("fedmp")
        kept = {
            group.name: important_channels(
                channel_norms(state.structure, state.tensors, group), kept_count(group.size, 1 - alpha)
            )
            for group in hidden_groups(axes)
        }
        return narrow(state.structure, axes, kept, f"prune {alpha:.2f}")

    def fold(self, state: Pruning, round: Round) -> Fold[Pruning]:
        return FillFold(self, state, round)

    def taught(
        self, state: Pruning, heard: list[tuple[int, float, float]], round: Round
    ) -> tuple[dict[int, Bandit], dict[str, float]]:
        """The bandits after a round in which these workers took so long and had this loss."""
        bandits, rewards = dict(state.bandits), []
        mean = sum(seconds for _, seconds, _ in heard) / max(1, len(heard))
        for worker, seconds, loss in heard:
            bandit = self.known(state, worker)
            # There is no decrease to speak of in a worker's first round.
            if bandit.loss is not None:
                reward = self.reward(bandit.loss - loss, seconds, mean)
                drawn = self.drawn(state, worker, round)
                bandit = bandit.rewarded(drawn, reward, self.finest, self.discount)
                rewards.append(reward)
            bandits[worker] = replace(bandit, loss=loss)
        return bandits, {"reward": sum(rewards) / len(rewards)} if rewards else {}

    def reward(self, decrease: float, seconds: float, mean: float) -> float:
        """ΔF_k / (|T_k - Tbar| / Tbar + ε), within the clip; in units of Tbar, so that the clock's do not matter."""
        apart = abs(seconds - mean) / mean if mean else 0.0
        reward = decrease / (apart + self.gap)
        return min(self.clip, max(-self.clip, reward)) if math.isfinite(reward) else -self.clip

    def predictor(self, state: Pruning) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)

    def neutral(self) -> Self:
        return replace(self, ratio=0.0, weight="samples")
