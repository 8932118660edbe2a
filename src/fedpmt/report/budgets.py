"""What each method spent of its budget, level by level."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.report.groups import clean, group_runs
from fedpmt.report.quantities import bytes_unit, count_unit, joules_unit, percent_unit, show, time_unit
from fedpmt.resources import parse_budget
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.records import DeviceRecord, RunRecord
    from fedpmt.report.groups import Group
    from fedpmt.report.quantities import Unit

ACTIONS = {
    "device": "on each device",
    "shared": "on the part of all",
    "work": "on the steps",
    "none": "not at all",
}
UNITS: dict[str, Callable[[float], Unit]] = {
    "operations": count_unit,
    "time": time_unit,
    "energy": joules_unit,
}
COLUMNS = ("budget acts", "trains", "level", "used a round", "budget", "used", "over budget")


@dataclass(frozen=True)
class BudgetRow:
    """The devices of one level in all rounds of a group of runs; amounts are means over those that were asked."""

    label: str
    panel: str
    line: str
    method: str
    resource: str
    action: str | None  # None in runs that are not finished
    level: int
    trains: str  # what they trained most often
    used: float
    budget: float
    asked: int
    over: int  # how many of those were over their budget

    @property
    def share(self) -> float:
        """How much of its budget it used."""
        return self.used / self.budget

    def texts(self) -> dict[str, str]:
        """The cells as a person reads them, by column title."""
        unit = UNITS.get(self.resource, bytes_unit)
        over = "-" if not self.over else "yes" if self.over == self.asked else f"{self.over} of {self.asked}"
        cells = (
            ACTIONS.get(self.action or "", "-"),
            self.trains,
            str(self.level),
            show(self.used, unit),
            show(self.budget, unit),
            show(self.share, percent_unit),
            over,
        )
        return {"run": self.label, **dict(zip(COLUMNS, cells, strict=True))}


def budgets(runs: Sequence[RunRecord]) -> list[BudgetRow]:
    """One row for each group of runs with a budget and each level; none where no run has one."""
    rows = []
    for group in group_runs(runs):
        resource = resource_of(group.runs[0])
        levels: dict[int, list[DeviceRecord]] = {}
        for run in group.runs:
            for step in run.rounds:
                for device in step.devices:
                    if device.used is not None and device.budget:
                        levels.setdefault(device.level, []).append(device)
        if resource is not None:
            rows += [_row(group, resource, level, levels[level]) for level in sorted(levels)]
    return rows


def resource_of(run: RunRecord) -> str | None:
    """What a run's budget limits, in words; None where it has none."""
    text = run.settings.get("budget")
    try:
        return None if text is None else parse_budget(str(text)).resource
    except SettingError:
        return None


def _row(group: Group, resource: str, level: int, devices: list[DeviceRecord]) -> BudgetRow:
    parts = Counter(clean(device.part) for device in devices)
    often, *others = (part for part, _ in parts.most_common())
    results = [run.result for run in group.runs if run.result is not None]
    return BudgetRow(
        label=group.label,
        panel=group.panel,
        line=group.line,
        method=group.method,
        resource=resource,
        action=results[0].budget_action if results else None,
        level=level,
        trains=f"{often} and {len(others)} more" if others else often,
        used=sum(device.used or 0.0 for device in devices) / len(devices),
        budget=sum(device.budget or 0.0 for device in devices) / len(devices),
        asked=len(devices),
        over=sum(device.over_budget for device in devices),
    )
