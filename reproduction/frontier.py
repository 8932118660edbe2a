"""The best accuracy within a virtual time, or within bytes: curves of all entrants and the Pareto frontier."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from fedpmt.report.drawing import AXES, points
from fedpmt.report.quantities import bytes_unit, show, time_unit
from fedpmt.report.theme import DASHES, INK, MUTED, PALETTE, SHAPES, SIGNS, new_figure, say, themed
from reproduction.artefact import Table
from reproduction.paper import PARTITIONS
from reproduction.readings import TAIL, final, trailing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedpmt.records import RunRecord
    from fedpmt.report.drawing import Against
    from reproduction.entrants import Contest, RunsByEntrant
    from reproduction.scores import Score

SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
"""Of what FedPMT spends in all its rounds: how much there is to spend."""

DOTS = (1.0, 1.6)
"""Of a variant's line: it has the colour and the symbol of its method."""

MOST = 1.03
"""Where a panel ends at the latest: just above an accuracy of 100 %."""

POINTER = {"arrowstyle": "-", "linewidth": 0.6, "alpha": 0.7, "relpos": (0, 0.5)}

Track = list[tuple[float, float]]  # what was spent, and the accuracy that it bought


@dataclass(frozen=True)
class Lead:
    """A point that no other entrant beats with less."""

    spent: float
    accuracy: float
    name: str


def track(members: Sequence[RunRecord], against: Against) -> Track:
    """Mean accuracy over seeds, and over as many last evaluations as the final accuracy is the mean of.

    A run that diverged counts as a guess from there on: without it the others would look better than they are.
    """
    lines = [(run, points(run, against)) for run in members]
    whole = [line for run, line in lines if not run.diverged]
    counts = Counter(number for line in whole for number in line)
    rounds = sorted(number for number, count in counts.items() if 2 * count >= len(whole))
    places = [fmean(line[number][0] for line in whole if number in line) for number in rounds]
    accuracies = [
        fmean(
            line[number][1] if number in line else final(run)
            for run, line in lines
            if number in line or run.diverged
        )
        for number in rounds
    ]
    # A slow run that ends early would pull the mean time back.
    return list(zip(accumulate(places, max), trailing(accuracies), strict=True))


def frontier(tracks: Mapping[str, Track]) -> list[Lead]:
    """All points that are more accurate than everything that costs as much or less.

    >>> [lead.name for lead in frontier({"a": [(1, 0.2), (3, 0.6)], "b": [(2, 0.5), (4, 0.6)]})]
    ['a', 'b', 'a']
    """
    every = sorted((spent, -accuracy, name) for name, points in tracks.items() for spent, accuracy in points)
    leads: list[Lead] = []
    for spent, negative, name in every:
        if not leads or -negative > leads[-1].accuracy:
            leads.append(Lead(spent, -negative, name))
    return leads


