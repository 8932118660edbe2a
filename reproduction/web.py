"""An artefact as one HTML file that needs nothing beside itself."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from fedpmt.report.markup import document, section
from fedpmt.report.markup import table as table_of
from fedpmt.report.theme import to_svg

if TYPE_CHECKING:
    from reproduction.artefact import Artefact, Picture, Table

# Whatever stands in a record stays text: tags are not let through.
MARKDOWN = MarkdownIt("commonmark", {"html": False})
NEIGHBOUR = re.compile(r'(?<=href=")([\w-]+)\.md(?=[#"])')
"""A link to another artefact's page of Markdown; its HTML lies beside it."""


def web_page(artefact: Artefact) -> str:
    """The page as text."""
    sections = {"summary": ("Summary", section("summary", "Summary", _words(artefact.text)))}
    if artefact.pictures:
        figures = "\n".join(_figure(picture) for picture in artefact.pictures)
        body = f'<div class="grid wide">{figures}</div>'
        sections["figures"] = ("Figures", section("figures", "Figures", body))
    for number, table in enumerate(artefact.all_tables, 1):
        name = f"table-{number}"
        note = f'<div class="note after">{_words(table.note)}</div>' if table.note else ""
        sections[name] = (table.title, section(name, table.title, _table(table), note))
    header = f"<header>\n<h1>{escape(artefact.title)}</h1>\n</header>"
    return document(artefact.title, header, sections, _line(artefact.origin))


def _words(text: str) -> str:
    return NEIGHBOUR.sub(r"\1.html", MARKDOWN.render(text))


def _line(text: str) -> str:
    return NEIGHBOUR.sub(r"\1.html", MARKDOWN.renderInline(text))


def _figure(picture: Picture) -> str:
    drawn = to_svg(picture.figure, picture.name, picture.caption)
    return f'<figure class="broad">{drawn}\n<figcaption><span>{_line(picture.caption)}</span></figcaption></figure>'


def _table(table: Table) -> str:
    rows = ["<tr>" + "".join(f"<td>{_line(cell)}</td>" for cell in row) + "</tr>" for row in table.rows]
    return table_of(table.columns, rows, "words" if table.words else "")
