"""The studies of convergence: the rate, the theorem's own step size, the gap against ψ, the floor, and our plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedpmt.seeds import generator
from reproduction.theory.bound import least_offset
from reproduction.theory.descent import Arm, Trace, descend, mean_pull
from reproduction.theory.problems import Problem, Quadratic, Softmax

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reproduction.theory.bound import Constants

DEPTHS = 4  # |I| = |L|
DEVICES = 16  # |K|
SAMPLED = 8  # |S| where not everybody takes part
MIXES = ((0, 0, 0, 16), (0, 0, 8, 8), (8, 0, 0, 8), (4, 4, 4, 4), (8, 4, 2, 2), (12, 2, 1, 1))
"""Devices of depth 1 to 4, the richest mix first; the first is FedAvg."""

FEDAVG = "FedAvg"
FEDPMT = "FedPMT"
REDRAWN = "FedPMT, levels redrawn"
FIXED = "FedPMT, levels fixed"


PLANNED_STEPS = 4  # τ of the study of plans: budgets buy 2, 2, 3 and 4 steps of all blocks
PLANS: tuple[tuple[Literal["paper", "traded", "rotated"], Literal["none", "steps", "draws"]], ...] = (
    ("paper", "none"),
    ("traded", "none"),
    ("traded", "steps"),
    ("rotated", "none"),
    ("rotated", "steps"),
    ("rotated", "draws"),
)
"""What devices do with their budget, and what their changes are divided by before the mean."""


@dataclass(frozen=True)
class Scope:
    """How long each study runs."""

    seeds: tuple[int, ...]
    quadratic_rounds: int = 30_000
    softmax_rounds: int = 10_000
    theorem_rounds: int = 1_000_000
    pilot_rounds: int = 100_000
    gap_rounds: int = 10_000
    softmax_gap_rounds: int = 4_000
    floor_rounds: int = 3_000
    assignments: int = 40
    measured: int = 40  # rounds at which ε, G and δ are measured, but for the theorem's run

    @classmethod
    def of(cls, seeds: Sequence[int], quick: bool) -> Scope:
        """The whole, or a taste of it with at most four seeds."""
        if not quick:
            return cls(tuple(seeds))
        return cls(tuple(seeds)[:4], 3_000, 400, 30_000, 10_000, 2_000, 400, 300, 10, 8)


@dataclass(frozen=True)
class Case:
    """One problem, with how it was shared and who took part, and what each arm did on it."""

    problem: str
    data: str
    participation: str
    traces: tuple[Trace, ...]
    floor: float = 0.0  # F(w°) - F* of the arm with fixed levels
    heterogeneity: float = 0.0  # Λ
    rests: tuple[float, ...] = ()  # F - F* where each arm comes to rest

    def __getitem__(self, name: str) -> Trace:
        return next(trace for trace in self.traces if trace.arm.name == name)


def quadratic(
    difference: float = 0.0, coupling: float = 0.0, smoothness: float = 4.0, two_classes: bool = False
) -> Quadratic:
    """The quadratic of all studies but the theorem's: μ = 1, four blocks of eight."""
    return Quadratic(
        devices=DEVICES, blocks=DEPTHS, size=8, strong_convexity=1.0, smoothness=smoothness, noise=1.0,
        difference=difference, coupling=coupling, two_classes=two_classes,
    )  # fmt: skip


def softmax(alpha: float = 1.0, own: float = 1.0, pooled: bool = False) -> Softmax:
    """Softmax regression on synthetic(α, α)."""
    return Softmax(devices=DEVICES, blocks=DEPTHS, alpha=alpha, beta=alpha, own=own, pooled=pooled)


def small_offset(problem: Problem) -> float:
    """λ = 8 L / μ, which keeps the first steps below 1 / (4 L); the proof asks for far more."""
    return 8 * problem.smoothness / problem.strong_convexity


