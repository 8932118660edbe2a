"""One HTML file that holds a whole comparison: no script, no request, the same bytes for the same records."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from fedpmt.report.groups import require_runs
from fedpmt.report.markup import Material, document
from fedpmt.report.pictures import breakdown_section, busy_section, layers_section, score_section
from fedpmt.report.results import budget_section, summary_section, targets_section
from fedpmt.report.sections import header, how_section, settings_section
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
    "budget": "Budget",
    "busy": "Who was busy",
    "layers": "Layers",
    "breakdown": "Levels and classes",
    "settings": "Settings",
    "how": "How it was computed",
}


def write_page(
    runs: Sequence[RunRecord],
    path: Path,
    targets: Sequence[float] | None = None,
    title: str = TITLE,
) -> tuple[Path, Path]:
    """Write the page, and beside it the CSV that it links to; returns both paths.

    Without `targets`, those of `default_targets` are taken for runs whose score is an accuracy.
    """
    table = path.with_suffix(".csv")
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise SettingError(f"page = '{path}' is refused: a file name that ends in .html is needed")
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
    sections = [
        summary_section(material, table),
        score_section(material),
        targets_section(material),
        budget_section(material),
        busy_section(material),
        layers_section(material),
        breakdown_section(material),
        settings_section(material),
        how_section(material),
    ]
    titles = {**SECTIONS, "score": material.score_title}
    shown = {name: (titles[name], body) for name, body in zip(titles, sections, strict=True) if body}
    return document(title, header(material, title), shown, "Drawn by fedpmt from the records of its runs.")
