"""One HTML file that holds a whole comparison: it asks nobody for anything, and the same records give the same bytes.

Its figures are drawn twice: as static ones, which stay where no script runs and on paper, and by the page's script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedpmt.report.breakdowns import breakdown_section, layers_section
from fedpmt.report.chart_data import chart_data
from fedpmt.report.facts import header, how_section, settings_section
from fedpmt.report.groups import require_runs
from fedpmt.report.markup import Material, document, navigation
from fedpmt.report.pictures import busy_section, score_section
from fedpmt.report.results import budget_section, clients_section, summary_section, targets_section
from fedpmt.report.script import Script
from fedpmt.report.tables import write_csv, write_file
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fedpmt.records import RunRecord

TITLE = "Federated learning on unequal devices"

SECTIONS = {
    "summary": "Summary",
    "score": "Score",
    "targets": "Time to target",
    "clients": "Clients",
    "budget": "Budget",
    "busy": "Who was busy",
    "layers": "Layers",
    "breakdown": "Levels and classes",
    "settings": "Settings",
    "how": "How it was computed",
}
FOOTER = "Drawn by fedpmt from the records of its runs."
FILTER = '\n<div class="filter" data-part="filter" role="search" aria-label="Methods" hidden></div>'
LIVE = (
    '\n<p id="live" class="live" role="status" data-words="Live: updated after each round.">'
    "Live: needs a browser that runs scripts.</p>"
)
DRAWN_ON = ("score", "busy")
"""Sections that the script fills and updates by itself."""


def write_page(
    runs: Sequence[RunRecord],
    path: Path,
    targets: Sequence[float] | None = None,
    title: str = TITLE,
) -> tuple[Path, Path]:
    """Write the page, and next to it the CSV that it links to; returns both paths.

    Without `targets`, those of `default_targets` are taken for runs whose score is an accuracy.
    """
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise SettingError(f"out must be the name of a file that ends in .html (got '{path}')")
    table = path.with_suffix(".csv")
    text = page(runs, quote(table.name), targets, title)
    # The table first: a page never links to what is not there.
    write_csv(runs, table)
    write_file(path, text)
    return path, table


def page(
    runs: Sequence[RunRecord], table: str, targets: Sequence[float] | None = None, title: str = TITLE
) -> str:
    """The page as text; `table` is the address of the CSV."""
    require_runs(runs)
    material = Material.of(runs, targets)
    shown = {name: (heading, body) for name, (heading, body) in _sections(material, table).items() if body}
    top = header(material, title) + FILTER
    return document(title, top, shown, FOOTER, Script(chart_data(material)))


def live_page(runs: Sequence[RunRecord], table: str, stamp: str, title: str = TITLE) -> str:
    """The page of runs that go on, or have not begun; its script asks for what is new since this stamp."""
    material = Material.of(runs, live=True)
    sections = {
        name: (heading, body) if body else ("", _placeholder(name))
        for name, (heading, body) in _sections(material, table).items()
    }
    top = header(material, title) + LIVE + FILTER
    return document(title, top, sections, FOOTER, Script(chart_data(material), stamp))


def live_parts(runs: Sequence[RunRecord], table: str, title: str = TITLE) -> dict[str, Any]:
    """What the script of a live page draws, and the parts of the page that are text, by their ids."""
    material = Material.of(runs, live=True)
    found = _sections(material, table)
    there = {name: one for name, one in found.items() if one[1]}
    texts = {name: body or _placeholder(name) for name, (_, body) in found.items() if name not in DRAWN_ON}
    parts = {"top": header(material, title), "sections": navigation(there), **texts}
    return {"data": chart_data(material), "parts": parts}


def _placeholder(name: str) -> str:
    return f'<section id="{name}" hidden></section>'


def _sections(material: Material, table: str) -> dict[str, tuple[str, str]]:
    """The heading that links show and the body of each section; empty where there is nothing to say."""
    if not material.runs:
        return {
            name: (heading, score_section(material) if name == "score" else "")
            for name, heading in SECTIONS.items()
        }
    bodies = {
        "summary": summary_section(material, table),
        "score": score_section(material),
        "targets": targets_section(material),
        "clients": clients_section(material),
        "budget": budget_section(material),
        "busy": busy_section(material),
        "layers": layers_section(material),
        "breakdown": breakdown_section(material),
        "settings": settings_section(material),
        "how": how_section(material),
    }
    titles = {**SECTIONS, "score": "Curves" if material.live else material.score_title}
    return {name: (titles[name], body) for name, body in bodies.items()}
