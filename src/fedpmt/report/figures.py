"""Whole figures for a paper or a notebook; the page puts the same panels together in its own way.

Each function takes runs as `fedpmt.records.read_run` gives them and returns a matplotlib `Figure` that
is bound to no global state: `score(runs, "seconds").savefig("time.pdf")`. The panel that shows who was busy when in a
round, one bar per device, is made here too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedpmt.records import step_word
from fedpmt.report.drawing import (
    AXES,
    categories_of,
    draw_bars,
    draw_layers,
    draw_score,
    score_limits,
    unit_of,
)
from fedpmt.report.groups import SEPARATOR, clean, group_runs, panels_of, require_runs, shorten
from fedpmt.report.quantities import show, time_unit
from fedpmt.report.theme import INK, MUTED, PAPER, TRACK, level_colours, looks_of, new_figure, say, themed
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedpmt.records import DeviceRecord, RoundRecord, RunRecord
    from fedpmt.report.drawing import Against, Kind
    from fedpmt.report.groups import Group
    from fedpmt.report.quantities import Unit
    from fedpmt.report.theme import Look


HATCHES = {"late": "///", "failed": "xxx", "surplus": "---", "refused": "ooo"}
PANELS = 6  # the most that are compared; a page says so where there are more groups
THICK = 0.72  # of a bar; rows are 1 apart
NAMED = 30  # devices up to which each bar has its own label


def representatives(groups: Sequence[Group]) -> list[tuple[Group, RunRecord]]:
    """The first run that has rounds, of each group of the first panel that has any."""
    for members in panels_of(groups).values():
        chosen = [(group, run) for group in members for run in group.runs[:] if run.rounds]
        first = {group.line: (group, run) for group, run in reversed(chosen)}
        if first:
            return [first[group.line] for group in members if group.line in first]
    return []


def choose_round(runs: Sequence[RunRecord], number: int | None = None) -> list[RoundRecord]:
    """The same round of each run: the one asked for, else the last that all have; else each run's last.

    Of a run on a clock of events it is that server step and as many before as it takes to see who overlaps.
    """
    numbers = [{step.round: step for step in run.rounds} for run in runs]
    if number is None:
        number = max(set.intersection(*map(set, numbers)), default=None) if numbers else None
    chosen = [
        steps.get(number, run.rounds[-1]) if number is not None else run.rounds[-1]
        for run, steps in zip(runs, numbers, strict=True)
    ]
    return [
        _overlapping(run.rounds, step) if is_stepped(step) else step
        for run, step in zip(runs, chosen, strict=True)
    ]


def is_stepped(step: RoundRecord) -> bool:
    """Whether a record is of a server step on a clock of events."""
    return any(device.started is not None for device in step.devices)


def _overlapping(rounds: Sequence[RoundRecord], last: RoundRecord) -> RoundRecord:
    """A server step together with those before it, until there are enough devices to see who overlaps."""
    devices: list[DeviceRecord] = []
    for step in reversed([step for step in rounds if step.round <= last.round]):
        devices = [*step.devices, *devices]
        if len(devices) >= NAMED:
            break
    begun = min(device.started or 0.0 for device in devices)
    shown = {"devices": tuple(devices), "round_seconds": last.virtual_seconds - begun}
    return last.model_copy(update=shown)


def deadline_of(run: RunRecord) -> float | None:
    """The deadline the run was given, where it is a number."""
    deadline = run.settings.get("deadline")
    return float(deadline) if isinstance(deadline, int | float) and math.isfinite(deadline) else None


def levels_of(steps: Sequence[RoundRecord]) -> dict[int, str]:
    """The colour of each level that appears, slowest first."""
    return level_colours(sorted({device.level for step in steps for device in step.devices}))


def level_names(steps: Sequence[RoundRecord]) -> dict[int, str]:
    """Levels with their speed, for legends."""
    speeds: dict[int, set[str]] = {}
    for step in steps:
        for device in step.devices:
            speeds.setdefault(device.level, set()).add(f"{device.speed:.2g}×")
    return {
        level: f"level {level} ({min(found)})" if len(found) == 1 else f"level {level}"
        for level, found in sorted(speeds.items())
    }


def horizon(steps: Sequence[RoundRecord], deadlines: Sequence[float | None]) -> float:
    """How far the axis of all panels goes."""
    ends = [start_of(device, step) + seconds_of(device, step) for step in steps for device in step.devices]
    return max([*ends, *(step.round_seconds for step in steps), *(end for end in deadlines if end), 1e-9])


def legend_patches(steps: Sequence[RoundRecord]) -> list[Patch]:
    """What the colours and hatches stand for."""
    colours = levels_of(steps)
    patches = [Patch(facecolor=colours[level], label=name) for level, name in level_names(steps).items()]
    outcomes = {device.outcome for step in steps for device in step.devices}
    return patches + [
        Patch(facecolor=TRACK, edgecolor=MUTED, hatch=hatch, label=outcome, linewidth=0)
        for outcome, hatch in HATCHES.items()
        if outcome in outcomes
    ]


def seconds_of(device: DeviceRecord, step: RoundRecord) -> float:
    """How long a device was busy."""
    # A device that never replies may have no time of its own.
    return device.seconds if math.isfinite(device.seconds) else step.round_seconds


def start_of(device: DeviceRecord, step: RoundRecord) -> float:
    """When a device started, in seconds from the beginning of what is shown."""
    begun = step.virtual_seconds - step.round_seconds
    return 0.0 if device.started is None else max(0.0, device.started - begun)


def draw_busy(
    axes: Axes,
    step: RoundRecord,
    colours: Mapping[int, str],
    unit: Unit,
    end: float,
    deadline: float | None,
) -> None:
    """Slowest level at the top; training in full colour, transfer paler, waiting grey, uncounted hatched."""
    devices = sorted(step.devices, key=lambda device: (device.level, device.device))
    if not devices:
        say(axes, "no device was asked")
        return
    rows = {device.device: row for row, device in enumerate({one.device: one for one in devices}.values())}
    size, few = unit.size, len(rows) <= NAMED
    for row in rows.values():
        axes.barh(row, step.round_seconds / size, THICK, color=TRACK, linewidth=0)
    for device in devices:
        row, begun, seconds = rows[device.device], start_of(device, step), seconds_of(device, step)
        transfer = min(max(device.transfer_seconds, 0.0), seconds)
        counted = device.outcome == "arrived"
        trained = seconds - transfer
        for start, length, strength in ((begun, trained, 1.0), (begun + trained, transfer, 0.5)):
            colour = to_rgba(colours[device.level], strength * (1.0 if counted else 0.35))
            axes.barh(row, length / size, THICK, left=start / size, color=colour, linewidth=0)
        if begun > 0:
            # Apart from what the same device did before.
            axes.plot([begun / size] * 2, [row - THICK / 2, row + THICK / 2], color=PAPER, linewidth=1)
        if not counted:
            # Apart from the bar: in SVG a hatch is as pale as what it is drawn on.
            axes.barh(
                row,
                seconds / size,
                THICK,
                left=begun / size,
                facecolor="none",
                edgecolor=MUTED,
                hatch=HATCHES[device.outcome],
                linewidth=0,
            )
        if few and not counted:
            axes.text((begun + seconds + 0.015 * end) / size, row, device.outcome, va="center", fontsize=8)
    if deadline is not None and not is_stepped(step):
        axes.axvline(deadline / size, color=INK, linewidth=1.1, linestyle=(0.0, (4, 2)))
        axes.text(
            deadline / size,
            -0.75,
            f"deadline {show(deadline, time_unit)}",
            ha="center",
            va="bottom",
            fontsize=8,
        )
    axes.set_ylim(len(rows) - 0.4, -0.7)
    axes.set_xlim(0, end / size * 1.12)
    _name_rows(axes, list({device.device: device for device in devices}.values()), few)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_xlabel(unit.label(f"virtual time within the {'steps' if is_stepped(step) else 'round'}"))


def _name_rows(axes: Axes, devices: Sequence[DeviceRecord], few: bool) -> None:
    if few:
        axes.set_yticks(
            range(len(devices)),
            [f"{shorten(clean(device.part), 16)}{SEPARATOR}{device.device}" for device in devices],
        )
        axes.set_ylabel("part and device")
        return
    levels = [device.level for device in devices]
    middle = {level: levels.index(level) + (levels.count(level) - 1) / 2 for level in levels}
    axes.set_yticks(list(middle.values()), [str(level) for level in middle])
    axes.set_ylabel("level")


@themed
def score(runs: Sequence[RunRecord], against: Against = "rounds") -> Figure:
    """Test score against `rounds`, virtual `seconds`, uploaded `bytes` or `joules`.

    There is one panel per task, data and partition. Only runs on a fleet that states watts have joules.
    """
    if against not in AXES:
        raise SettingError.unknown("against", against, list(AXES))
    groups, looks = _prepare(runs)
    figure, panels = _panels(groups, 4.4, 3.2)
    for axes, members in panels:
        limits = score_limits(groups, members[0].score_name)
        draw_score(axes, members, looks, against, unit_of(groups, against), limits)
    _legend(figure, looks)
    return figure


@themed
def plot(runs: Sequence[RunRecord]) -> tuple[Axes, Axes]:
    """Test score against virtual time and against rounds, on a figure of pyplot's that a notebook shows by itself."""
    from matplotlib import pyplot as plt

    groups, looks = _prepare(runs)
    if len({group.score_name for group in groups}) > 1:
        raise SettingError("runs with different scores can't be drawn on one axis: plot them one by one")
    limits = score_limits(groups, groups[0].score_name)
    figure, row = plt.subplots(1, 2, figsize=(8.8, 3.6), layout="constrained")
    against: tuple[Against, Against] = ("seconds", "rounds")
    for axes, quantity in zip(row, against, strict=True):
        draw_score(axes, groups, looks, quantity, unit_of(groups, quantity), limits)
    _legend(figure, looks)
    return row[0], row[1]


