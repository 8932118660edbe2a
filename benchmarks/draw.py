"""Figures of the benchmark: seconds a round side by side, and how a round scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.page import NAMES
from benchmarks.scale import AXIS
from benchmarks.summary import FEDAVG, Row, rows, seconds_text
from fedpmt.report.theme import INK, MUTED, PALETTE, new_figure, say, themed

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.results import Results
    from benchmarks.scale import ScaleResults

OURS, THEIRS = PALETTE[0], "#b9c2cd"


def short(size: float) -> str:
    """A number as it stands under an axis.

    >>> short(2), short(30_000), short(515_610), short(1_000_000)
    ('2', '30k', '516k', '1M')
    """
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{size / unit:.3g}{letter}"
    return f"{size:g}"


@themed
def compare_figure(results: Results) -> Figure:
    """A panel per setting, a bar per simulator."""
    names = list(results.settings)
    figure = new_figure(9, 1.9 * len(names))
    for axes, name in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
        _bars(axes, name, [row for row in rows(results, name) if row.variant == FEDAVG])
    return figure


def _bars(axes: Axes, name: str, found: list[Row]) -> None:
    timed = [row for row in found if row.seconds is not None]
    if not timed:
        say(axes, f"{name}: nothing measured")
        return
    axes.set_title(f"{name}: seconds a round")
    labels = []
    for place, row in enumerate(found):
        labels.append(NAMES[row.peer])
        if row.seconds is None:
            axes.text(0, place, f"  {row.note}", va="center", color=MUTED)
            continue
        low, middle, high = row.seconds.low, row.seconds.median, row.seconds.high
        axes.barh(place, middle, color=OURS if row.peer == "ours" else THEIRS, height=0.62)
        axes.errorbar(
            middle, place, xerr=[[middle - low], [high - middle]], color=INK, capsize=2, linewidth=0.8
        )
        times = "" if row.ratio is None or row.peer == "ours" else f", {row.ratio:.1f} x ours"
        axes.text(high, place, f"  {seconds_text(middle)}{times}", va="center", color=INK, fontsize=8.5)
    axes.set_yticks(range(len(found)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.3 * max(row.seconds.high for row in timed if row.seconds))


@themed
def scale_figure(results: ScaleResults) -> Figure:
    """Seconds a round and peak memory against population, cohort, model size and workers."""
    kinds = list(dict.fromkeys(point.kind for point in results.points))
    figure = new_figure(2.6 * len(kinds) + 0.4, 4.6)
    grid = figure.subplots(2, len(kinds), squeeze=False)
    for column, kind in enumerate(kinds):
        points = sorted(
            (point for point in results.points if point.kind == kind), key=lambda point: point.size
        )
        sizes = [point.size for point in points]
        top, bottom = grid[0, column], grid[1, column]
        top.fill_between(
            sizes, [point.low for point in points], [point.high for point in points], color=OURS, alpha=0.18
        )
        top.plot(sizes, [point.seconds for point in points], marker="o", markersize=4, color=OURS)
        bottom.plot(sizes, [point.peak_mib for point in points], marker="o", markersize=4, color=PALETTE[1])
        for axes in (top, bottom):
            if kind == "population":
                axes.set_xscale("log")
            axes.set_xticks(sizes if kind in ("population", "workers") else sizes[-2:])
            axes.xaxis.set_major_formatter(lambda value, _: short(value))
            axes.minorticks_off()
            # From zero on, so that what grows in proportion is seen to.
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
            if kind != "population":
                axes.set_xlim(left=0)
        bottom.set_xlabel(AXIS[kind])
    grid[0, 0].set_ylabel("seconds a round")
    grid[1, 0].set_ylabel("peak memory, MiB")
    return figure


def save(figure: Figure, path: Path) -> None:
    """As SVG or PNG, whichever the name says; the same figure gives the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=160, metadata=metadata)
