"""Federated descent with partial training, all arms and seeds in one array, and what Theorem 1 asks for measured.

A round has |S| slots. A slot's depth never changes; which device sits in it does:

    fixed levels, full participation      device k always in slot k
    fixed levels, sampled                 each depth's slots filled at random from the devices of that depth
    redrawn levels (and FedAvg)           all slots filled at random from the whole fleet

So A_k of equation 7 is one constant array, and arms that share a problem share their random draws, which makes
their differences sharper than their values. Device k's depth, where fixed, is that of its place in the fleet:
the first |K| p_1 devices have depth 1, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.seeds import generator
from fedpmt.types import SettingError
from reproduction.theory.bound import Constants
from reproduction.theory.problems import coverage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reproduction.theory.problems import Problem

CHUNK = 128
"""Rounds whose random numbers are drawn at once; part of what a seed means."""


@dataclass(frozen=True)
class Arm:
    """One way to train: how many devices of each depth a round has, and the step size 2 / (μ ε (t + λ))."""

    name: str
    counts: tuple[int, ...]  # |S_1|, .., |S_|I||, smallest depth first
    offset: float  # λ
    epsilon: float = 1.0  # ε
    redrawn: bool = False

    @property
    def cohort(self) -> int:
        """|S|."""
        return sum(self.counts)

    @property
    def shares(self) -> list[float]:
        """p_1, .., p_|I|."""
        return [count / self.cohort for count in self.counts]

    @property
    def levels(self) -> list[int]:
        """The depth of each slot."""
        return [depth for depth, count in enumerate(self.counts, start=1) for _ in range(count)]

    @property
    def free(self) -> bool:
        """Any device may sit in any slot: levels are redrawn, or all are the same."""
        return self.redrawn or max(self.counts) == self.cohort


@dataclass(frozen=True)
class Trace:
    """What one arm did: errors at the recorded rounds, and the constants measured there."""

    arm: Arm
    rounds: np.ndarray  # t
    errors: np.ndarray  # F(w^t) - F*: (seeds, recorded rounds)
    constants: Constants
    failing: float  # share of the points with a positive right side where Proposition 1 fails for every ε > 0
    summed: float  # the least ratio with both sides summed over the cohort, which is all that the proof uses

    @property
    def times(self) -> np.ndarray:
        """t + λ."""
        return self.rounds + self.arm.offset


def recorded_rounds(rounds: int, count: int) -> np.ndarray:
    """About `count` rounds from 1 to `rounds`, evenly spaced in their logarithm.

    >>> recorded_rounds(1000, 4).tolist()
    [1, 10, 100, 1000]
    """
    return np.unique(np.geomspace(1, rounds, count).round().astype(np.int64))


def descend(
    problem: Problem,
    arms: Sequence[Arm],
    *,
    seeds: Sequence[int],
    rounds: int,
    steps: int = 1,
    records: int = 60,
    measured: int = 40,
) -> list[Trace]:
    """Run every arm from w^1 to w^T with τ = `steps` local steps a round.

    F(w^t) is recorded before round t's steps, at about `records` rounds; ε, G and δ at about `measured` of them,
    since they take all samples of every device.
    """
    _check(problem, arms)
    slots, places = arms[0].cohort, recorded_rounds(rounds, records)
    metered = set(places[:: -(-len(places) // measured)].tolist())
    weights = np.stack([coverage(arm.levels, problem.blocks) for arm in arms])[
        :, None
    ]  # A_k: arm, 1, slot, entry
    masks = (weights > 0).astype(np.float64)  # f_k
    scales = np.array([2 / (problem.strong_convexity * arm.epsilon) for arm in arms])
    offsets = np.array([arm.offset for arm in arms])
    point = np.tile(problem.start, (len(arms), len(seeds), 1))
    meters = _Meters(problem, weights, len(seeds))
    errors = []
    for first in range(1, rounds + 1, CHUNK):
        count = min(CHUNK, rounds + 1 - first)
        owners = _seat(problem, arms, seeds, first)
        draws = np.stack(
            [problem.draw(_rng(seed, "gradient", first), (CHUNK, steps, slots)) for seed in seeds], axis=2
        )
        wanted = set(places[(places >= first) & (places < first + count)].tolist())
        for place in range(count):
            t = first + place
            seated = owners[min(place, len(owners) - 1)]
            rates = masks * (scales / (t + offsets))[:, None, None, None]  # η_t f_k
            if t in wanted:
                errors.append(problem.losses(point) - problem.minimum)
            measure = t in metered
            if measure:
                meters.noise(point)
            local = np.repeat(point[:, :, None], slots, axis=2)
            for step in range(steps):
                gradients = problem.noisy_gradients(local, seated, draws[place, step])
                if measure:
                    meters.read(local, seated, gradients)
                # equation 6: w_k <- w_k - η_t ∇F_k(w_k, ξ_k) ∘ f_k
                local -= rates * gradients
            # equation 7: w <- w + Σ_k A_k ∘ (w_k - w)
            local -= point[:, :, None]
            point = point + (weights * local).sum(axis=2)
    values = np.stack(errors, axis=-1)
    return [
        Trace(
            arm, places, values[index], meters.constants(index), meters.failing(index), meters.summed(index)
        )
        for index, arm in enumerate(arms)
    ]


def _check(problem: Problem, arms: Sequence[Arm]) -> None:
    for arm in arms:
        if len(arm.counts) != len(problem.blocks):
            raise SettingError(
                f"counts = {arm.counts} is refused: the problem has {len(problem.blocks)} blocks, so as many depths"
            )
        if arm.cohort != arms[0].cohort or problem.devices % arm.cohort:
            raise SettingError(
                f"counts = {arm.counts} is refused: all arms ask the same number of devices, a divisor of "
                f"{problem.devices}"
            )


def _rng(seed: int, purpose: str, first: int) -> np.random.Generator:
    return generator(seed, f"theory/{purpose}", first)


def _seat(problem: Problem, arms: Sequence[Arm], seeds: Sequence[int], first: int) -> np.ndarray:
    """Which device sits in each slot: (rounds, arms, seeds, slots), or one round's for all where nobody moves."""
    slots = arms[0].cohort
    if problem.alike or (slots == problem.devices and not any(arm.redrawn for arm in arms)):
        return np.broadcast_to(np.arange(slots), (1, len(arms), len(seeds), slots))
    keys = np.stack([_rng(seed, "cohort", first).random((CHUNK, problem.devices)) for seed in seeds], axis=1)
    every = []
    for arm in arms:
        if arm.redrawn or (arm.free and slots < problem.devices):
            every.append(np.argsort(keys, axis=-1)[..., :slots])
        else:
            # Devices of one depth stand together; the first few of each group, in random order, are asked.
            each = problem.devices // slots
            levels = np.repeat(arm.levels, each)
            order = (
                np.argsort(levels + keys, axis=-1)
                if each > 1
                else np.broadcast_to(np.arange(slots), keys.shape)
            )
            starts = [each * sum(arm.counts[:depth]) for depth in range(len(arm.counts))]
            taken = [start + n for start, size in zip(starts, arm.counts, strict=True) for n in range(size)]
            every.append(order[..., taken])
    return np.stack(every, axis=1)


