from __future__ import annotations

import math

import numpy as np

from fedpmt.pricing.matching import match_keep


def test_agrees_with_a_search_over_the_whole_grid() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        power, budget = rng.uniform(1, 3), rng.uniform(0, 1200)
        costs = {step / 100: 1000 * (step / 100) ** power for step in range(10, 101)}
        keep, fits = match_keep(lambda rate, power=power: 1000 * rate**power, budget)  # type: ignore[misc]
        assert abs(costs[keep] - budget) == min(abs(cost - budget) for cost in costs.values())
        assert fits == (costs[0.1] <= budget)


def test_asks_for_few_prices() -> None:
    asked: list[float] = []
    match_keep(lambda keep: asked.append(keep) or keep, 0.777)  # type: ignore[func-returns-value]
    assert len(asked) <= 8


def test_of_two_equally_near_rates_takes_the_cheaper() -> None:
    assert match_keep(lambda keep: round(100 * keep), 33.5) == (0.33, True)


def test_ends_of_the_grid() -> None:
    assert match_keep(lambda keep: keep, math.inf) == (1.0, True)
    assert match_keep(lambda keep: keep, 0.1) == (0.1, True)
    assert match_keep(lambda keep: keep, 0.0999) == (0.1, False)