def best_within(leads: Sequence[Lead], limit: float) -> Lead | None:
    """The best accuracy within a limit."""
    within = [lead for lead in leads if lead.spent <= limit]
    return within[-1] if within else None


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels: in the order of those wanted and near them, a gap apart, within limits if there is room.

    >>> spread([0.5, 0.5, 0.9], 0.1, 0.0, 1.0)
    [0.5, 0.6, 0.9]
    """
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    places = [0.0] * len(wanted)
    below = low - gap
    for index in order:
        below = places[index] = max(wanted[index], below + gap)
    above = high + gap
    for index in reversed(order):
        above = places[index] = min(places[index], above - gap)
    return places


def tracks_of(
    contest: Contest, found: RunsByEntrant, every: Sequence[Score], partition: str, against: Against
) -> dict[str, Track]:
    """Curves of all forms whose accuracies are comparable; of those that ever end, not diverge."""
    names = {one.entrant.name for one in every if one.partition == partition and one.comparable}
    tracks = {
        entrant.name: track(found[partition, entrant.name], against)
        for entrant in contest.entrants
        if entrant.name in names
    }
    return {name: points for name, points in tracks.items() if points}


CHARTS: tuple[Against, ...] = ("seconds", "bytes")


@themed
def draw(contest: Contest, found: RunsByEntrant, every: Sequence[Score]) -> Figure:
    """A panel for each split, against time and below it against uploads: curves, their ends and names, the frontier."""
    count = len(contest.partitions)
    figure = new_figure(6.6 * count, 5.4 * len(CHARTS))
    grid = figure.subplots(len(CHARTS), count, squeeze=False)
    for row, against in zip(grid, CHARTS, strict=True):
        for axes, partition in zip(row, contest.partitions, strict=True):
            axes.set_title(PARTITIONS.get(partition, partition))
            here = [one for one in every if one.partition == partition and one.diverged < one.accuracy.runs]
            if not here:
                say(axes, "no run yet")
                continue
            tracks = tracks_of(contest, found, every, partition, against)
            _panel(axes, tracks, drawn(here, frontier(tracks)), found, against)
        row[0].set_ylabel("test accuracy")
    return figure


def drawn(here: Sequence[Score], leads: Sequence[Lead]) -> list[Score]:
    """Those with a curve: the strongest form of each method, and of its other forms those that lead somewhere, or stand
    in for one that diverged.
    """
    leading = {lead.name for lead in leads}
    whole = {one.entrant.method for one in here if not one.entrant.variant and not one.diverged}
    return [
        one
        for one in here
        if not one.entrant.variant or one.entrant.name in leading or one.entrant.method not in whole
    ]


def _panel(
    axes: Axes, tracks: dict[str, Track], here: Sequence[Score], found: RunsByEntrant, against: Against
) -> None:
    all_tracks = {one.entrant.name: track(found[one.partition, one.entrant.name], against) for one in here}
    furthest = max(spent for points in all_tracks.values() for spent, _ in points)
    unit = AXES[against][1](furthest)
    leads = frontier(tracks)
    if leads:
        axes.step(
            [lead.spent / unit.size for lead in leads] + [furthest / unit.size],
            [lead.accuracy for lead in leads] + [leads[-1].accuracy],
            where="post", color=MUTED, alpha=0.28, linewidth=9, solid_capstyle="round", zorder=1,
        )  # fmt: skip
    ends = []
    for one in here:
        colour, shape = SIGNS.get(one.entrant.method, (0, 0))
        points = all_tracks[one.entrant.name]
        places, accuracies = [spent / unit.size for spent, _ in points], [accuracy for _, accuracy in points]
        axes.plot(
            places, accuracies,
            color=PALETTE[colour], dashes=DOTS if one.entrant.variant else DASHES[shape], linewidth=1.1,
            alpha=0.8 if one.comparable else 0.4, zorder=2,
        )  # fmt: skip
        half = one.accuracy.half if math.isfinite(one.accuracy.half) else 0.0
        axes.errorbar(
            places[-1], one.accuracy.mean, yerr=half or None,
            color=PALETTE[colour], marker=SHAPES[shape], markersize=6, capsize=2,
            markerfacecolor=PALETTE[colour] if one.comparable else "none", zorder=4,
        )  # fmt: skip
        ends.append((places[-1], one))
    # Budgets do not act on all methods alike: what they spend is up to ten times apart.
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    # An interval may reach above all that there is; a panel need not.
    axes.set_ylim(0, min(axes.get_ylim()[1], MOST))
    low, high = axes.get_ylim()
    leading = {lead.name for lead in leads}
    # Names stand in a column beside the panel, so that however many there are none hides another.
    places = spread([one.accuracy.mean for _, one in ends], 0.052 * (high - low), low, high)
    for (end, one), place in zip(ends, places, strict=True):
        colour, _ = SIGNS.get(one.entrant.method, (0, 0))
        axes.annotate(
            f"{one.entrant.title}  {100 * one.accuracy.mean:.1f} %{'' if one.comparable else ' †'}",
            (end, one.accuracy.mean), xytext=(1.06, place), textcoords=axes.get_yaxis_transform(),
            va="center", fontsize=8.5, color=INK, fontweight="bold" if one.entrant.name in leading else "normal",
            annotation_clip=False,
            arrowprops={**POINTER, "color": PALETTE[colour]},
        )  # fmt: skip
    axes.set_xlabel(unit.label(AXES[against][0]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.tick_params(colors=MUTED)


def caption(contest: Contest, seeds: str) -> str:
    """What stands under a chart."""
    variants = (
        " (dotted: variants that touch the frontier, or replace one that diverged)"
        if contest.has_variants
        else ""
    )
    others = " † and hollow symbols: not the accuracy of one global model, so not on the frontier."
    return (
        f"Test accuracy against virtual time (top) and uploaded bytes (bottom), {seeds}: "
        f"the strongest variant of each method{variants}. Symbols with intervals show where a method "
        "ends. The grey band is the Pareto frontier; methods in bold touch it. "
        f"Curves are means over seeds and over the last {100 * TAIL:.0f} % of the evaluations."
        f"{others if any(entrant.personal for entrant in contest.entrants) else ''}"
    )


def best_table(
    contest: Contest, found: RunsByEntrant, every: Sequence[Score], against: Against
) -> tuple[Table, list[dict[str, Any]]]:
    """Return the best method within limits that are shares of what FedPMT spends in all its rounds."""
    unit = {"seconds": time_unit, "bytes": bytes_unit}[against]
    rows, values = [], []
    titles = {entrant.name: entrant.title for entrant in contest.entrants}
    for partition in contest.partitions:
        tracks = tracks_of(contest, found, every, partition, against)
        own = tracks.get("fedpmt")
        if not own:
            continue
        leads = frontier(tracks)
        for share in SHARES:
            limit = share * own[-1][0]
            lead, ours = best_within(leads, limit), best_within(frontier({"fedpmt": own}), limit)
            rows.append(
                [
                    f"{PARTITIONS.get(partition, partition)}, {show(limit, unit)}",
                    "none" if lead is None else titles[lead.name],
                    "-" if lead is None else f"{100 * lead.accuracy:.1f}",
                    "-" if ours is None else f"{100 * ours.accuracy:.1f}",
                ]
            )
            values.append(
                {
                    "partition": partition,
                    "limit": limit,
                    "best": lead.name if lead else None,
                    "accuracy": lead.accuracy if lead else None,
                    "fedpmt": ours.accuracy if ours else None,
                }
            )
    what = {"seconds": "virtual time", "bytes": "uploaded bytes"}[against]
    variants = "; variants are included" if contest.has_variants else ""
    note = (
        f"Limits are shares of what FedPMT spends in all its rounds{variants}. All methods run the same number of "
        "rounds, so the last rows favour those with long rounds."
    )
    return Table(
        f"The best within a limit of {what}", ("split, limit", "best", "accuracy, %", "FedPMT, %"), rows, note
    ), values
