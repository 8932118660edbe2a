"""Federated descent with partial training, all arms and seeds in one array, and what Theorem 1 asks for measured.

A round has |S| slots. A slot's depth never changes; which device sits in it does:

    fixed levels, full participation      device k always in slot k
    fixed levels, sampled                 each depth's slots filled at random from the devices of that depth
    redrawn levels (and FedAvg)           all slots filled at random from the whole fleet

So A_k of equation 7 is one constant array, and arms that share a problem share their random draws, which makes
their differences sharper than their values. Device k's depth, where fixed, is that of its place in the fleet:
the first |K| p_1 devices have depth 1, and so on.

A slot's depth is what its budget pays for in all τ steps, if a step of depth i costs 1/3 + 2/3 i / |I| of a full one.
An arm's plan says what the slot does with that budget:

    paper     its depth, all steps
    traded    all blocks, in the steps that the budget leaves
    rotated   with probability 1 / R the traded pair, else the paper's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedpmt.seeds import generator
from fedpmt.types import SettingError
from reproduction.theory.bound import Constants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reproduction.theory.problems import Problem

CHUNK = 128
"""Rounds whose random numbers are drawn at once; part of what a seed means."""


TURNS = 4  # R
DRAWS = 10_000  # over which the pull of a mean that is not right over the draws is averaged


@dataclass(frozen=True)
class Arm:
    """One way to train: how many devices of each depth a round has, and the step size 2 / (μ ε (t + λ))."""

    name: str
    counts: tuple[int, ...]  # |S_1|, .., |S_|I||, smallest depth first
    offset: float  # λ
    epsilon: float = 1.0  # ε
    redrawn: bool = False
    plan: Literal["paper", "traded", "rotated"] = "paper"
    normalise: Literal["none", "steps", "draws"] = "none"  # as in `fedpmt.methods.averaging`

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


class Pairs(NamedTuple):
    """What each slot may do in a round, (slots, 2): the usual pair of a depth and a number of steps, and the other."""

    chances: np.ndarray
    depths: np.ndarray
    steps: np.ndarray  # τ_k

    @classmethod
    def of(cls, arm: Arm, steps: int) -> Pairs:
        """The pairs of an arm's plan.

        >>> Pairs.of(Arm("a", (1, 0, 0, 1), 0.0, plan="rotated"), 4).steps.tolist()  # half of the budget, and all
        [[4, 2], [4, 4]]
        """
        own, most = np.array(arm.levels), len(arm.counts)
        # c_i τ / c_|I|, where c_i = (|I| + 2 i) / (3 |I|)
        left = np.maximum(1, (most + 2 * own) * steps // (3 * most))
        usual, other = (own, np.full_like(own, steps)), (np.full_like(own, most), left)
        if arm.plan != "rotated":
            usual = other = usual if arm.plan == "paper" else other
        turn = 1 / TURNS if arm.plan == "rotated" else 0.0
        chances = np.tile([1 - turn, turn], (len(own), 1))
        return cls(chances, *(np.stack(both, axis=-1) for both in zip(usual, other, strict=True)))


def mean_weights(arm: Arm, pairs: Pairs, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each slot's change counts for in each block, (.., slots, blocks), and its steps, (.., slots).

    `turns` says which slots have drawn the other pair. This is `CoverageMean` of the library, in NumPy.
    """
    blocks = np.arange(len(arm.counts))
    covers = pairs.depths[:, :, None] > blocks[::-1]  # slot, pair, block
    place = np.arange(len(pairs.depths)), turns.astype(np.int64)
    trained, steps = covers[place].astype(np.float64), pairs.steps[place]
    if arm.normalise == "none":
        # equation 7: f_k / Σ f_k
        return trained / np.maximum(trained.sum(axis=-2, keepdims=True), 1), steps
    if arm.normalise == "steps":
        reached, expected, chances = trained, steps.astype(np.float64), np.ones_like(trained)
    else:
        chances = (pairs.chances[:, :, None] * covers).sum(axis=1)  # q_kl
        reached, expected = (chances > 0).astype(np.float64), (pairs.chances * pairs.steps).sum(axis=1)
    count = np.maximum(reached.sum(axis=-2, keepdims=True), 1)
    length = (reached * expected[..., None]).sum(axis=-2, keepdims=True) / count  # τ_l
    # τ_l (f_kl / q_kl) / τ_k / Σ 1
    return length * trained / np.maximum(chances, 1e-300) / steps[..., None] / count, steps


