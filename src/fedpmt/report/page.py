"""One HTML file that holds a whole comparison: no script, no request, the same bytes for the same records."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from fedpmt.report.groups import clean, require_runs
from fedpmt.report.markup import Material
from fedpmt.report.pictures import accuracy_section, breakdown_section, busy_section, layers_section
from fedpmt.report.results import budget_section, summary_section, targets_section
from fedpmt.report.sections import header, how_section, settings_section
from fedpmt.report.stylesheet import STYLESHEET
from fedpmt.report.tables import default_targets, write_csv, write_file
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fedpmt.records import RunRecord

TITLE = "Federated learning on unequal devices"

SECTIONS = {
    "summary": "Summary",
    "accuracy": "Accuracy",
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

    Without `targets`, those of `default_targets` are taken.
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
    material = Material.of(runs, default_targets(runs) if targets is None else targets)
    sections = [
        summary_section(material, table),
        accuracy_section(material),
        targets_section(material),
        budget_section(material),
        busy_section(material),
        layers_section(material),
        breakdown_section(material),
        settings_section(material),
        how_section(material),
    ]
    shown = {name: body for name, body in zip(SECTIONS, sections, strict=True) if body}
    links = "".join(f'<li><a href="#{name}">{escape(SECTIONS[name])}</a></li>' for name in shown)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # An empty icon: else a browser asks the server for one.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(clean(title))}</title>\n<style>\n{STYLESHEET}</style>\n</head>\n<body>",
            header(material, title),
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main>',
            *shown.values(),
            "</main>\n<footer><p>Drawn by fedpmt from the records of its runs.</p></footer>\n</body>\n</html>\n",
        ]
    )
