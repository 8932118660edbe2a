"""The test problems are what they say: gradients, curvatures, optima and noise."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from reproduction.theory.problems import Problem, Quadratic
from reproduction.theory.softmax import Softmax
from reproduction.theory.stationary import coverage

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