def mean_pull(arm: Arm, steps: int) -> np.ndarray:
    """E[A_k τ_k], (slots, blocks): how strongly each slot pulls at each block while step sizes are small."""
    pairs = Pairs.of(arm, steps)
    if arm.normalise == "draws":
        # A slot's weight depends on its own draw alone.
        both = [mean_weights(arm, pairs, np.full(arm.cohort, turn)) for turn in (False, True)]
        return np.asarray(
            sum(
                pairs.chances[:, [turn]] * weights * taken[:, None]
                for turn, (weights, taken) in enumerate(both)
            )
        )
    draws = generator(0, "theory/pull").random((DRAWS, arm.cohort)) < pairs.chances[:, 1]
    weights, taken = mean_weights(arm, pairs, draws)
    return np.asarray((weights * taken[..., None]).mean(axis=0))


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
    plans = [Pairs.of(arm, steps) for arm in arms]
    scales = np.array([2 / (problem.strong_convexity * arm.epsilon) for arm in arms])
    offsets = np.array([arm.offset for arm in arms])
    point = np.tile(problem.start, (len(arms), len(seeds), 1))
    meters = _Meters(problem, len(arms))
    errors = []
    for first in range(1, rounds + 1, CHUNK):
        count = min(CHUNK, rounds + 1 - first)
        owners = _seat(problem, arms, seeds, first)
        draws = np.stack(
            [problem.draw(_rng(seed, "gradient", first), (CHUNK, steps, slots)) for seed in seeds], axis=2
        )
        work = _work(arms, plans, seeds, first)
        wanted = set(places[(places >= first) & (places < first + count)].tolist())
        for place in range(count):
            t = first + place
            seated = owners[min(place, len(owners) - 1)]
            if place == 0 or len(work[0]) > 1:
                # A_k and τ_k: arm, seed or 1, slot, entry
                weights, counts = (each[min(place, len(each) - 1)] for each in work)
                weights = np.repeat(weights, problem.blocks, axis=-1)
                masks = (weights > 0).astype(np.float64)  # f_k
                equal = bool((counts == steps).all())
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
                    meters.read(local, seated, gradients, weights)
                # equation 6: w_k <- w_k - η_t ∇F_k(w_k, ξ_k) ∘ f_k, for τ_k steps
                local -= rates * gradients if equal else rates * (step < counts[..., None]) * gradients
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


def _work(
    arms: Sequence[Arm], plans: Sequence[Pairs], seeds: Sequence[int], first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and steps of each slot: (rounds, arms, seeds, slots, ..); one round and seed where nothing is drawn."""
    slots = arms[0].cohort
    if any(arm.plan == "rotated" for arm in arms):
        draws = np.stack([_rng(seed, "rotation", first).random((CHUNK, slots)) for seed in seeds], axis=1)
    else:
        draws = np.ones((1, 1, slots))
    every = [
        mean_weights(arm, pairs, draws < pairs.chances[:, 1]) for arm, pairs in zip(arms, plans, strict=True)
    ]
    return np.stack([weights for weights, _ in every], axis=1), np.stack(
        [steps for _, steps in every], axis=1
    )


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

    def __init__(self, problem: Problem, arms: int) -> None:
        self._problem = problem
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

    def read(self, local: np.ndarray, owners: np.ndarray, gradients: np.ndarray, weights: np.ndarray) -> None:
        """G², and the ratio of Proposition 1 at the devices' models, before a local step."""
        problem = self._problem
        squares = (gradients**2).sum(axis=-1).mean(axis=1).max(axis=-1)
        self._gradient_square = np.maximum(self._gradient_square, squares)
        away = local - problem.optimum
        exact = problem.local_gradients(local, owners)
        left = weights.shape[2] * (away * weights * exact).sum(axis=-1)
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
