"""What is drawn into one panel: curves of scores, bars, and how many devices trained each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedpmt.records import ACCURACY
from fedpmt.report.groups import shorten
from fedpmt.report.quantities import Spread, bytes_unit, joules_unit, plain_unit, time_unit
from fedpmt.report.tables import evaluated, uploaded
from fedpmt.report.theme import INK, MUTED, PAPER, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from fedpmt.records import RunRecord
    from fedpmt.report.groups import Group
    from fedpmt.report.quantities import Unit
    from fedpmt.report.theme import Look

Against = Literal["rounds", "seconds", "bytes", "joules"]
Kind = Literal["level", "class"]

AXES = {
    "rounds": ("round", plain_unit),
    "seconds": ("virtual time", time_unit),
    "bytes": ("uploaded", bytes_unit),
    "joules": ("energy", joules_unit),
}
POINTS = 400  # more than a screen shows, fewer than makes a page heavy
NOT_EVALUATED = "no score recorded"


@dataclass(frozen=True)
class Curve:
    """A number of a group by round: the mean over its runs, and the lowest and highest of them."""

    place: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


Values = Mapping[int, float]
"""Numbers of a run by round."""


def places(run: RunRecord, against: Against) -> dict[int, float]:
    """Where each round of a run lies on an axis; nowhere if its energy is not known."""
    if against == "joules" and any(step.joules is None for step in run.rounds):
        return {}
    spent: dict[str, Iterable[float]] = {
        "rounds": (step.round for step in run.rounds),
        "seconds": (step.virtual_seconds for step in run.rounds),
        "bytes": uploaded(run),
        "joules": accumulate(step.joules or 0.0 for step in run.rounds),
    }
    return {step.round: float(place) for step, place in zip(run.rounds, spent[against], strict=True)}


def scores(run: RunRecord) -> dict[int, float]:
    """The score of each round that was evaluated."""
    return {step.round: score for step, score in evaluated(run)}


def points(
    run: RunRecord, against: Against, values: Callable[[RunRecord], Values] = scores
) -> dict[int, tuple[float, float]]:
    """Where each value of a run lies on an axis, and the value, by round."""
    place = places(run, against)
    return {number: (place[number], value) for number, value in values(run).items() if place}


def curve(
    runs: Sequence[RunRecord], against: Against, values: Callable[[RunRecord], Values] = scores
) -> Curve | None:
    """Mean and range over runs, round by round, as long as half of them go on."""
    lines = [line for run in runs if (line := points(run, against, values))]
    if not lines:
        return None
    shared = Counter(number for line in lines for number in line)
    rounds = sorted(number for number, count in shared.items() if 2 * count >= len(lines))
    if len(rounds) > POINTS:
        rounds = [rounds[place] for place in np.linspace(0, len(rounds) - 1, POINTS).round().astype(int)]
    every = [[line[number] for line in lines if number in line] for number in rounds]
    found = [[value for _, value in at] for at in every]
    # A slow run that ends early would pull the mean time back.
    mean_places = np.maximum.accumulate([fmean(place for place, _ in at) for at in every])
    return Curve(
        mean_places,
        np.array([fmean(at) for at in found]),
        np.array([min(at) for at in found]),
        np.array([max(at) for at in found]),
    )


def score_limits(groups: Sequence[Group], name: str) -> tuple[float, float]:
    """The same limits for all panels of one score, so that they can be compared by eye; whole tenths for accuracies."""
    same = [run for group in groups if group.score_name == name for run in group.runs]
    every = [score for run in same for _, score in evaluated(run)]
    low, high = min(every, default=0.0), max(every, default=1.0)
    if name != ACCURACY:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return low - margin, high + margin
    return max(0.0, np.floor(low * 10) / 10), min(1.0, np.floor(high * 10) / 10 + 0.1) + 0.005


def unit_of(groups: Sequence[Group], against: Against) -> Unit:
    """The unit that suits the longest of all runs, for all panels of a figure."""
    furthest = max(
        (place for group in groups for run in group.runs for place, _ in points(run, against).values()),
        default=1.0,
    )
    return AXES[against][1](furthest)


def _label_score(axes: Axes, name: str) -> None:
    """Name the vertical axis after the score; only accuracies are in percent."""
    axes.set_ylabel(f"test {shorten(name, 40)}")
    if name == ACCURACY:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))


def draw_score(
    axes: Axes,
    groups: Sequence[Group],
    looks: Mapping[str, Look],
    against: Against,
    unit: Unit,
    limits: tuple[float, float],
) -> None:
    """One line per group, with a band from the worst to the best seed; all groups have the same kind of score."""
    curves = [(group, found) for group in groups if (found := curve(group.runs, against)) is not None]
    if not curves:
        say(axes, NOT_EVALUATED)
        return
    for group, found in curves:
        look, place = looks[group.line], found.place / unit.size
        marker = "o" if len(place) <= 12 else ""
        style = (0.0, look.dashes) if look.dashes else "-"
        if len(group.runs) > 1:
            axes.fill_between(place, found.low, found.high, color=look.colour, alpha=0.2, linewidth=0)
        axes.plot(
            place,
            found.mean,
            color=look.colour,
            linestyle=style,
            linewidth=1.7,
            marker=marker,
            markersize=3.5,
        )
    axes.set_ylim(*limits)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=against == "rounds"))
    axes.set_xlim(left=0)
    axes.set_xlabel(unit.label(AXES[against][0]))
    _label_score(axes, groups[0].score_name)


def last_scores(run: RunRecord, kind: Kind) -> dict[str, float]:
    """The score per level or class at the last evaluation that has it."""
    for step in reversed(run.rounds):
        found = step.score_by_level if kind == "level" else step.score_by_class
        if found:
            return found
    return {}


def categories_of(groups: Sequence[Group], kind: Kind) -> list[str]:
    """All levels or classes, numbers in their order, then names in theirs."""
    names = {name for group in groups for run in group.runs for name in last_scores(run, kind)}
    return sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))


def speeds_of(groups: Sequence[Group]) -> dict[str, str]:
    """The speed of each level, where all its devices share one."""
    speeds: dict[str, set[str]] = {}
    for group in groups:
        for run in group.runs:
            for step in run.rounds[-1:]:
                for device in step.devices:
                    speeds.setdefault(str(device.level), set()).add(f"{device.speed:.2g}×")
    return {level: found.copy().pop() if len(found) == 1 else "" for level, found in speeds.items()}


def crowded(groups: Sequence[Group], kind: Kind) -> bool:
    """Whether bars would be too thin to see."""
    return len(categories_of(groups, kind)) * len(groups) > 72


def draw_bars(axes: Axes, groups: Sequence[Group], looks: Mapping[str, Look], kind: Kind) -> None:
    """Grouped bars, a whisker from the worst to the best seed; dots where bars would be threads."""
    names = categories_of(groups, kind)
    if not names:
        say(axes, f"no score per {kind} recorded")
        return
    width = 0.8 / len(groups)
    as_dots = crowded(groups, kind)
    for index, group in enumerate(groups):
        found = [last_scores(run, kind) for run in group.runs]
        spreads = [Spread.of(one.get(name) for one in found) for name in names]
        places = [
            place + (index - (len(groups) - 1) / 2) * width for place, spread in enumerate(spreads) if spread
        ]
        there = [spread for spread in spreads if spread]
        look, heights = looks[group.line], [spread.mean for spread in there]
        if as_dots:
            axes.plot(places, heights, "o", color=look.colour, markersize=3)
        else:
            # Variants of one method share its colour: paler, as their lines are dashed.
            axes.bar(places, heights, width * 0.88, color=look.colour, alpha=0.55 if look.dashes else 1.0)
        if len(group.runs) > 1 and not as_dots:
            reach = [[one.mean - one.low for one in there], [one.high - one.mean for one in there]]
            axes.errorbar(places, heights, reach, fmt="none", ecolor=INK, elinewidth=0.8, capsize=0)
    speeds = speeds_of(groups) if kind == "level" else {}
    labels = [shorten(f"{name} ({speeds[name]})" if speeds.get(name) else name, 12) for name in names]
    every = -(-len(names) // 20)
    axes.set_xticks(range(0, len(names), every), labels[::every])
    turned = sum(map(len, labels[::every])) > 64
    axes.set_xlim(-0.6, len(names) - 0.4)
    if groups[0].score_name == ACCURACY:
        axes.set_ylim(0, 1)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0, labelrotation=90 if turned else 0)
    axes.set_xlabel("level and speed" if any(speeds.values()) else kind)
    _label_score(axes, groups[0].score_name)


def layer_counts(group: Group) -> dict[str, float]:
    """Mean number of devices per round that trained each layer, over all rounds of all runs."""
    rounds = [step for run in group.runs for step in run.rounds]
    names = dict.fromkeys(name for step in rounds for name in step.layers)
    return {name: sum(step.layers.get(name, 0) for step in rounds) / len(rounds) for name in names}


def draw_layers(axes: Axes, groups: Sequence[Group], looks: Mapping[str, Look]) -> None:
    """A table of cells, method by layer: the fuller the colour, the larger the part of the cohort."""
    counts = [layer_counts(group) for group in groups]
    names = list(dict.fromkeys(name for found in counts for name in found))
    if not names:
        say(axes, "no round recorded")
        return
    asked = max(
        (len(step.devices) for group in groups for run in group.runs for step in run.rounds), default=0
    )
    most = max(asked, *(value for found in counts for value in found.values()), 1)
    for row, (group, found) in enumerate(zip(groups, counts, strict=True)):
        for column, name in enumerate(names):
            if name not in found:
                continue
            share = found[name] / most
            # At most 0.62: the text stays readable on it, in light and in dark.
            axes.add_patch(
                Rectangle((column, row), 1, 1, facecolor=looks[group.line].colour, alpha=0.04 + 0.58 * share)
            )
            axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=PAPER, linewidth=2.5))
            if len(names) <= 16:
                axes.text(column + 0.5, row + 0.5, f"{found[name]:.1f}", ha="center", va="center", color=INK)
    every = -(-len(names) // 32)
    turned = len(names) * max(map(len, names)) > 70
    axes.set_xlim(0, len(names))
    axes.set_ylim(len(groups), 0)
    axes.set_xticks(np.arange(0, len(names), every) + 0.5, [shorten(name, 18) for name in names[::every]])
    axes.tick_params(axis="x", length=0, labelrotation=90 if turned else 0)
    axes.set_yticks(np.arange(len(groups)) + 0.5, [shorten(group.line, 30) for group in groups])
    for tick in axes.get_yticklabels():
        tick.set_color(INK)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(
        f"layer, from input to output; cells: mean devices per round (of {asked} asked)", color=MUTED
    )
