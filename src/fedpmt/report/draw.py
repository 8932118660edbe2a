"""A picture of the net with what each depth trains, in the manner of the paper's first figure.

One panel per depth, the full model first, and one of FedDrop for comparison. Weights that are updated
by back-propagation are solid and blue, those that only take part in the forward pass dotted and grey.
"""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from fedpmt.records import write_atomically
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

FORMATS = (".pdf", ".png", ".svg")
TRAINED, FROZEN, REMOVED, TEXT = "#1f6fc4", "#8b949e", "#d0554c", "#22272e"
PANELS_PER_ROW = 3
LONGEST_NAME = 9
PANEL_SIZE = (4.3, 3.6)
# Dates and random identifiers would make two pictures of one table differ.
METADATA: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}


@dataclass(frozen=True)
class Column:
    """The neurons of one layer that are drawn: a few, with an ellipsis for the rest."""

    name: str
    units: int | None  # None: the inputs
    kind: str
    heights: tuple[float, ...]
    kept: tuple[bool, ...]

    @property
    def ellipsis(self) -> bool:
        """Whether neurons were left out of the picture."""
        return self.units is None or self.units > len(self.heights)


def draw_net(table: Mapping[str, Any], path: Path) -> None:
    """Draw a cost table (the JSON object of `fedpmt table`) to an SVG, PNG or PDF file."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise SettingError(f"draw = '{path}' is refused: the file must end in {', '.join(FORMATS)}")
    with mpl.rc_context({"svg.hashsalt": "fedpmt", "font.size": 9, "mathtext.fontset": "dejavusans"}):
        data = io.BytesIO()
        _figure(table).savefig(data, format=suffix[1:], dpi=150, metadata=METADATA[suffix])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data.getvalue())


def _figure(table: Mapping[str, Any]) -> Figure:
    layers, depths = table["layers"], sorted(table["depths"], key=lambda row: -row["depth"])
    thinned = _thinned(layers, depths)
    count = len(depths) + (thinned is not None)
    per_row = count if count <= PANELS_PER_ROW else math.ceil(count / math.ceil(count / PANELS_PER_ROW))
    rows = math.ceil(count / per_row)
    figure = Figure(figsize=(max(PANEL_SIZE[0], 0.7 * len(layers)) * per_row, PANEL_SIZE[1] * rows + 0.9))
    height = figure.get_figheight()
    room = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, rect=(0, 0.55 / height, 1, 1 - 0.95 / height))
    figure.set_layout_engine(room)
    title = f"What each depth of {table['task']} trains"
    figure.text(0.5, 1 - 0.12 / height, title, ha="center", va="top", fontsize=13, color=TEXT)
    panels = list(figure.subplots(rows, per_row, squeeze=False).flat)
    for axes in panels:
        axes.set_axis_off()
    for axes, row in zip(panels, depths, strict=False):
        frozen = len(row["frozen"])
        _panel(axes, _columns(layers, None), frozen)
        name = f"depth {row['depth']}" + ("" if frozen else " (full model)")
        mask = ", ".join("0" if index < frozen else "1" for index in range(len(layers)))
        sent = row["upload_bytes"] / depths[0]["upload_bytes"]
        price = f"{_percent(row['ratio'])} of the operations, {_percent(sent)} of the upload"
        _captions(axes, name, f"$f_k$ = [{mask}]", price)
    if thinned is not None:
        axes = panels[len(depths)]
        _panel(axes, _columns(layers, thinned["feddrop_keep"]), 0)
        share = _percent(thinned["feddrop_operations"] / depths[0]["operations"])
        met = thinned["feddrop_within_budget"]
        title = (
            f"FedDrop at the budget of depth {thinned['depth']}" if met else "FedDrop at its smallest rate"
        )
        above = "" if met else f", more than depth {thinned['depth']}"
        kept = f"keeps {_percent(thinned['feddrop_keep'])} of hidden neurons"
        _captions(axes, title, kept, f"{share} of the operations{above}")
    _legend(figure, thinned is not None, table["mode"])
    return figure


def _thinned(
    layers: Sequence[Mapping[str, Any]], depths: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The smallest depth whose budget FedDrop can meet, else the smallest; None without a layer to thin."""
    if len(layers) < 2 or not any(layer["kind"] == "linear" for layer in layers[:-1]):
        return None
    rows = [row for row in reversed(depths) if row["feddrop_keep"] is not None and row["feddrop_keep"] < 1]
    return next((row for row in rows if row["feddrop_within_budget"]), rows[0] if rows else None)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _columns(layers: Sequence[Mapping[str, Any]], keep: float | None) -> list[Column]:
    columns = [Column("input", None, "input", _heights(6, spread=True), (True,) * 6)]
    for index, layer in enumerate(layers):
        drawn = max(min(3, layer["units"]), min(6, round(0.7 * math.log2(max(layer["units"], 2)))))
        kept = [True] * drawn
        if keep is not None and layer["kind"] == "linear" and index < len(layers) - 1:
            removed = min(drawn - 1, max(1, round((1 - keep) * drawn)))
            # Any neurons would do; the same table always gives the same picture.
            for position in random.Random(index).sample(range(drawn), removed):
                kept[position] = False
        heights = _heights(drawn, spread=layer["units"] > drawn)
        columns.append(Column(layer["name"], layer["units"], layer["kind"], heights, tuple(kept)))
    return columns


