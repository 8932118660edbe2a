"""Theorem 1's bound, runs of it against what is known in closed form, and the problems it is tried on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpmt.seeds import generator
from reproduction.artefact import Artefact, publish
from reproduction.convergence import build, convergence
from reproduction.theory import Constants, least_offset, loss_bound, splitting_constant, studies
from reproduction.theory.bound import interval, level, ratio, slope, unbiased_bound
from reproduction.theory.descent import (
    CHUNK,
    TURNS,
    Arm,
    Pairs,
    Trace,
    _seat,
    descend,
    mean_pull,
    mean_weights,
)
from reproduction.theory.problems import Problem, Quadratic, Softmax, _sort_by_class, coverage
from reproduction.theory.studies import FIXED, Scope

if TYPE_CHECKING:
    from pathlib import Path

mixes = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(lambda counts: counts[-1] > 0)


def shares_of(counts: list[int]) -> list[float]:
    return [count / sum(counts) for count in counts]


@pytest.mark.parametrize("depths", [1, 3, 5])
def test_psi_of_full_depth_is_the_number_of_depths(depths: int) -> None:
    assert splitting_constant([0.0] * (depths - 1) + [1.0]) == depths


@given(mixes)
def test_psi_is_least_at_full_depth_and_falls_when_a_device_trains_more(counts: list[int]) -> None:
    psi = splitting_constant(shares_of(counts))
    assert psi >= len(counts) * (1 - 1e-12)
    if len(counts) > 1 and counts[0]:
        promoted = [counts[0] - 1, counts[1] + 1, *counts[2:]]
        assert splitting_constant(shares_of(promoted)) < psi


@given(mixes, st.integers(1, 100))
def test_the_appendix_writes_psi_for_widths_times_cohort_as_much(counts: list[int], cohort: int) -> None:
    shares = shares_of(counts)
    expected = len(counts) * cohort * splitting_constant(shares)
    assert splitting_constant(shares, "appendix", cohort) == pytest.approx(expected)


def test_psi_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ValueError, match="did you mean 'appendix'"):
        splitting_constant([1.0], "apendix")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="devices per round"):
        splitting_constant([1.0], "appendix")
    assert splitting_constant([1.0, 0.0]) == math.inf


CONSTANTS = Constants(
    strong_convexity=2.0,
    smoothness=4.0,
    distance=3.0,
    gradient_square=5.0,
    noise=7.0,
    heterogeneity=0.5,
    epsilon=0.5,
)


def test_the_bound_by_hand() -> None:
    """p = (1/2, 1/2), |S| = 10, τ = 3, λ = 999, T = 1.

    ψ = 3, |I| ψ + |S| = 16, least λ = 4 * 2 * 16 / 0.25 - 1 = 511
    Δ̃ = (8 * 4 * 5 + 2 * 4 * 16.5 * 0.5 + 2 * 7 * 3) / 0.25 = (160 + 66 + 42) / 0.25 = 1072
    printed = (1000 * 3 / 2 + 2 * 1072 / 4) / 1000 = (1500 + 536) / 1000
    """
    given_all = {"cohort": 10, "rounds": 1, "steps": 3, "offset": 999.0}
    assert least_offset(CONSTANTS, [0.5, 0.5], 10) == 511
    assert loss_bound(CONSTANTS, [0.5, 0.5], form="printed", **given_all) == pytest.approx(2.036)  # type: ignore[arg-type]
    assert loss_bound(CONSTANTS, [0.5, 0.5], form="proof", **given_all) == pytest.approx(4 * 2.036)  # type: ignore[arg-type]


@given(mixes, st.integers(1, 50), st.floats(0.01, 1.0))
def test_the_least_offset_meets_the_condition_of_the_proof_with_equality(
    counts: list[int], cohort: int, epsilon: float
) -> None:
    constants = Constants(0.5, 2.0, 1.0, epsilon=epsilon)
    shares = shares_of(counts)
    offset = least_offset(constants, shares, cohort)
    first_step = 2 / (0.5 * epsilon * (1 + offset))
    most = epsilon / (2 * 2.0 * (len(shares) * splitting_constant(shares) + cohort))
    assert first_step == pytest.approx(most)
    with pytest.raises(ValueError, match="the proof needs a λ of at least"):
        loss_bound(constants, shares, cohort=cohort, rounds=1, offset=offset * 0.99)


@given(mixes)
def test_the_bound_is_widest_for_the_poorest_mix(counts: list[int]) -> None:
    shares, full = shares_of(counts), [0.0] * (len(counts) - 1) + [1.0]
    bound, best = (loss_bound(CONSTANTS, mix, cohort=10, rounds=1000, offset=1e6) for mix in (shares, full))
    assert bound >= best * (1 - 1e-12)


def test_nothing_is_claimed_where_epsilon_is_not_positive() -> None:
    constants = Constants(1.0, 1.0, 1.0, epsilon=-0.1)
    assert not constants.covered
    assert loss_bound(constants, [1.0], cohort=1, rounds=10) == math.inf


def test_an_epsilon_above_one_counts_as_one() -> None:
    shares = [0.0, 1.0]
    assert least_offset(Constants(1.0, 1.0, 1.0, epsilon=1.3), shares, 4) == least_offset(
        Constants(1.0, 1.0, 1.0), shares, 4
    )


def test_wrong_constants_are_refused() -> None:
    with pytest.raises(ValueError, match="0 < μ <= L"):
        Constants(2.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="form = 'prof' is unknown; did you mean 'proof'"):
        loss_bound(CONSTANTS, [1.0], cohort=1, rounds=1, form="prof")  # type: ignore[arg-type]


def test_the_printed_bound_is_broken_where_the_one_of_the_proof_holds() -> None:
    """No noise, devices alike, τ = 1, all curvatures L = 9: F(w^1) - F* = 9/2 Γ_1, and the printed bound is Γ_1 / 2."""
    problem = Quadratic(devices=2, blocks=2, size=1, strong_convexity=9.0, smoothness=9.0, noise=0.0)
    constants = Constants(9.0, 9.0, problem.distance)
    error = float(problem.losses(problem.start)) - problem.minimum
    printed, proof = (
        loss_bound(constants, [0.0, 1.0], cohort=2, rounds=1, form=form) for form in ("printed", "proof")
    )
    assert error == pytest.approx(9.0)
    assert printed == pytest.approx(1.0)
    assert error <= proof == pytest.approx(9.0)


def small(difference: float = 0.0, noise: float = 1.0, devices: int = 4) -> Quadratic:
    return Quadratic(devices=devices, blocks=2, size=3, smoothness=3.0, difference=difference, noise=noise)


@pytest.mark.parametrize(
    "problem",
    [small(0.5), Softmax(devices=4, blocks=2, features=3, samples=10)],
    ids=["quadratic", "softmax"],
)
def test_full_depth_for_all_is_fedavg_bit_for_bit(problem: Problem) -> None:
    rounds, steps, seed = 12, 3, 7
    trace = descend(
        problem, [Arm("all", (0, 4), 30.0)], seeds=[seed], rounds=rounds, steps=steps, records=100
    )[0]
    draws = problem.draw(generator(seed, "theory/gradient", 1), (CHUNK, steps, 4))
    model, errors = problem.start, []
    for t in range(1, rounds + 1):
        errors.append(float(problem.losses(model)) - problem.minimum)
        change = np.zeros_like(model)
        for device in range(4):
            local = model
            for step in range(steps):
                owner = np.array([device])
                gradient = problem.noisy_gradients(local[None], owner, draws[t - 1, step, device][None])[0]
                local = local - 2 / (problem.strong_convexity * 1.0) / (t + 30.0) * gradient
            change = change + 0.25 * (local - model)
        model = model + change
    assert trace.errors[0].tolist() == errors


def test_one_round_by_hand() -> None:
    """H = I, w = (1, 1), centre 0, η_1 = 2 / (1 + 3) = 1/2, two steps: a trained entry goes to 1/4, on every device."""
    problem = Quadratic(devices=2, blocks=2, size=1, noise=0.0)
    trace = descend(problem, [Arm("thin", (2, 0), 3.0)], seeds=[0], rounds=2, steps=2)[0]
    # Nobody trains the first block, so it stays at 1.
    assert trace.errors[0].tolist() == [1.0, (1 + 1 / 16) / 2]


def test_a_seed_and_an_arm_do_not_depend_on_their_company() -> None:
    problem = small(0.3, devices=8)
    arms = [Arm("a", (2, 2), 20.0), Arm("b", (2, 2), 20.0, redrawn=True), Arm("c", (0, 4), 50.0, epsilon=0.5)]
    together = descend(problem, arms, seeds=[3, 5, 8], rounds=200, steps=2)
    for arm, trace in zip(arms, together, strict=True):
        alone = descend(problem, [arm], seeds=[5], rounds=200, steps=2)[0]
        assert alone.errors[0].tolist() == trace.errors[1].tolist()


def test_who_sits_where() -> None:
    problem = small(0.3, devices=8)
    fixed, redrawn, full = Arm("f", (3, 1), 9.0), Arm("r", (3, 1), 9.0, redrawn=True), Arm("a", (0, 4), 9.0)
    seats = _seat(problem, [fixed, redrawn, full], [0, 1], 1)
    assert seats.shape == (CHUNK, 3, 2, 4)
    assert (np.diff(np.sort(seats, axis=-1), axis=-1) > 0).all()
    # Of eight devices with three of four at depth 1, those are the first six.
    assert (seats[:, 0, :, :3] < 6).all()
    assert (seats[:, 0, :, 3] >= 6).all()
    for arm in range(3):
        seen = np.bincount(seats[:, arm].ravel(), minlength=8) / seats[:, arm].size
        assert seen == pytest.approx(np.full(8, 1 / 8), abs=0.03)
    everybody = _seat(problem, [Arm("f", (6, 2), 9.0), Arm("r", (6, 2), 9.0, redrawn=True)], [0], 1)
    assert (everybody[:, 0] == np.arange(8)).all()
    assert (np.sort(everybody[:, 1], axis=-1) == np.arange(8)).all()
    assert not (everybody[:, 1] == np.arange(8)).all()


def test_fixed_levels_end_on_the_computed_floor_and_redrawn_ones_do_not() -> None:
    problem = small(0.5, noise=0.0)
    arms = [Arm("fixed", (2, 2), 24.0), Arm("redrawn", (2, 2), 24.0, redrawn=True)]
    fixed, redrawn = descend(problem, arms, seeds=[0, 1], rounds=3000)
    expected = problem.floor([1, 1, 2, 2])
    assert expected > 0.01
    assert fixed.errors[:, -1] == pytest.approx(expected, rel=1e-3)
    assert redrawn.errors[:, -1].max() < 0.1 * expected


PLANS = [
    Arm(f"{plan}, {normalise}", (2, 2), 48.0, plan=plan, normalise=normalise)
    for plan, normalise in studies.PLANS
]


def test_what_plans_make_of_a_budget() -> None:
    """|I| = 2, τ = 4: a step of depth 1 costs 2/3 of a full one, so its budget buys 2 full steps."""
    paper, traded, rotated = (Pairs.of(PLANS[place], 4) for place in (0, 1, 3))
    assert paper.depths.tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]
    assert paper.steps.tolist() == [[4, 4]] * 4
    assert traded.depths.tolist() == [[2, 2]] * 4
    assert traded.steps.tolist() == [[2, 2], [2, 2], [4, 4], [4, 4]]
    assert rotated.depths.tolist() == [[1, 2], [1, 2], [2, 2], [2, 2]]
    assert rotated.steps.tolist() == [[4, 2], [4, 2], [4, 4], [4, 4]]
    assert rotated.chances.tolist() == [[1 - 1 / TURNS, 1 / TURNS]] * 4


@pytest.mark.parametrize("arm", PLANS, ids=lambda arm: arm.name)
def test_weights_are_those_of_the_library(arm: Arm) -> None:
    """Devices of four samples each change every block by their number: what `MeanFold` makes of it, draw by draw."""
    import torch
    from torch import nn

    from fedpmt.methods.averaging import Averaged, MeanFold
    from fedpmt.methods.base import Server
    from fedpmt.models.layered import layered
    from fedpmt.parts.depth import suffixes
    from fedpmt.training.messages import UPDATE, Chance, Reply

    model = layered(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)))
    masks, pairs = suffixes(model.structure, 2), Pairs.of(arm, 4)
    for seed in range(8):
        turns = np.random.default_rng(seed).random(4) < 0.5
        weights, steps = mean_weights(arm, pairs, turns)
        state = Averaged(
            model.structure, {name: torch.zeros(1, 1, dtype=torch.float64) for name in model.initial()}
        )
        fold = MeanFold(state, "overlap", "samples", normalise=arm.normalise)
        for device, turn in enumerate(turns.astype(int)):
            chances = tuple(
                Chance(float(chance), masks[depth - 1], int(count))
                for chance, depth, count in zip(*(values[device] for values in pairs), strict=True)
            )
            update = {
                name: torch.full((1, 1), device + 1.0, dtype=torch.float64)
                for name in chances[turn].part.trained
            }
            fold.add(
                Reply(device, 0, chances[turn].part, 4, {UPDATE: update}, steps=int(steps[device]), chances=chances)
            )  # fmt: skip
        found = [float(tensor) for tensor in fold.finish(Server(None)).state.tensors.values()]  # type: ignore[arg-type]
        assert found == pytest.approx((weights * np.arange(1, 5)[:, None]).sum(axis=0).tolist())


def test_only_the_right_mean_pulls_alike() -> None:
    for arm in PLANS:
        pull = mean_pull(arm, 4)
        alike = bool(np.allclose(pull, pull[0]))
        assert alike == (arm.name in ("traded, steps", "rotated, draws"))


@pytest.mark.parametrize(
    ("problem", "rounds"),
    [
        (Quadratic(devices=4, blocks=2, size=3, smoothness=3.0, difference=2.0, two_classes=True), 6000),
        (
            Softmax(
                devices=4, blocks=2, features=3, samples=20, two_classes=True, regularisation=0.1, seed=2
            ),
            2500,
        ),
    ],
    ids=["quadratic", "softmax"],
)
def test_fixed_levels_and_two_classes_converge_under_the_right_mean_only(
    problem: Problem, rounds: int
) -> None:
    arms = [replace(arm, offset=16 * problem.smoothness / problem.strong_convexity) for arm in PLANS]
    for trace in descend(problem, arms, seeds=range(6), rounds=rounds, steps=4, measured=4):
        rest = problem.pulled(mean_pull(trace.arm, 4))
        if trace.arm.name in ("traded, steps", "rotated, draws"):
            assert rest == pytest.approx(0, abs=1e-12)
            assert slope(trace).mean == pytest.approx(-1, abs=0.3)  # six seeds of a short run
        else:
            assert slope(trace).mean == pytest.approx(0, abs=0.15)
            assert level(trace).mean == pytest.approx(rest, rel=0.2)


def test_two_classes_are_two() -> None:
    problem = Softmax(devices=6, blocks=3, features=5, samples=20, two_classes=True)
    held = (problem.answers.sum(axis=1) > 0).sum(axis=-1)
    assert held.tolist() == [2] * 6
    assert problem.answers.shape == (6, 20, 10)
    with pytest.raises(ValueError, match="two classes are refused"):
        _sort_by_class(np.zeros((2, 4), dtype=np.int64))


def test_the_bound_of_the_unbiased_mean_by_hand() -> None:
    """μ = 1, L = 2, χ = 2, |S| = 8, τ = 3, τ̄ = 2, G² = 8: D = 16 (1/8 + 3/2 · 2 · 1) = 50.

    v = max((λ + 1) Γ_1, 4 · 4 · 50 / 1) = 800; with Γ_1 = 100 and λ = 24 it is 25 · 100.
    """
    for distance, v in ((1.0, 800.0), (100.0, 2500.0)):
        known = Constants(1.0, 2.0, distance, gradient_square=8.0)
        found = unbiased_bound(known, chance=0.5, cohort=8, rounds=76, steps=3, mean_steps=2.0, offset=24.0)
        assert found == pytest.approx(v / 100)
    for wrong, match in (
        ({"mean_steps": 1.0}, "mean_steps must be > 1"),
        ({"offset": 14.0}, "offset must be >= 15"),
    ):
        given_all = {"chance": 0.5, "cohort": 8, "rounds": 1, "steps": 3, "mean_steps": 2.0, "offset": 24.0}
        with pytest.raises(ValueError, match=match):
            unbiased_bound(known, **given_all | wrong)  # type: ignore[arg-type]


def test_epsilon_at_the_start_by_hand() -> None:
    """H = I, w - w* = (1, 1), two devices of depth 1 and 2, before any step.

    Depth 1: |S| * (1/2 * 1 * 1) over (1/2 * 2 + 1/2 * 2) = 1/2. Depth 2: 2 * (1 + 1/2) / 2 = 3/2. The least is 1/2.
    Summed over the two, (1/2 * 2 + 3/2 * 2) / 4 = 1: devices that are alike keep all they know between them.
    G² = ‖(1, 1)‖² = 2.
    """
    problem = Quadratic(devices=2, blocks=2, size=1, noise=0.0)
    trace = descend(problem, [Arm("even", (1, 1), 5.0)], seeds=[0], rounds=1)[0]
    assert trace.constants.epsilon == pytest.approx(0.5)
    assert trace.summed == pytest.approx(1.0)
    assert trace.constants.gradient_square == pytest.approx(2.0)
    assert (trace.constants.noise, trace.constants.heterogeneity, trace.constants.distance) == (0.0, 0.0, 2.0)
    assert trace.failing == 0


def test_epsilon_is_at_least_one_for_fedavg_and_negative_for_fixed_levels_on_differing_data() -> None:
    problem = small(1.0)
    full, fixed = descend(problem, [Arm("a", (0, 4), 24.0), Arm("f", (3, 1), 24.0)], seeds=[0, 1], rounds=500)
    assert full.constants.epsilon >= 1
    assert full.failing == 0
    assert not fixed.constants.covered
    assert 0 < fixed.failing < 1


def test_devices_that_are_alike_lose_nothing_between_them() -> None:
    """With τ = 1 and F_k = F, Σ_k A_k ∘ ∇F_k = ∇F whatever the depths, so the summed ratio is at least 1."""
    problem = Quadratic(devices=4, blocks=2, size=3, smoothness=3.0, coupling=0.5)
    trace = descend(problem, [Arm("even", (3, 1), 24.0)], seeds=[0, 1], rounds=300)[0]
    assert trace.summed >= 1 - 1e-12
    assert trace.constants.epsilon < 0.2


def test_the_variance_of_the_global_gradient_is_far_below_lemma_1() -> None:
    """Independent noise, equal blocks: Σ_l (δ² / |I|) / |C_l| = δ² ψ / (|I| |S|), where Lemma 1 has 2 |I| δ² ψ."""
    problem, arm = small(), Arm("even", (3, 1), 0.0)
    draws = problem.draw(np.random.default_rng(0), (20_000, 4))
    blur = (coverage(arm.levels, problem.blocks) * draws).sum(axis=1)
    psi, noise = splitting_constant(arm.shares), float(problem.variances(problem.start, np.array(0)))
    assert (blur**2).sum(axis=1).mean() == pytest.approx(noise * psi / (2 * 4), rel=0.03)


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks, so as many depths"):
        descend(small(), [Arm("a", (4,), 1.0)], seeds=[0], rounds=1)
    with pytest.raises(ValueError, match="a divisor of 4"):
        descend(small(), [Arm("a", (1, 2), 1.0)], seeds=[0], rounds=1)


def trace_of(errors: np.ndarray, rounds: np.ndarray, offset: float) -> Trace:
    constants = descend(small(), [Arm("a", (2, 2), 9.0)], seeds=[0], rounds=1)[0].constants
    return Trace(Arm("a", (2, 2), offset), rounds, errors, constants, 0.0, 1.0)


def test_slopes_levels_and_ratios() -> None:
    rounds = np.arange(1, 1001)
    factors = np.array([[1.0], [2.0], [4.0]])
    falling = trace_of(factors / (rounds + 50.0), rounds, 50.0)
    resting = trace_of(factors + 0.0 * rounds, rounds, 50.0)
    assert slope(falling).mean == pytest.approx(-1)
    assert slope(falling).half == pytest.approx(0, abs=1e-9)
    assert slope(resting).mean == pytest.approx(0, abs=1e-12)
    assert level(resting).mean == pytest.approx(7 / 3)
    assert ratio(trace_of(3 * falling.errors, rounds, 50.0), falling).mean == pytest.approx(3)


def test_the_interval_by_hand() -> None:
    """Mean 2, deviation 1, three seeds: 4.302653 / sqrt(3)."""
    assert interval(np.array([1.0, 2.0, 3.0])).half == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert interval(np.array([5.0])).half == np.inf


LEVELS = [1, 1, 2, 2, 3, 3]


def problems() -> list[Problem]:
    return [
        Quadratic(devices=6, blocks=3, size=3, smoothness=5.0, difference=0.5),
        Quadratic(devices=6, blocks=3, size=3, smoothness=5.0, difference=0.5, coupling=0.4),
        Quadratic(devices=6, blocks=3, size=3, smoothness=5.0),
        Softmax(devices=6, blocks=3, features=5, samples=20, own=0.5),
        Softmax(devices=6, blocks=3, features=5, samples=20, pooled=True),
    ]


every_problem = pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)


def some_points(problem: Problem) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(problem.devices, problem.dimension))


@every_problem
def test_gradients_are_those_of_the_losses(problem: Problem) -> None:
    points, owners = some_points(problem), problem.everybody
    gradients = problem.local_gradients(points, owners)
    for entry in range(0, problem.dimension, 4):
        nudge = 1e-5 * np.eye(problem.dimension)[entry]
        difference = problem.local_losses(points + nudge, owners) - problem.local_losses(
            points - nudge, owners
        )
        assert difference / 2e-5 == pytest.approx(gradients[:, entry], abs=1e-8)


@every_problem
def test_hessians_are_those_of_the_gradients_and_within_mu_and_l(problem: Problem) -> None:
    point, owners = some_points(problem)[0], problem.everybody
    hessians = problem.hessians(point, owners)
    nudge = 1e-5 * np.eye(problem.dimension)[1]
    difference = problem.gradients(point + nudge, owners) - problem.gradients(point - nudge, owners)
    assert difference / 2e-5 == pytest.approx(hessians[:, 1], abs=1e-8)
    curvatures = np.linalg.eigvalsh(hessians)
    assert curvatures.min() == pytest.approx(problem.strong_convexity)
    assert curvatures.max() <= problem.smoothness * (1 + 1e-12)


@every_problem
def test_optima_have_no_gradient_and_lie_lowest(problem: Problem) -> None:
    gradients = problem.gradients(problem.optimum, problem.everybody)
    assert np.abs(gradients.mean(axis=0)).max() < 1e-10
    at_optimum = problem.local_losses(np.tile(problem.optimum, (problem.devices, 1)), problem.everybody)
    assert (problem.local_minima <= at_optimum + 1e-12).all()
    assert (problem.losses(some_points(problem)) > problem.minimum).all()
    assert problem.heterogeneity == pytest.approx(
        float((at_optimum - problem.local_minima).mean()), abs=1e-12
    )
    assert (problem.heterogeneity == 0) == problem.alike


@every_problem
def test_fixed_levels_rest_where_no_block_is_pulled(problem: Problem) -> None:
    rest = problem.rest(LEVELS)
    pulls = coverage(LEVELS, problem.blocks) * problem.gradients(rest, problem.everybody)
    assert np.abs(pulls.sum(axis=0)).max() < 1e-9
    assert (problem.floor(LEVELS) == 0) == problem.alike
    assert problem.floor([3] * 6) == pytest.approx(0, abs=1e-12)


@every_problem
def test_noise_has_no_mean_and_the_variance_it_says(problem: Problem) -> None:
    rng = np.random.default_rng(2)
    points = np.broadcast_to(some_points(problem), (4000, problem.devices, problem.dimension))
    owners = np.broadcast_to(problem.everybody, (4000, problem.devices))
    draws = problem.draw(rng, (4000, problem.devices))
    off = problem.noisy_gradients(points, owners, draws) - problem.local_gradients(points[0], owners[0])
    variances = problem.variances(points[0], owners[0])
    assert (off**2).sum(axis=-1).mean(axis=0) == pytest.approx(variances, rel=0.1)
    assert ((off.mean(axis=0) ** 2).sum(axis=-1) < 5 * variances / 4000).all()


def test_the_floor_of_a_quadratic_by_hand() -> None:
    """Two devices, two entries, H = I: block 1 is averaged over device 2 alone, so w° = (c_21, mean c_2)."""
    problem = Quadratic(devices=2, blocks=2, size=1, difference=1.0)
    centres = problem.centres
    assert problem.optimum == pytest.approx(centres.mean(axis=0))
    assert problem.rest([1, 2]) == pytest.approx([centres[1, 0], centres[:, 1].mean()])
    assert problem.floor([1, 2]) == pytest.approx((centres[0, 0] - centres[1, 0]) ** 2 / 8)


def test_dealing_the_samples_out_again_leaves_the_global_objective() -> None:
    apart, mixed, pooled = (
        Softmax(devices=6, blocks=3, features=5, samples=20, own=own, pooled=pooled)
        for own, pooled in ((1.0, False), (0.0, False), (1.0, True))
    )
    points = some_points(apart)
    assert mixed.losses(points) == pytest.approx(apart.losses(points))
    assert pooled.losses(points) == pytest.approx(apart.losses(points))
    assert mixed.heterogeneity < apart.heterogeneity
    assert apart.smoothness == pytest.approx(1.02)


def test_coverage_is_equation_7() -> None:
    """Widths 1, 2, 3, 3 over three blocks: 2, 3 and 4 devices train them."""
    expected = [[0, 0, 1 / 4], [0, 1 / 3, 1 / 4], [1 / 2, 1 / 3, 1 / 4], [1 / 2, 1 / 3, 1 / 4]]
    assert coverage([1, 2, 3, 3], [1, 1, 1]) == pytest.approx(np.array(expected))
    assert (coverage([1, 1], [2, 1])[:, :2] == 0).all()


def test_theory_needs_no_torch() -> None:
    code = "import sys, reproduction.theory.studies; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


SHORT = Scope(
    seeds=(0, 1),
    quadratic_rounds=600,
    softmax_rounds=40,
    theorem_rounds=1500,
    pilot_rounds=800,
    gap_rounds=3000,
    softmax_gap_rounds=40,
    floor_rounds=60,
    assignments=2,
    measured=4,
)


@pytest.fixture(scope="module")
def artefact() -> Artefact:
    return build(SHORT)


@pytest.mark.slow
def test_it_can_be_published(artefact: Artefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The versions are known only where the package is installed.
    monkeypatch.setattr("reproduction.artefact.versions", lambda: ["fedpmt 0"])
    paths = publish(artefact, tmp_path)
    assert {path.suffix for path in paths} == {".md", ".html", ".json", ".svg"}
    page = (tmp_path / "convergence.md").read_text()
    assert "Theorem 1 does not cover this case" in page
    assert "python -m reproduction convergence" in page
    assert "nan" not in page
    assert "inf" not in json.dumps(json.loads((tmp_path / "convergence.json").read_text())["theorem"])


def test_every_row_fits_its_columns(artefact: Artefact) -> None:
    assert [table.title for table in artefact.tables] == [
        "The rate",
        "ε of Proposition 1",
        "The bound and the error, step size of Theorem 1",
        "The gap against ψ",
        "The floor of fixed levels",
        "Plans within one budget: two classes per device, levels fixed",
    ]
    for table in artefact.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_bound_is_above_the_error_and_the_proof_gives_l_times_the_printed_one(artefact: Artefact) -> None:
    for run in artefact.values["theorem"]:
        assert run["bound"]["proof"] == pytest.approx(
            run["constants"]["smoothness"] * run["bound"]["printed"]
        )
        assert run["errors"][-1] < run["bound"]["printed"]
        assert run["constants"]["epsilon"] >= run["assumed_epsilon"] > 0


def test_fixed_levels_on_differing_data_are_never_covered(artefact: Artefact) -> None:
    seen = 0
    for case in artefact.values["rate"]:
        for arm in case["arms"]:
            if arm["name"] == FIXED:
                seen += 1
                assert arm["constants"]["epsilon"] <= 0
                assert case["floor"] > 0
    assert seen == 4


def test_the_poorest_mix_is_the_furthest_from_fedavg(artefact: Artefact) -> None:
    """On the quadratic the error is ψ / |I| times FedAvg's; a short run knows it to some tens of percent."""
    arms = artefact.values["gap"][0]["arms"]
    assert arms[0]["psi"] == 4
    assert arms[-1]["ratio"][0] == max(arm["ratio"][0] for arm in arms)
    assert arms[-1]["ratio"][0] == pytest.approx(arms[-1]["psi"] / 4, rel=0.5)


def test_the_bound_of_the_unbiased_mean_is_above_the_error(artefact: Artefact) -> None:
    bounded = 0
    for case in artefact.values["plans"]:
        assert [arm["bound"] is not None for arm in case["arms"]] == [
            arm["rest"] < 1e-9 for arm in case["arms"]
        ]
        for arm in case["arms"]:
            if arm["bound"] is not None:
                bounded += 1
                assert arm["errors"][-1] < arm["bound"]
    assert bounded == 6  # FedAvg, traded by steps, rotated by draws; on two problems


def test_quick_takes_fewer_seeds_and_rounds() -> None:
    assert Scope.of([5], quick=True).seeds == (5,)
    assert Scope.of(range(10), quick=True).theorem_rounds < Scope.of(range(10), quick=False).theorem_rounds
    assert len(Scope.of(range(10), quick=False).seeds) == 10


@pytest.mark.slow
def test_the_quick_run() -> None:
    artefact = convergence(quick=True, seeds=range(3))
    assert artefact.command == "python -m reproduction convergence --seeds 0-2 --quick"
    assert "far too short" in artefact.text
    assert all(math.isfinite(arm["slope"][0]) for case in artefact.values["rate"] for arm in case["arms"])
