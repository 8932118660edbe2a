"""What an experiment publishes: a page of Markdown and one of HTML, its numbers as JSON, and its figures as SVG."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from fedpmt import __version__
from fedpmt.records import write_atomically
from fedpmt.report.theme import RC
from fedpmt.types import SettingError
from reproduction.web import web_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from reproduction.claims import Claim

LIBRARIES = ("torch", "numpy")


@dataclass(frozen=True)
class Table:
    """Rows of text under a title, and what must be known to read them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    words: bool = False  # whether the other columns are text, too

    def markdown(self) -> str:
        """As Markdown; the first column is text, the others are numbers, unless said otherwise.

        >>> print(Table("Rounds", ("target", "ours"), [("50 %", "39")]).markdown())
        **Rounds**
        <BLANKLINE>
        | target | ours |
        |---|--:|
        | 50 % | 39 |
        <BLANKLINE>
        """
        lines = [f"**{self.title}**", "", _row(self.columns)]
        lines.append("|---|" + ("---|" if self.words else "--:|") * (len(self.columns) - 1))
        lines += [_row(row) for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


@dataclass(frozen=True)
class Picture:
    """A figure and the words under it, which name the number of seeds."""

    name: str  # of its files
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Artefact:
    """One table or figure of the paper, ours beside it."""

    name: str
    title: str
    command: str  # what makes it
    text: str  # what is shown and what holds, in Markdown
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    values: Mapping[str, Any] = field(default_factory=dict)  # every number, for programs
    claims: Sequence[Claim] = ()  # of the paper, checked here

    def markdown(self) -> str:
        """The page."""
        parts = [f"# {self.title}", "", self.text.strip(), ""]
        for picture in self.pictures:
            parts += [f"![{picture.caption}]({picture.name}.svg)", "", picture.caption, ""]
        parts += [table.markdown() for table in self.all_tables]
        return "\n".join([*parts, self.origin, ""])

    @property
    def all_tables(self) -> list[Table]:
        """Its tables, the last of them about the paper's claims."""
        rows = [(claim.text, claim.verdict, claim.numbers, claim.varied) for claim in self.claims]
        columns = ("claim", "verdict", "numbers", "varied")
        judged = [Table("What the paper says", columns, rows, words=True)] if rows else []
        return [*self.tables, *judged]

    @property
    def origin(self) -> str:
        """What it was made by."""
        return f"Made by `{self.command}` with {', '.join(versions())}."


def publish(artefact: Artefact, folder: Path) -> list[Path]:
    """Write its pages, its JSON and its figures; the files written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{artefact.name}.{kind}" for kind in ("md", "json", "html")]
        write_atomically(paths[0], artefact.markdown().encode())
        write_atomically(paths[2], web_page(artefact).encode())
        numbers = {"command": artefact.command, "versions": versions(), **artefact.values}
        if artefact.claims:
            numbers["claims"] = [claim.values() for claim in artefact.claims]
        write_atomically(paths[1], (json.dumps(numbers, indent=1) + "\n").encode())
        for picture in artefact.pictures:
            paths.append(folder / f"{picture.name}.svg")
            write_atomically(paths[-1], _svg(picture.figure))
    except OSError as error:
        raise SettingError(f"out = '{folder}' cannot be written ({error})") from error
    return paths


def _svg(figure: Figure) -> bytes:
    """Draw a figure as an SVG file that looks the same everywhere: letters are paths, not the reader's fonts."""
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({**RC, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata=nothing)
    return buffer.getvalue()


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def versions() -> list[str]:
    """Our version and those of the libraries that numbers hang on."""
    return [f"fedpmt {__version__}", *(f"{name} {version(name)}" for name in LIBRARIES)]
