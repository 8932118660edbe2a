"""How figures look, and how one becomes SVG that sits in a page without disturbing it or its neighbours."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from fedpmt.report.groups import Group

P = ParamSpec("P")
R = TypeVar("R")

INK, MUTED, GRID, PAPER, TRACK = "#1b2331", "#566173", "#dfe4ea", "#fefefe", "#e9edf1"
# Okabe and Ito's colours: told apart with any kind of colour blindness. Black is the text's, yellow is too light.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SHAPES = ("o", "s", "^", "D", "v", "P")
SIGNS = {
    "fedpmt": (0, 0), "fedavg": (1, 0), "feddrop": (2, 0), "scaffold": (3, 0), "fedprox": (4, 0), "heterofl": (5, 0),
    "slimfl": (0, 1), "prunefl": (1, 1), "fedmp": (2, 1), "fedrolex": (3, 1), "fjord": (4, 1), "ist": (5, 1),
    "comet": (0, 2), "fedgkt": (1, 2), "fedgen": (2, 2), "feddf": (3, 2), "fedra": (4, 2), "flexlora": (5, 2),
    "fiarse": (0, 4), "depthfl": (1, 4), "inclusivefl": (2, 4), "fedepth": (3, 4), "timelyfl": (4, 4),
    "embracingfl": (0, 3), "fedolf": (1, 3), "salf": (2, 3), "fedpart": (3, 3), "cocofl": (4, 3), "fedel": (5, 3),
    "fedasync": (0, 5), "fedbuff": (1, 5),
}  # fmt: skip
"""Numbers of a method's colour and shape: both together tell all methods apart."""

RESERVED = {method: colour for method, (colour, _) in SIGNS.items()}
"""A method keeps its colour from one report to the next, whichever others are in it."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (6, 2, 1.5, 2), (1.5, 1.5), (9, 3), (3, 1, 1, 1, 1, 1))

# Drawn in these colours, served as these variables: the page redefines them in the dark.
VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper", TRACK: "--track",
    **{colour: f"--series-{index}" for index, colour in enumerate(PALETTE)},
}  # fmt: skip

RC: Any = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.labelsize": 9, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "legend.fontsize": 8.5,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "xtick.major.size": 3, "ytick.major.size": 0, "xtick.major.width": 0.7,
    "hatch.linewidth": 0.7, "legend.frameon": False, "figure.facecolor": PAPER, "axes.facecolor": "none",
    "svg.fonttype": "none", "svg.hashsalt": "fedpmt",
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """How a group is drawn wherever it appears."""

    colour: str
    dashes: tuple[float, ...]

    @property
    def variable(self) -> str:
        """The colour as the page's style sheet names it."""
        return f"var({VARIABLES[self.colour]}, {self.colour})"


def looks_of(groups: Sequence[Group]) -> dict[str, Look]:
    """A look per line name: one colour per method, dashes for its variants; with a single method, colours."""
    methods = list(dict.fromkeys(group.method for group in groups))
    by_method = len(methods) > 1
    keys = methods if by_method else list(dict.fromkeys(group.line for group in groups))
    reserved = {key: RESERVED[key] for key in keys if key in RESERVED}
    free = [index for index in range(len(PALETTE)) if index not in reserved.values()]
    free += range(len(PALETTE))
    others = [key for key in keys if key not in reserved]
    numbers = reserved | {key: free[index % len(free)] for index, key in enumerate(others)}
    used: dict[int, int] = {}
    looks: dict[str, Look] = {}
    for group in groups:
        if group.line not in looks:
            number = numbers[group.method if by_method else group.line]
            turn = used[number] = used.get(number, -1) + 1
            looks[group.line] = Look(PALETTE[number], DASHES[turn % len(DASHES)])
    return looks


def level_colours(levels: Sequence[int]) -> dict[int, str]:
    """An ordered scale from the slowest level to the fastest, without its darkest and lightest ends."""
    scale = mpl.colormaps["viridis"]
    places = np.linspace(0.22, 0.9, len(levels)) if len(levels) > 1 else [0.5] * len(levels)
    return {
        level: mpl.colors.to_hex(scale(float(place))) for level, place in zip(levels, places, strict=True)
    }


def themed(draw: Callable[P, R]) -> Callable[P, R]:
    """Draw with the settings above, leaving the caller's matplotlib as it was."""

    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with mpl.rc_context(RC):
            return draw(*args, **kwargs)

    return inner


def new_figure(width: float, height: float) -> Figure:
    """A figure that belongs to nobody's global state; inches."""
    return Figure(figsize=(width, height), layout="constrained")


def say(axes: Axes, text: str) -> None:
    """Words in the place of a figure that there is nothing to draw in."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, transform=axes.transAxes)


@themed
def to_svg(figure: Figure, name: str, description: str) -> str:
    """A figure as an SVG element to put into a page; `name` keeps its ids apart from other figures'."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # The reader's browser has the glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<style[^>]*>.*?</style>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^<>]+>", lambda tag: _adapt(tag.group(), name), text)
    spoken = description.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return text.strip().replace("<svg ", f'<svg role="img" aria-label="{spoken}" ', 1)


def _adapt(tag: str, name: str) -> str:
    """One tag: own ids, the page's font, colours that follow the page."""
    if tag.startswith("<svg"):
        tag = re.sub(r' (?:width|height)="[^"]*"', "", tag)
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'href="#', f'href="#{name}-', tag)
    tag = tag.replace("url(#", f"url(#{name}-")
    tag = re.sub(r"font: (?:(\d+|bold) )?([\d.]+px) [^;\"]*", _font, tag)  # matplotlib up to 3.10
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    for colour, variable in VARIABLES.items():
        if colour in tag:
            tag = re.sub(rf'(?<=: ){colour}(?=[;"])', f"var({variable}, {colour})", tag)
    return tag


def _font(found: re.Match[str]) -> str:
    weight = f"; font-weight: {found.group(1)}" if found.group(1) else ""
    return f"font-size: {found.group(2)}{weight}"
