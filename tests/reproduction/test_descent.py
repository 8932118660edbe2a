"""The descent does what Algorithm 1 says, and measures what it says."""

from __future__ import annotations

import numpy as np
import pytest

from fedpmt.pricing.splitting import splitting_constant
from fedpmt.seeds import generator
from reproduction.theory.descent import CHUNK, Arm, Trace, _seat, descend
from reproduction.theory.problems import Problem, Quadratic
from reproduction.theory.rates import interval, level, ratio, slope
from reproduction.theory.softmax import Softmax
from reproduction.theory.stationary import coverage


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
