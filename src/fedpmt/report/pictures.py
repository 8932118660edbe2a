"""The sections of the page that are figures: static ones, and places for those that the script draws.

Each static panel is its own SVG, so that a narrow screen can stack them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fedpmt.report.drawing import draw_score, points, score_limits, unit_of
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
    level_names,
    levels_of,
    representatives,
)
from fedpmt.report.groups import panels_of
from fedpmt.report.markup import (
    box,
    drawn_by_script,
    legend,
    line_legend,
    note,
    panel_title,
    picture,
    section,
    static,
)
from fedpmt.report.quantities import show, time_unit
from fedpmt.report.tables import evaluated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from fedpmt.records import RoundRecord
    from fedpmt.report.drawing import Against
    from fedpmt.report.groups import Group
    from fedpmt.report.markup import Material

AXES: dict[Against, str] = {
    "rounds": "By round",
    "seconds": "Over virtual time",
    "bytes": "By bytes uploaded",
    "joules": "By energy",
}
BUSY = (
    "Each device that was asked in a round, on the virtual clock, the slowest level at the top; next to each bar, what"
    " the device trained."
)


def score_section(material: Material) -> str:
    """The score against rounds, time, bytes and, where it is known, energy, panel by panel."""
    groups = material.groups
    script = drawn_by_script("curves")
    if material.live:
        return section("score", "Curves", script)
    if not any(evaluated(run) for run in material.runs):
        return section("score", material.score_title, note(f"No {material.score_name} is recorded."), script)
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
    return section("score", material.score_title, static(*parts), script)


def busy_section(material: Material) -> str:
    """Who was busy when, one panel per group, on one time axis."""
    script = drawn_by_script("busy")
    if material.live:
        return section("busy", "Who was busy when", note(BUSY), script)
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
    panel = f" for {chosen[0][0].panel}" if chosen[0][0].panel else ""
    words = " Transfer is drawn after training." if _transfers(steps) else ""
    shown = f"Shown{panel}: the last round that all runs have"
    shown += f", of the first {PANELS} of {PANELS + left}." if left > 0 else "."
    figures = f'<div class="grid">{"".join(pictures)}</div>'
    return section(
        "busy",
        "Who was busy when",
        note(BUSY + words),
        static(note(shown), _busy_legend(steps), figures),
        script,
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