@themed
def busy(runs: Sequence[RunRecord], number: int | None = None) -> Figure:
    """Who was busy when in one round (the last that all runs have), one panel per method."""
    groups, _ = _prepare(runs)
    chosen = representatives(groups)[:PANELS]
    if not chosen:
        figure = new_figure(4.4, 2)
        say(figure.subplots(), "no round recorded")
        return figure
    steps = choose_round([run for _, run in chosen], number)
    deadlines = [deadline_of(run) for _, run in chosen]
    end, colours = horizon(steps, deadlines), levels_of(steps)
    figure = new_figure(4.4 * len(chosen), busy_height(max(map(count_rows, steps))))
    row = figure.subplots(1, len(chosen), squeeze=False)[0]
    for axes, (group, run), step, deadline in zip(row, chosen, steps, deadlines, strict=True):
        draw_busy(axes, step, colours, time_unit(end), end, deadline)
        name = f"{step_word(run.settings.get('clock'))} {step.round}"
        axes.set_title(f"{shorten(group.line, 40)}, {name}", pad=18)
    figure.legend(handles=legend_patches(steps), loc="outside upper center", ncols=8)
    return figure


def count_rows(step: RoundRecord) -> int:
    """How many devices a panel shows."""
    return len({device.device for device in step.devices})


