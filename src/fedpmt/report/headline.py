"""The sentence that a reader takes away from a comparison."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fedpmt.report.groups import SEPARATOR
from fedpmt.report.quantities import score_unit, show, time_unit
from fedpmt.report.tables import summary, time_to_target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedpmt.records import RunRecord
    from fedpmt.report.tables import SummaryRow, TargetRow

MOST_RIVALS = 3
"""A sentence names no more than this many others."""

SAME = 1.05
"""Times whose ratio is smaller are called the same."""


def headline(
    runs: Sequence[RunRecord],
    targets: Sequence[float] | None = None,
    titles: Mapping[str, str] | None = None,
) -> list[str]:
    """Say who was soonest at the hardest target that several reached, and who ended best.

    Args:
        runs: The runs of a comparison.
        targets: Scores to reach; by default those of `time_to_target`.
        titles: How methods are called, by name; e.g. {"fedavg": "FedAvg"}.

    Returns:
        A few sentences for each panel; none where there is nothing to compare.
    """
    ended = [row for row in summary(runs) if row.score is not None]
    reached = [row for row in time_to_target(runs, targets) if row.reached == row.runs]
    found = []
    for panel in dict.fromkeys(row.panel for row in ended):
        of_panel = [row for row in ended if row.panel == panel]
        race = _race([row for row in reached if row.panel == panel], titles or {})
        sentences = [*([race] if race else []), _best(of_panel, titles or {})]
        found.append(f"{panel}: {' '.join(sentences)}" if panel else " ".join(sentences))
    return found


def _name(row: SummaryRow | TargetRow, titles: Mapping[str, str]) -> str:
    """The method as people write it, and what sets this line apart from the method's others."""
    own = row.line.removeprefix(row.method).replace(SEPARATOR, ", ")
    return f"{titles.get(row.method, row.method)}{own}"


def _race(rows: Sequence[TargetRow], titles: Mapping[str, str]) -> str:
    """Who reached the hardest target that at least two reached; nothing where there is none."""
    hardest_first = sorted(rows, key=lambda row: row.target, reverse=bool(rows and rows[0].maximize))
    for _, same in itertools.groupby(hardest_first, key=lambda row: row.target):
        soonest = sorted(same, key=_seconds)
        if len(soonest) > 1:
            return _race_to_one(soonest, titles)
    return ""


def _race_to_one(rows: Sequence[TargetRow], titles: Mapping[str, str]) -> str:
    first, *others = rows
    goal, time = first.texts()["target"], show(first.seconds, time_unit)
    shown = others if len(others) <= MOST_RIVALS else [others[0], others[-1]]
    lags = [_lag(first, other, _name(other, titles)) for other in shown]
    behind = f"{', '.join(lags[:-1])} and {lags[-1]}" if len(lags) > 1 else lags[0]
    counted = f" (of {len(rows)} that reached it)" if len(shown) < len(others) else ""
    return f"{_name(first, titles)} reached {goal} in {time} of virtual time, {behind}{counted}."


def _lag(first: TargetRow, other: TargetRow, name: str) -> str:
    ratio = _seconds(other) / _seconds(first) if _seconds(first) else 1.0
    if ratio < SAME:
        return f"at the same time as {name}"
    return f"{ratio:.{1 if ratio < 10 else 0}f} times sooner than {name}"


def _seconds(row: TargetRow) -> float:
    assert row.seconds is not None  # of rows that reached their target
    return row.seconds.mean


def _best(rows: Sequence[SummaryRow], titles: Mapping[str, str]) -> str:
    scored = [(row.score.mean, row) for row in rows if row.score is not None]
    mean, best = (max if rows[0].maximize else min)(scored, key=lambda pair: pair[0])
    score = show(mean, score_unit(best.score_name))
    if len(rows) == 1:
        return f"{_name(best, titles)} ended with {best.score_name} {score}."
    return f"{_name(best, titles)} ended with the best {best.score_name}, {score}."
