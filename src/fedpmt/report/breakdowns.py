"""Tables with a mark of its size behind each number: scores per level and class, and devices per layer."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fedpmt.records import ACCURACY
from fedpmt.report import markup
from fedpmt.report.drawing import categories_of, last_scores, layer_counts, speeds_of
from fedpmt.report.groups import panels_of
from fedpmt.report.markup import note, panel_row, section, table, value_cell
from fedpmt.report.quantities import Spread, score_unit, split
from fedpmt.report.theme import PALETTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.report.drawing import Kind
    from fedpmt.report.groups import Group
    from fedpmt.report.markup import Material

TITLES: dict[Kind, str] = {"level": "Per level", "class": "Per class"}


def breakdown_section(material: Material) -> str:
    """The score per level and per class at the last evaluation."""
    title = f"{material.score_title} per level and per class"
    if not any(categories_of(material.groups, kind) for kind in TITLES):
        return section("breakdown", title, note(f"No {material.score_name} per level or class is recorded."))
    words = f"Test {material.score_name} at the last evaluation."
    words += " Per level, classes are weighted as that level's devices hold them."
    if any(len(group.runs) > 1 for group in material.groups):
        words += " Means over seeds; below them, the range."
    parts = [note(words)]
    for kind, heading in TITLES.items():
        names = categories_of(material.groups, kind)
        if names:
            speeds = speeds_of(material.groups) if kind == "level" else {}
            heads = [f"{name} ({speeds[name]})" if speeds.get(name) else name for name in names]
            body = _rows(material, kind, names)
            parts += [f"<h3>{heading}</h3>", table(["method", *heads], body, "sortable marks", heading)]
    return section("breakdown", title, *parts)


def _rows(material: Material, kind: Kind, names: Sequence[str]) -> list[str]:
    body = []
    for panel, members in panels_of(material.groups).items():
        body.append(panel_row(panel, len(names) + 1))
        lowest, highest = _limits(members, kind)
        for group in members:
            found = [last_scores(run, kind) for run in group.runs]
            cells = ""
            for name in names:
                spread = Spread.of(one.get(name) for one in found)
                cells += _score_cell(spread, group.score_name, lowest, highest)
            body.append(markup.row(group.line, material.looks.get(group.line), cells))
    return body


def _limits(groups: Sequence[Group], kind: Kind) -> tuple[float, float]:
    """What an empty and a full mark stand for: 0 and 1 for accuracies."""
    if groups[0].score_name == ACCURACY:
        return 0.0, 1.0
    every = [
        value for group in groups for run in group.runs for value in last_scores(run, kind).values()
    ] or [0.0]
    return min(0.0, *every), max(every)


def _score_cell(spread: Spread | None, score_name: str, lowest: float, highest: float) -> str:
    if spread is None:
        return '<td class="none">-</td>'
    mean, _, unit = split(spread.mean, score_unit(score_name))
    small = ""
    if spread.count > 1:
        low, high = (split(value, score_unit(score_name))[0] for value in (spread.low, spread.high))
        small = f"<small>{escape(low)} to {escape(high)}</small>"
    share = (spread.mean - lowest) / (highest - lowest) if highest > lowest else 0.0
    return value_cell(
        f"{escape(f'{mean} {unit}'.rstrip())}{small}", spread.mean, "bar", f"--share: {100 * share:.1f}%"
    )


def layers_section(material: Material) -> str:
    """How many devices trained each layer."""
    words = "Mean number of devices per round whose update of a layer was averaged, from input to output"
    parts, title = list[str](), "Which layers were trained"
    for panel, members in panels_of(material.groups).items():
        counts = [(group, layer_counts(group)) for group in members if any(run.rounds for run in group.runs)]
        names = list(dict.fromkeys(name for _, found in counts for name in found))
        if not names:
            continue
        sizes = [len(step.devices) for group in members for run in group.runs for step in run.rounds]
        asked = max([*sizes, *(value for _, found in counts for value in found.values()), 1])
        body = [_layer_row(material, group, found, names, asked) for group, found in counts]
        heading = f"<h3>{escape(panel)}</h3>" if panel else ""
        parts += [heading, table(["method", *names], body, "marks cells", panel or title)]
    if not parts:
        return section("layers", title, note("No round is recorded."))
    return section("layers", title, note(f"{words}; the fuller the colour, the more of the cohort."), *parts)


def _layer_row(
    material: Material, group: Group, found: dict[str, float], names: Sequence[str], asked: float
) -> str:
    look = material.looks[group.line]
    cells = ""
    for name in names:
        if name not in found:
            cells += '<td class="none">-</td>'
            continue
        # At most 0.42: the text stays readable on it, in light and in dark.
        share = 4 + 38 * found[name] / asked
        style = f"--share: {share:.0f}%; --fill: var(--series-{PALETTE.index(look.colour)})"
        cells += value_cell(escape(f"{found[name]:.1f}"), found[name], "tint", style)
    return markup.row(group.line, look, cells)
