"""The share of a model's channels that a budget allows. Loads no torch."""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Item = TypeVar("Item")
STEPS = 100  # the paper's rates have two decimals
FLOOR = 10  # its smallest is 0.1


def match_keep(operations_at: Callable[[float], float], budget: float) -> tuple[float, bool]:
    """The rate on the 0.01 grid whose cost is nearest to the budget, and whether any rate fits into it.

    Nearest, not below: the paper's table has rates that cost a little more than their budget. Only
    where even the floor costs more is the answer (0.1, False). The cost must not fall as the rate grows.

    >>> match_keep(lambda keep: 1000 * keep**2, 300), match_keep(lambda keep: 1000 * keep, 50)
    ((0.55, True), (0.1, False))
    """

    @cache
    def cost(step: int) -> float:
        return operations_at(step / STEPS)

    first_above = FLOOR + bisect_right(range(FLOOR, STEPS + 1), budget, key=cost)
    if first_above == FLOOR:
        return FLOOR / STEPS, False
    nearby = [first_above - 1, first_above] if first_above <= STEPS else [STEPS]
    best = min(nearby, key=lambda step: abs(cost(step) - budget))
    return best / STEPS, True


def largest_rate(fits: Callable[[float], bool], floor: float = 1 / STEPS) -> float:
    """The largest rate on the 0.01 grid that fits; where none does, the floor. What fits must shrink with the rate.

    >>> largest_rate(lambda rate: rate**2 <= 0.3), largest_rate(lambda rate: False)
    (0.54, 0.01)
    """
    first = max(1, round(floor * STEPS))
    fitting = bisect_right(range(first, STEPS + 1), 0, key=lambda step: int(not fits(step / STEPS)))
    return max(first, first + fitting - 1) / STEPS


def rate_within(fits: Callable[[float], bool], rates: Sequence[float] | None = None) -> float:
    """The largest rate that fits, on the 0.01 grid or of the given rates; where none does, the smallest."""
    return largest_rate(fits) if rates is None else largest(sorted(rates), fits)


def largest(parts: Sequence[Item], fits: Callable[[Item], bool]) -> Item:
    """The last of the parts, smallest first, that fits; where none does, the smallest.

    >>> largest([1, 2, 3], lambda part: part < 3), largest([1, 2, 3], lambda part: False)
    (2, 1)
    """
    return next((part for part in reversed(parts) if fits(part)), parts[0])
