"""ψ and the bound of Theorem 1, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.theory import Constants, least_offset, loss_bound, splitting_constant
from reproduction.theory.problems import Quadratic

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