class _Meters:
    """G, δ and ε at the recorded rounds, arm by arm."""

    def __init__(self, problem: Problem, weights: np.ndarray, seeds: int) -> None:
        arms = len(weights)
        self._problem, self._weights = problem, weights
        self._gradient_square = np.zeros(arms)
        self._variances = np.zeros((arms, problem.devices))
        self._epsilon, self._summed = np.full(arms, np.inf), np.full(arms, np.inf)
        self._failing, self._points = np.zeros(arms), np.zeros(arms)
        self._at_optimum = problem.local_losses(
            np.broadcast_to(problem.optimum, (problem.devices, problem.dimension)), problem.everybody
        )

    def noise(self, point: np.ndarray) -> None:
        """δ_k²: the largest mean over the seeds, of every device at the global model."""
        problem = self._problem
        devices = 1 if problem.alike else problem.devices
        shape = (*point.shape[:-1], devices)
        spread = np.broadcast_to(point[:, :, None], (*shape, problem.dimension))
        seen = problem.variances(spread, np.broadcast_to(np.arange(devices), shape)).mean(axis=1)
        self._variances = np.maximum(self._variances, seen)

    def read(self, local: np.ndarray, owners: np.ndarray, gradients: np.ndarray) -> None:
        """G², and the ratio of Proposition 1 at the devices' models, before a local step."""
        problem = self._problem
        squares = (gradients**2).sum(axis=-1).mean(axis=1).max(axis=-1)
        self._gradient_square = np.maximum(self._gradient_square, squares)
        away = local - problem.optimum
        exact = problem.local_gradients(local, owners)
        left = self._weights.shape[2] * (away * self._weights * exact).sum(axis=-1)
        right = problem.local_losses(local, owners) - self._at_optimum[owners]
        right = right + problem.strong_convexity / 2 * (away**2).sum(axis=-1)
        ratios = _ratios(left, right)
        self._epsilon = np.minimum(self._epsilon, ratios.min(axis=(1, 2)))
        self._summed = np.minimum(self._summed, _ratios(left.sum(axis=-1), right.sum(axis=-1)).min(axis=1))
        self._failing += (ratios <= 0).sum(axis=(1, 2))
        self._points += np.isfinite(ratios).sum(axis=(1, 2))

    def constants(self, arm: int) -> Constants:
        """All that the bound asks for."""
        problem = self._problem
        return Constants(
            strong_convexity=problem.strong_convexity,
            smoothness=problem.smoothness,
            distance=problem.distance,
            gradient_square=float(self._gradient_square[arm]),
            noise=float(self._variances[arm].mean()),
            heterogeneity=problem.heterogeneity,
            epsilon=float(self._epsilon[arm]),
        )

    def failing(self, arm: int) -> float:
        """How often Proposition 1 fails outright."""
        return float(self._failing[arm] / max(self._points[arm], 1))

    def summed(self, arm: int) -> float:
        """What ε would be if it were asked of the cohort and not of each device."""
        return float(self._summed[arm])


def _ratios(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    # Where the right side is not positive the inequality sets no upper limit to ε.
    valid = right > 0
    return np.where(valid, left / np.where(valid, right, 1.0), np.inf)