def rate(scope: Scope) -> list[Case]:
    """FedPMT with even depths next to FedAvg: i.i.d. or not, all devices or half of them, levels fixed or redrawn."""
    cases = []
    for alike, differing, rounds in (
        (quadratic(), quadratic(difference=0.3), scope.quadratic_rounds),
        (softmax(pooled=True), softmax(), scope.softmax_rounds),
    ):
        offset = small_offset(differing)
        for cohort, participation in ((DEVICES, "full"), (SAMPLED, "sampled")):
            even, full = (cohort // DEPTHS,) * DEPTHS, (0,) * (DEPTHS - 1) + (cohort,)
            for problem, data in ((alike, "i.i.d."), (differing, "non-i.i.d.")):
                arms = [Arm(FEDAVG, full, offset)]
                arms += (
                    [Arm(FEDPMT, even, offset)]
                    if problem.alike
                    else [Arm(REDRAWN, even, offset, redrawn=True), Arm(FIXED, even, offset)]
                )
                traces = descend(
                    problem,
                    arms,
                    seeds=scope.seeds,
                    rounds=rounds,
                    steps=2,
                    records=80,
                    measured=scope.measured,
                )
                floor = problem.floor(fleet_levels(even))
                cases.append(
                    Case(problem.name, data, participation, tuple(traces), floor, problem.heterogeneity)
                )
    return cases


def fleet_levels(counts: Sequence[int]) -> list[int]:
    """The depth of every device of the fleet where a cohort has these counts of each."""
    each = DEVICES // sum(counts)
    return [depth for depth, count in enumerate(counts, start=1) for _ in range(count * each)]


@dataclass(frozen=True)
class Theorem:
    """Runs with the step size of Theorem 1, its λ large enough for the proof, and one outside the condition."""

    inside: tuple[Trace, ...]  # FedAvg, FedPMT
    outside: Trace
    assumed: tuple[Constants, ...]  # what λ and the bound are computed from; ε is what the step size used


def theorem(scope: Scope) -> Theorem:
    """The quadratic with three blocks, where Proposition 1 holds, τ = 2.

    ε is not known before the run, and the run depends on it: a pilot gives a first value, and the run
    uses half of it. That the ε measured in the run is no smaller is checked by the reader of its result.
    """
    problem = Quadratic(
        devices=6, blocks=3, size=24, strong_convexity=2.0, smoothness=4.0, noise=1.0
    )  # L != 1 tells the two forms of the bound apart
    even, full = (2, 2, 2), (0, 0, 6)
    pilot = descend(
        problem,
        [Arm(FEDPMT, even, small_offset(problem))],
        seeds=scope.seeds, rounds=scope.pilot_rounds, steps=2, records=400, measured=400,
    )[0]  # fmt: skip
    epsilons = (1.0, pilot.constants.epsilon / 2)
    arms = []
    for name, counts, epsilon in zip((FEDAVG, FEDPMT), (full, even), epsilons, strict=True):
        known = replace(pilot.constants, epsilon=epsilon)
        shares = Arm(name, counts, 0.0).shares
        arms.append(Arm(name, counts, least_offset(known, shares, problem.devices), epsilon))
    inside = descend(
        problem, arms, seeds=scope.seeds, rounds=scope.theorem_rounds, steps=2, records=1000, measured=1000
    )
    return Theorem(
        tuple(inside),
        pilot,
        tuple(
            replace(trace.constants, epsilon=epsilon) for trace, epsilon in zip(inside, epsilons, strict=True)
        ),
    )


def gap(scope: Scope) -> list[Case]:
    """Mixes of depths from rich to poor on i.i.d. data, one local step, same step sizes and same draws for all."""
    cases = []
    for problem, rounds in (
        (quadratic(), scope.gap_rounds),
        (softmax(pooled=True), scope.softmax_gap_rounds),
    ):
        offset = small_offset(problem)
        arms = [Arm(FEDAVG if not index else FEDPMT, mix, offset) for index, mix in enumerate(MIXES)]
        traces = descend(problem, arms, seeds=scope.seeds, rounds=rounds, steps=1, records=120, measured=1)
        cases.append(Case(problem.name, "i.i.d.", "full", tuple(traces)))
    return cases


def coupled(scope: Scope) -> Case:
    """The i.i.d. quadratic whose blocks feel each other, L = 16: the rate holds, Proposition 1 need not."""
    problem = quadratic(coupling=math.pi / 4, smoothness=16.0)
    offset = small_offset(problem)
    arms = [
        Arm(FEDAVG, MIXES[0], offset),
        Arm(f"{FEDPMT}, {_name(MIXES[3])}", MIXES[3], offset),
        Arm(f"{FEDPMT}, {_name(MIXES[-1])}", MIXES[-1], offset),
    ]
    traces = descend(
        problem,
        arms,
        seeds=scope.seeds,
        rounds=scope.gap_rounds,
        steps=2,
        records=120,
        measured=scope.measured,
    )
    return Case("quadratic, coupled blocks", "i.i.d.", "full", tuple(traces))


def _name(mix: Sequence[int]) -> str:
    return "-".join(map(str, mix))


@dataclass(frozen=True)
class Floor:
    """What fixed levels leave behind on one problem, measured, computed, and over other ways to give out the levels."""

    problem: str
    data: str
    heterogeneity: float  # Λ
    fixed: Trace
    redrawn: Trace
    computed: float  # F(w°) - F*
    assigned: np.ndarray  # the same for random assignments of the levels
    start: float  # F(w^1) - F*


def floor(scope: Scope) -> list[Floor]:
    """The floor against how much the devices differ."""
    problems: list[tuple[Problem, str]] = [
        *((quadratic(difference=value), f"centres ± {value:g}") for value in (0.03, 0.1, 0.3, 1.0)),
        *((softmax(own=share), f"synthetic(1, 1), {share:.0%} own") for share in (0.0, 0.1, 0.3, 1.0)),
        *((softmax(alpha), f"synthetic({alpha:g}, {alpha:g}), 100% own") for alpha in (0.5, 0.0)),
    ]
    levels = fleet_levels((DEVICES // DEPTHS,) * DEPTHS)
    floors = []
    for problem, data in problems:
        offset = small_offset(problem)
        even = (DEVICES // DEPTHS,) * DEPTHS
        arms = [Arm(FIXED, even, offset), Arm(REDRAWN, even, offset, redrawn=True)]
        fixed, redrawn = descend(
            problem, arms, seeds=scope.seeds, rounds=scope.floor_rounds, steps=2, records=60, measured=1
        )
        rng = generator(0, "theory/assignments")
        others = [problem.floor(rng.permutation(levels).tolist()) for _ in range(scope.assignments)]
        floors.append(
            Floor(
                problem.name.split(" ")[0], data, problem.heterogeneity, fixed, redrawn, problem.floor(levels),
                np.array(others), float(problem.losses(problem.start)) - problem.minimum,
            )
        )  # fmt: skip
    return floors


def plans(scope: Scope) -> list[Case]:
    """Fixed levels, two classes per device: the paper's plan, and ours within the same budget, under each mean."""
    even, full = (DEVICES // DEPTHS,) * DEPTHS, (0,) * (DEPTHS - 1) + (DEVICES,)
    cases = []
    for problem, rounds in (
        (quadratic(difference=1.0, two_classes=True), scope.quadratic_rounds),
        (Softmax(devices=DEVICES, blocks=DEPTHS, two_classes=True), scope.softmax_rounds),
    ):
        # What the bound of the unbiased mean asks for, 4 τ L / μ.
        offset = 2 * small_offset(problem)
        arms = [Arm(FEDAVG, full, offset)]
        arms += [
            Arm(f"{plan}, {normalise}", even, offset, plan=plan, normalise=normalise)
            for plan, normalise in PLANS
        ]
        traces = descend(
            problem,
            arms,
            seeds=scope.seeds,
            rounds=rounds,
            steps=PLANNED_STEPS,
            records=80,
            measured=scope.measured,
        )
        rests = tuple(problem.pulled(mean_pull(arm, PLANNED_STEPS)) for arm in arms)
        cases.append(
            Case(
                problem.name.split(" ")[0], "two classes", "full", tuple(traces),
                heterogeneity=problem.heterogeneity, rests=rests,
            )
        )  # fmt: skip
    return cases
