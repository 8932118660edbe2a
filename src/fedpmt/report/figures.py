"""Whole figures for a paper or a notebook; the page puts the same panels together in its own way.

Each function takes runs as `fedpmt.records.read_run` gives them and returns a matplotlib `Figure` that
is bound to no global state: `score(runs, "seconds").savefig("time.pdf")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from fedpmt.report.drawing import (
    categories_of,
    draw_bars,
    draw_layers,
    draw_score,
    score_limits,
    unit_of,
)
from fedpmt.report.groups import group_runs, panels_of, require_runs, shorten
from fedpmt.report.quantities import time_unit
from fedpmt.report.theme import looks_of, new_figure, say, themed
from fedpmt.report.timeline import (
    PANELS,
    choose_round,
    deadline_of,
    draw_busy,
    horizon,
    legend_patches,
    levels_of,
    representatives,
)
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedpmt.records import RunRecord
    from fedpmt.report.drawing import (
        Against,
        Kind,
    )
    from fedpmt.report.groups import Group
    from fedpmt.report.theme import Look


@themed
def score(runs: Sequence[RunRecord], against: Against = "rounds") -> Figure:
    """Test score against `rounds`, virtual `seconds` or uploaded `bytes`; one panel per task, data and partition."""
    if against not in ("rounds", "seconds", "bytes"):
        raise SettingError.unknown("against", against, ["rounds", "seconds", "bytes"])
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
    figure = new_figure(4.4 * len(chosen), busy_height(max(len(step.devices) for step in steps)))
    row = figure.subplots(1, len(chosen), squeeze=False)[0]
    for axes, (group, _), step, deadline in zip(row, chosen, steps, deadlines, strict=True):
        draw_busy(axes, step, colours, time_unit(end), end, deadline)
        axes.set_title(f"{shorten(group.line, 40)}, round {step.round}", pad=18)
    figure.legend(handles=legend_patches(steps), loc="outside upper center", ncols=8)
    return figure


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
