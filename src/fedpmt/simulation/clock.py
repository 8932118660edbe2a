"""The virtual clock: who arrives by the deadline, and how long the round takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.resources import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.records import Outcome


@dataclass(frozen=True)
class Verdict:
    """What becomes of a round's devices, in the order they were given."""

    outcomes: tuple[Outcome, ...]
    round_seconds: float


def settle(seconds: Sequence[float], failed: Sequence[bool], deadline: float | None, wanted: int) -> Verdict:
    """Decide a round before anybody trains, from the seconds each device needs.

    Without a deadline the round lasts as long as its slowest device; with one, later replies are dropped
    and the round ends there, or sooner when all have arrived. Of an over-selected cohort the first
    `wanted` replies count. A device that fails is waited for as if it would still come.

    >>> settle([23.0, 26.4, 10.0], [False] * 3, deadline=26.5, wanted=3)
    Verdict(outcomes=('arrived', 'arrived', 'arrived'), round_seconds=26.4)
    >>> settle([50.0, 20.0, 10.0], [False] * 3, deadline=26.5, wanted=3)
    Verdict(outcomes=('late', 'arrived', 'arrived'), round_seconds=26.5)
    """
    limit = math.inf if deadline is None else deadline * (1 + ROUNDING)
    outcomes: list[Outcome] = [
        "failed" if lost else "late" if time > limit else "arrived"
        for time, lost in zip(seconds, failed, strict=True)
    ]
    order = sorted(
        (time, position) for position, time in enumerate(seconds) if outcomes[position] == "arrived"
    )
    for _, position in order[wanted:]:
        outcomes[position] = "surplus"
    if len(order) >= wanted:
        # Enough replies: nobody else is waited for.
        return Verdict(tuple(outcomes), order[wanted - 1][0] if wanted else 0.0)
    waited = max(seconds, default=0.0)
    return Verdict(tuple(outcomes), min(waited, deadline) if deadline is not None else waited)