def _heights(count: int, *, spread: bool) -> tuple[float, ...]:
    """Positions around 0 from top to bottom, with room for an ellipsis in the middle."""
    slots = count + spread
    upper = math.ceil(count / 2)
    taken = [slot for slot in range(slots) if not (spread and slot == upper)]
    return tuple((slots - 1) / 2 - slot for slot in taken)


def _panel(axes: Axes, columns: Sequence[Column], frozen: int) -> None:
    for index in range(1, len(columns)):
        _edges(axes, index, columns[index - 1], columns[index], trained=index > frozen)
    for index, column in enumerate(columns):
        _neurons(axes, index, column, trained=index > frozen)
    last = len(columns) - 1
    _arrow(axes, (0, last), -3.95, FROZEN, "forward")
    _arrow(axes, (last, frozen + 0.4), -4.45, TRAINED, "backward")
    axes.set_xlim(-0.4, last + 1.0)
    axes.set_ylim(-6.5, 5.5)


def _edges(axes: Axes, index: int, before: Column, after: Column, *, trained: bool) -> None:
    lines = [
        [(index - 1, start), (index, end)]
        for start, start_kept in zip(before.heights, before.kept, strict=True)
        for end, end_kept in zip(after.heights, after.kept, strict=True)
        if start_kept and end_kept
    ]
    style: Any = "solid" if trained else (0, (1, 2.2))
    width, opacity = (0.8, 0.75) if trained else (1.1, 0.85)
    color = TRAINED if trained else FROZEN
    axes.add_collection(
        LineCollection(lines, colors=color, linewidths=width, linestyles=[style], alpha=opacity, zorder=1)
    )


def _neurons(axes: Axes, index: int, column: Column, *, trained: bool) -> None:
    color = TRAINED if trained and column.units is not None else FROZEN
    marker, size = ("s", 8.5) if column.kind == "conv" else ("o", 9)
    for height, kept in zip(column.heights, column.kept, strict=True):
        look: dict[str, Any] = {
            "markerfacecolor": "#dbe9f8" if color == TRAINED else "#f1f3f5",
            "markeredgecolor": color,
        }
        if not kept:
            look = {"markerfacecolor": "white", "markeredgecolor": "#e3b7b3"}
            axes.plot(index, height, "x", markersize=5, color=REMOVED, zorder=4)
        axes.plot(index, height, marker, markersize=size, markeredgewidth=1.1, zorder=3, **look)
    if column.ellipsis:
        gap = (
            column.heights[(len(column.heights) + 1) // 2 - 1]
            + column.heights[(len(column.heights) + 1) // 2]
        ) / 2
        axes.plot([index] * 3, [gap - 0.28, gap, gap + 0.28], ".", markersize=2.6, color=TEXT, zorder=3)
    name = column.name if len(column.name) <= LONGEST_NAME else f"…{column.name[1 - LONGEST_NAME :]}"
    label = name if column.units is None else f"{name}\n{column.units}"
    axes.text(index, 3.4, label, ha="center", va="bottom", fontsize=8, color=TEXT, linespacing=1.1)


def _arrow(axes: Axes, ends: tuple[float, float], height: float, color: str, name: str) -> None:
    arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (ends[1], height), (ends[0], height), arrowprops=arrow)
    axes.text(max(ends) + 0.12, height, name, ha="left", va="center", fontsize=8, color=color)


def _captions(axes: Axes, title: str, mask: str, price: str) -> None:
    middle = (sum(axes.get_xlim()) - 0.6) / 2  # of the net, apart from the arrows' names
    axes.text(middle, 4.9, title, ha="center", va="bottom", fontsize=10.5, color=TEXT, fontweight="bold")
    axes.text(middle, -5.3, mask, ha="center", va="center", fontsize=10, color=TEXT)
    axes.text(middle, -6.1, price, ha="center", va="center", fontsize=8.5, color="#57606a")


def _legend(figure: Figure, thinned: bool, mode: str) -> None:
    handles = [
        Line2D([], [], color=TRAINED, linewidth=1.6, label="weights updated by back-propagation"),
        Line2D(
            [],
            [],
            color=FROZEN,
            linewidth=1.6,
            linestyle=(0, (1, 1.6)),
            label="weights used in the forward pass only",
        ),
    ]
    if thinned:
        handles.append(
            Line2D([], [], color=REMOVED, marker="x", linestyle="none", label="neurons removed by FedDrop")
        )
    title = f"Operations of one batch, counted in mode {mode}"
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        title=title,
        title_fontsize=8.5,
    )
