"""The sections of the page that are figures. Each panel is its own SVG, so that a narrow screen can stack them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fedpmt.report.drawing import (
    categories_of,
    crowded,
    draw_bars,
    draw_layers,
    draw_score,
    layer_counts,
    points,
    score_limits,
    unit_of,
)
from fedpmt.report.figures import (
    HATCHES,
    PANELS,
    busy_height,
    choose_round,
    count_rows,
    deadline_of,
    draw_busy,
    horizon,
    is_stepped,
    layers_height,
    level_names,
    levels_of,
    representatives,
)
from fedpmt.report.groups import panels_of
from fedpmt.report.markup import box, legend, line_legend, note, panel_title, picture, section
from fedpmt.report.quantities import show, time_unit
from fedpmt.report.tables import evaluated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from fedpmt.records import RoundRecord
    from fedpmt.report.drawing import (
        Against,
        Kind,
    )
    from fedpmt.report.groups import Group
    from fedpmt.report.markup import Material

AXES: dict[Against, str] = {
    "rounds": "By round",
    "seconds": "Over virtual time",
    "bytes": "By bytes uploaded",
    "joules": "By energy",
}
BREAKDOWN: dict[Kind, str] = {"level": "Per level", "class": "Per class"}


def score_section(material: Material) -> str:
    """The score against rounds, time, bytes and, where it is known, energy, panel by panel."""
    groups = material.groups
    if not any(evaluated(run) for run in material.runs):
        return section("score", material.score_title, note(f"No {material.score_name} is recorded."))
    several = any(len(group.runs) > 1 for group in groups)
    parts = [
        note("Lines are means over seeds; bands reach from the worst seed to the best." if several else ""),
        line_legend(material.looks),
    ]
    for number, (panel, members) in enumerate(panels_of(groups).items()):

        def draw(axes: Axes, against: Against, members: Sequence[Group] = members) -> None:
            limits = score_limits(groups, members[0].score_name)
            draw_score(axes, members, material.looks, against, unit_of(groups, against), limits)

        pictures = [
            picture(f"score-{number}-{against}", title, (3.8, 2.7), partial(draw, against=against))
            for against, title in AXES.items()
            if against != "joules" or any(points(run, against) for run in material.runs)
        ]
        parts += [panel_title(panel), f'<div class="grid">{"".join(pictures)}</div>']
    return section("score", material.score_title, *parts)


def busy_section(material: Material) -> str:
    """Who was busy when, one panel per group, on one time axis."""
    chosen = representatives(material.groups)
    if not chosen:
        return section("busy", "Who was busy when", note("No round is recorded."))
    left, chosen = len(chosen) - PANELS, chosen[:PANELS]
    steps = choose_round([run for _, run in chosen])
    deadlines = [deadline_of(run) for _, run in chosen]
    end, colours = horizon(steps, deadlines), levels_of(steps)
    height = busy_height(max(map(count_rows, steps)))
    pictures = [
        picture(
            f"busy-{number}",
            group.line,
            (3.8, height),
            partial(draw_busy, step=step, colours=colours, unit=time_unit(end), end=end, deadline=deadline),
            _outcome(step),
        )
        for number, ((group, _), step, deadline) in enumerate(zip(chosen, steps, deadlines, strict=True))
    ]
    panel = f" under {chosen[0][0].panel}" if chosen[0][0].panel else ""
    words = f"Each device asked in one round{panel} on the virtual clock, slowest level at the top;"
    words += " beside each bar, what the device trained."
    words += " Transfer is drawn after training." if _transfers(steps) else ""
    words += f" The first {PANELS} of {PANELS + left} are shown." if left > 0 else ""
    return section(
        "busy",
        "Who was busy when",
        note(words),
        _busy_legend(steps),
        f'<div class="grid">{"".join(pictures)}</div>',
    )


def _transfers(steps: Sequence[RoundRecord]) -> bool:
    return any(device.transfer_seconds > 0 for step in steps for device in step.devices)


def _outcome(step: RoundRecord) -> str:
    arrived = sum(device.outcome == "arrived" for device in step.devices)
    name = f"{'up to server step' if is_stepped(step) else 'round'} {step.round}"
    return f"{name}: {arrived} of {len(step.devices)} counted, {show(step.round_seconds, time_unit)}"


def _busy_legend(steps: Sequence[RoundRecord]) -> str:
    colours = levels_of(steps)
    outcomes = {device.outcome for step in steps for device in step.devices}
    entries = [(box("level", colours[level]), name) for level, name in level_names(steps).items()]
    if _transfers(steps):
        entries.append((box("transfer", next(iter(colours.values()))), "transfer"))
    entries.append((box("waiting"), "waiting for the round to end"))
    entries += [(box(outcome), outcome) for outcome in HATCHES if outcome in outcomes]
    return legend(entries)


def layers_section(material: Material) -> str:
    """How many devices trained each layer."""
    parts = [
        note(
            "Mean number of devices per round whose update of a layer was averaged;"
            " the fuller the colour, the more of the cohort."
        )
    ]
    pictures = []
    for number, (panel, members) in enumerate(panels_of(material.groups).items()):
        count = max((len(layer_counts(group)) for group in members), default=0)
        size = (5.4 if count <= 16 else 9.0, layers_height(len(members)))
        css = "" if count <= 16 else "broad"
        draw = partial(draw_layers, groups=members, looks=material.looks)
        pictures.append(picture(f"layers-{number}", panel or "Devices per layer", size, draw, css=css))
    return section(
        "layers", "Which layers were trained", *parts, f'<div class="grid wide">{"".join(pictures)}</div>'
    )


def breakdown_section(material: Material) -> str:
    """The score per level and per class at the last evaluation."""
    title, titles = f"{material.score_title} per level and per class", BREAKDOWN
    if not any(categories_of(material.groups, kind) for kind in titles):
        return section("breakdown", title, note(f"No {material.score_name} per level or class is recorded."))
    words = f"Test {material.score_name} at the last evaluation."
    words += " Per level, classes are weighted as that level's devices hold them."
    if any(len(group.runs) > 1 for group in material.groups):
        words += " Whiskers reach from the worst seed to the best."
    parts = [note(words), line_legend(material.looks)]
    for number, (panel, members) in enumerate(panels_of(material.groups).items()):
        pictures = []
        for kind in titles:
            draw = partial(draw_bars, groups=members, looks=material.looks, kind=kind)
            wide = crowded(members, kind)
            size, css = ((9.0, 3.0), "broad") if wide else ((5.0, 2.6), "")
            pictures.append(picture(f"{kind}-{number}", titles[kind], size, draw, css=css))
        parts += [panel_title(panel), f'<div class="grid wide">{"".join(pictures)}</div>']
    return section("breakdown", title, *parts)
