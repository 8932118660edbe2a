"""Who is asked in a round, and who arrives in time."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from fedpmt.devices.fleet import Fleet, from_levels
from fedpmt.seeds import generator
from fedpmt.simulation.cohort import CANDIDATES, SAMPLERS, fastest, settle, stratified, uniform

LEVELS = "1/5,1/4,1/3,1/2,1"


def drawn(sampling: str, count: int, fleet: Fleet, round_index: int = 0, seed: int = 0) -> np.ndarray:
    rng = generator(seed, "cohort", round_index)
    return SAMPLERS[sampling](fleet, count, round_index * count, rng, ())


def per_level(fleet: Fleet, cohort: np.ndarray) -> list[int]:
    counts = Counter(fleet.levels[cohort].tolist())
    return [counts[level + 1] for level in range(len(fleet.level_speeds))]


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("availability", [1.0, 0.6])
def test_every_sampler_draws_different_devices_in_order(sampling: str, availability: float) -> None:
    """No device twice, in device order, as many as asked for; the same for the same generator."""
    fleet = from_levels(LEVELS, 60, seed=0, availability=availability)
    seen = set()
    for round_index in range(20):
        cohort = drawn(sampling, 12, fleet, round_index)
        assert len(cohort) == 12
        assert (np.diff(cohort) > 0).all()
        assert cohort.min() >= 0
        assert cohort.max() < 60
        np.testing.assert_array_equal(cohort, drawn(sampling, 12, fleet, round_index))
        seen.add(tuple(cohort.tolist()))
    assert len(seen) == 20


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_the_whole_fleet_may_be_asked(sampling: str) -> None:
    """A cohort as large as the fleet is the fleet, also when levels are of unequal size."""
    fleet = from_levels("1/4x3,1x17", 20, seed=0)
    assert drawn(sampling, 20, fleet).tolist() == list(range(20))


# stratified


def test_stratified_takes_the_same_number_of_each_level() -> None:
    """|S_i| = |S| / |I|, in every round."""
    fleet = from_levels(LEVELS, 100, seed=0)
    assert all(per_level(fleet, drawn("stratified", 10, fleet, t)) == [2] * 5 for t in range(10))


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 11, 13])
def test_remainders_go_to_the_levels_in_turn(count: int) -> None:
    """In each round levels differ by at most one; over as many rounds as levels they come out even."""
    fleet = from_levels(LEVELS, 100, seed=0)
    rounds = [per_level(fleet, drawn("stratified", count, fleet, t)) for t in range(10)]
    assert all(sum(counts) == count and max(counts) - min(counts) <= 1 for counts in rounds)
    for start in (0, 5):
        assert np.sum(rounds[start : start + 5], axis=0).tolist() == [count] * 5


def test_a_level_too_small_for_its_share_is_made_up_for() -> None:
    """All of the small level, the rest from the others: the cohort keeps its size."""
    fleet = from_levels("1/4x2,1/2x10,1x18", 30, seed=0)
    for t in range(5):
        counts = per_level(fleet, drawn("stratified", 12, fleet, t))
        assert counts[0] == 2
        assert sum(counts) == 12
        assert min(counts[1:]) >= 4


def test_a_level_without_devices() -> None:
    """An empty level takes no share."""
    fleet = from_levels("1/4x20,1", 20, seed=0)
    assert per_level(fleet, drawn("stratified", 6, fleet)) == [6, 0]


def test_every_device_of_a_level_has_the_same_chance() -> None:
    """3 of 20 per level and round: 150 +- 5 deviations in 1,000 rounds, deviation sqrt(1000 0.15 0.85) = 11.3."""
    fleet = from_levels(LEVELS, 100, seed=0)
    asked = np.zeros(100)
    for t in range(1_000):
        asked[drawn("stratified", 15, fleet, t)] += 1
    assert asked.sum() == 15_000
    assert np.abs(asked - 150).max() < 57


# uniform, fastest, availability


def test_uniform_gives_every_device_the_same_chance() -> None:
    """10 of 50 a round: 200 in 1,000 rounds, deviation sqrt(1000 0.2 0.8) = 12.6; levels are not evened out."""
    fleet = from_levels(LEVELS, 50, seed=0)
    asked, shapes = np.zeros(50), set()
    for t in range(1_000):
        cohort = drawn("uniform", 10, fleet, t)
        asked[cohort] += 1
        shapes.add(tuple(per_level(fleet, cohort)))
    assert np.abs(asked - 200).max() < 63
    assert len(shapes) > 20


def test_fastest_takes_the_fastest_of_those_polled() -> None:
    """Twice the cohort is polled; with all of the fleet polled, the fastest of all are taken."""
    fleet = from_levels("uniform:1,10", 20, seed=0)
    expected = np.sort(np.argsort(-fleet.speeds)[:10])
    np.testing.assert_array_equal(drawn("fastest", 10, fleet), expected)
    large = from_levels("uniform:1,10", 1_000, seed=0)
    rng, same = generator(0, "cohort", 0), generator(0, "cohort", 0)
    polled = same.choice(1_000, size=CANDIDATES * 10, replace=False)
    np.testing.assert_array_equal(
        fastest(large, 10, 0, rng), np.sort(polled[np.argsort(-large.speeds[polled])[:10]])
    )


def test_fastest_prefers_fast_devices_but_not_always_the_same() -> None:
    """Speeds of the cohort are above the fleet's; polling keeps the others in play."""
    fleet = from_levels(LEVELS, 100, seed=0)
    cohorts = [drawn("fastest", 10, fleet, t) for t in range(50)]
    assert np.mean([fleet.speeds[cohort].mean() for cohort in cohorts]) > fleet.speeds.mean() + 0.1
    assert len(set(np.concatenate(cohorts).tolist())) > 50