def busy_height(devices: int) -> float:
    """Inches for a panel with this many bars."""
    return min(9.0, max(2.2, 1.2 + 0.24 * devices))


def layers_height(groups: int) -> float:
    """Inches for a panel with this many rows."""
    return 0.9 + 0.42 * groups


@themed
def layers(runs: Sequence[RunRecord]) -> Figure:
    """How many devices trained each layer, mean over rounds; one row per method."""
    groups, looks = _prepare(runs)
    tallest = max(len(members) for members in panels_of(groups).values())
    figure, panels = _panels(groups, 6.4, layers_height(tallest))
    for axes, members in panels:
        draw_layers(axes, members, looks)
    return figure


@themed
def score_by_level(runs: Sequence[RunRecord]) -> Figure:
    """The score at the last evaluation, classes weighted as the devices of each level hold them."""
    return _bars(runs, "level")


@themed
def score_by_class(runs: Sequence[RunRecord]) -> Figure:
    """The score at the last evaluation, class by class."""
    return _bars(runs, "class")


def _bars(runs: Sequence[RunRecord], kind: Kind) -> Figure:
    groups, looks = _prepare(runs)
    figure, panels = _panels(groups, max(4.4, 0.55 * len(categories_of(groups, kind))), 3.0)
    for axes, members in panels:
        draw_bars(axes, members, looks, kind)
    _legend(figure, looks)
    return figure


def _prepare(runs: Sequence[RunRecord]) -> tuple[list[Group], dict[str, Look]]:
    require_runs(runs)
    groups = group_runs(runs)
    return groups, looks_of(groups)


def _panels(
    groups: Sequence[Group], width: float, height: float
) -> tuple[Figure, list[tuple[Axes, list[Group]]]]:
    panels = panels_of(groups)
    figure = new_figure(width * len(panels), height + 0.4)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, name in zip(row, panels, strict=True):
        axes.set_title(shorten(name, 48))
    return figure, list(zip(row, panels.values(), strict=True))


def _legend(figure: Figure, looks: dict[str, Look]) -> None:
    handles = [
        Line2D([], [], color=look.colour, linestyle=(0.0, look.dashes) if look.dashes else "-", linewidth=2)
        for look in looks.values()
    ]
    # matplotlib takes a leading underscore for "leave out".
    names = [f" {name}" if name.startswith("_") else name for name in looks]
    figure.legend(handles, [shorten(name, 60) for name in names], loc="outside upper center", ncols=4)
