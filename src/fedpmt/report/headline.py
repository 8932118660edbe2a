"""The one sentence that a reader takes away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.report.groups import panels_of
from fedpmt.report.quantities import score_unit, show, time_unit
from fedpmt.report.tables import summary, time_to_target

if TYPE_CHECKING:
    from fedpmt.report.markup import Material
    from fedpmt.report.tables import SummaryRow, TargetRow


def headline(material: Material) -> str:
    """Who reached the highest target that several reached, and how much sooner; of the first panel that has one."""
    sooner = [
        row
        for row in time_to_target(material.runs, material.targets)
        if row.seconds is not None and row.reached == row.runs
    ]
    rows = summary(material.runs)
    for panel in panels_of(material.groups):
        where = f"With {panel}, " if panel else ""
        of_panel = [row for row in sooner if row.panel == panel]
        for target in sorted({row.target for row in of_panel}, reverse=bool(rows and rows[0].maximize)):
            rivals = [row for row in of_panel if row.target == target]
            if len({row.line for row in rivals}) > 1:
                return where + _race(rivals)
        there = [row for row in rows if row.panel == panel and row.score is not None]
        if there:
            return where + _best(there)
    return ""


def _race(rows: list[TargetRow]) -> str:
    first, second = sorted(rows, key=lambda row: row.seconds.mean if row.seconds else 0.0)[:2]
    assert first.seconds is not None
    assert second.seconds is not None
    times = f"{show(first.seconds.mean, time_unit)} against {show(second.seconds.mean, time_unit)} of virtual time"
    target = first.texts()["target"]
    ratio = second.seconds.mean / first.seconds.mean if first.seconds.mean else 1.0
    if ratio < 1.005:
        return f"{first.line} and {second.line} reached {target} at the same time ({times})."
    next_one = second.line if len(rows) == 2 else f"{second.line}, the second of {len(rows)}"
    return f"{first.line} reached {target} {_times(ratio)} sooner than {next_one} ({times})."


def _times(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} %" if ratio < 1.2 else f"{ratio:.1f} times"


def _best(rows: list[SummaryRow]) -> str:
    means = [(row.score.mean, row) for row in rows if row.score is not None]
    value, best = (max if rows[0].maximize else min)(means, key=lambda pair: pair[0])
    shown = show(value, score_unit(best.score_name))
    time = show(best.virtual_seconds.mean if best.virtual_seconds else None, time_unit)
    if len(rows) == 1:
        return f"{best.line} reached {best.score_name} {shown} after {time} of virtual time."
    return f"{best.line} has the best {best.score_name}, {shown}, after {time} of virtual time."