def test_devices_out_of_reach_are_not_asked() -> None:
    """Those whose chance is as good as none do not appear while others can be had."""
    fleet = from_levels("1/4,1", 40, seed=0)
    chances = np.where(np.arange(40) < 20, 1e-12, 1.0)
    reachable = Fleet(fleet.speeds, fleet.levels, fleet.level_speeds, availabilities=chances)
    for sampling in SAMPLERS:
        for t in range(20):
            cohort = drawn(sampling, 8, reachable, t)
            assert len(cohort) == 8
            assert cohort.min() >= 20


@pytest.mark.parametrize("sampler", [stratified, uniform, fastest])
def test_nobody_within_reach(sampler: object) -> None:
    """The cohort is then smaller, or empty; the search for it ends."""
    fleet = from_levels("1/4,1", 10, seed=0, availability=1e-12)
    assert callable(sampler)
    assert len(sampler(fleet, 6, 0, generator(0, "cohort", 0))) == 0


def test_availability_of_the_whole_fleet() -> None:
    """Asked for all: each comes with its chance. 0.3 of 1,000 is 300, deviation 14.5."""
    fleet = from_levels("1", 1_000, seed=0, availability=0.3)
    assert abs(len(drawn("uniform", 1_000, fleet)) - 300) < 73


# the clock


def test_without_a_deadline_the_slowest_decides() -> None:
    """The paper's round: 26.4 s, and 50 s when everybody trains everything."""
    verdict = settle([23.0, 23.2, 26.4, 18.8, 10.0], [False] * 5, None, 5)
    assert (verdict.outcomes, verdict.round_seconds) == (("arrived",) * 5, 26.4)
    assert settle([50.0, 40.0, 30.0, 20.0, 10.0], [False] * 5, None, 5).round_seconds == 50.0


def test_a_deadline_drops_the_late_and_ends_the_round() -> None:
    """26.5 s: three of FedAvg's five levels are late, and the round lasts until the deadline."""
    verdict = settle([50.0, 40.0, 30.0, 20.0, 10.0], [False] * 5, 26.5, 5)
    assert verdict.outcomes == ("late", "late", "late", "arrived", "arrived")
    assert verdict.round_seconds == 26.5


def test_a_round_ends_before_its_deadline_when_all_have_arrived() -> None:
    """Nobody waits for nothing."""
    verdict = settle([23.0, 26.4], [False] * 2, 100.0, 2)
    assert (verdict.outcomes, verdict.round_seconds) == (("arrived", "arrived"), 26.4)


def test_exactly_in_time_is_in_time() -> None:
    """Also where arithmetic leaves a trace: 0.1 + 0.2 against 0.3."""
    assert settle([0.1 + 0.2], [False], 0.3, 1).outcomes == ("arrived",)
    assert settle([0.3 * (1 + 1e-6)], [False], 0.3, 1).outcomes == ("late",)


def test_a_failed_device_is_waited_for() -> None:
    """The server cannot know: it waits as long as the device would have taken, or until the deadline."""
    assert settle([10.0, 30.0], [False, True], None, 2).round_seconds == 30.0
    verdict = settle([10.0, 30.0], [False, True], 26.5, 2)
    assert (verdict.outcomes, verdict.round_seconds) == (("arrived", "failed"), 26.5)
    assert settle([30.0, 10.0], [False, True], None, 2).outcomes == ("arrived", "failed")


def test_of_an_over_selected_cohort_the_first_count() -> None:
    """Five asked, three wanted: the round ends with the third arrival, the others are surplus."""
    verdict = settle([50.0, 12.0, 30.0, 11.0, 10.0], [False] * 5, None, 3)
    assert verdict.outcomes == ("surplus", "arrived", "surplus", "arrived", "arrived")
    assert verdict.round_seconds == 12.0


def test_over_selection_makes_up_for_failures() -> None:
    """A failed device is replaced by the next to arrive; nobody waits for it."""
    verdict = settle([10.0, 11.0, 12.0, 13.0], [True, False, False, False], None, 3)
    assert (verdict.outcomes, verdict.round_seconds) == (("failed", "arrived", "arrived", "arrived"), 13.0)


def test_too_few_of_an_over_selected_cohort() -> None:
    """With a deadline and failures the round lasts until the deadline."""
    verdict = settle([10.0, 50.0, 12.0, 13.0], [False, False, True, False], 26.5, 3)
    assert verdict.outcomes == ("arrived", "late", "failed", "arrived")
    assert verdict.round_seconds == 26.5


def test_ties_go_by_device_order() -> None:
    """Equal times must not be decided by chance."""
    assert settle([1.0, 1.0, 1.0], [False] * 3, None, 2).outcomes == ("arrived", "arrived", "surplus")


def test_nobody_asked_and_nobody_in_time() -> None:
    """An empty round takes no time; one that all miss takes until its deadline."""
    empty = settle([], [], None, 0)
    assert (empty.outcomes, empty.round_seconds) == ((), 0.0)
    assert settle([], [], 5.0, 0).round_seconds == 0.0
    missed = settle([7.0, math.inf], [False, False], 5.0, 2)
    assert (missed.outcomes, missed.round_seconds) == (("late", "late"), 5.0)
