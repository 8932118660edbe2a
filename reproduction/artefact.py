"""What an experiment publishes: a page of Markdown and one of HTML, its numbers as JSON, and its figures as SVG.

What the paper says of its experiments is a claim, with the cases it was checked in; one page has all verdicts.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from markdown_it import MarkdownIt

from fedpmt import __version__
from fedpmt.records import write_atomically
from fedpmt.report.markup import document, section
from fedpmt.report.markup import table as table_of
from fedpmt.report.theme import RC, to_svg
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure


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
    """One table or figure of the paper, next to ours."""

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
            parts += [f"![{self.title}]({picture.name}.svg)", "", picture.caption, ""]
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


PAGE = "README.md"
ORDER = ("complexity", "accuracy", "completion-time", "studies", "convergence")
"""Of the artefacts on the page: the paper's."""

HEAD = """
# What of the paper reproduces

One line for each claim of the paper's experiments (section IV) and of its theorem (III-C). A claim *holds* if all
cases we checked confirm it, *holds partly* if some do, and *does not reproduce* if none does. "Varied" is what the
paper leaves open and we tried. The numbers are ours; each page names its command and seeds.

The runs behind the pages are in records/, one archive per page with a list of hashes. Add `--draw-only --out
docs/results` to a page's command to draw it again from these runs, without training. With the versions named at its
end, the page is the same to the byte.
""".strip()


@dataclass(frozen=True)
class Case:
    """One place where a claim was checked."""

    where: str
    holds: bool
    shown: str  # the number that decides


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, in our words.

    >>> Claim("FedPMT is faster", "IV-C", [Case("i.i.d.", True, "1.9 x"), Case("2 classes", False, "0.9 x")]).verdict
    'holds partly: 1 of 2'
    """

    text: str
    place: str  # in the paper
    cases: Sequence[Case]
    varied: str = ""  # what the paper leaves open here, and was tried

    @property
    def verdict(self) -> str:
        """In a word, with the count where there are several cases."""
        held, count = sum(case.holds for case in self.cases), len(self.cases)
        if not count:
            return "not measured"
        if held == count:
            return "holds"
        return f"holds partly: {held} of {count}" if held else "does not reproduce"

    def values(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "verdict": self.verdict}

    @property
    def numbers(self) -> str:
        """All cases, those that fail marked."""
        return "; ".join(
            f"{case.where}: {case.shown}{'' if case.holds else ' (no)'}".lstrip(": ") for case in self.cases
        )


def write_verdicts(folder: Path) -> Path | None:
    """The page of verdicts, from all artefacts published in a folder; None where none makes a claim."""
    rows: list[tuple[str, ...]] = []
    for name in ORDER:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text())
            claims = [
                Claim(one["text"], one["place"], [Case(**case) for case in one["cases"]], one["varied"])
                for one in found.get("claims", [])
                if "--quick" not in found["command"]  # a taste judges nothing
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(f"'{path}' is not an artefact of this version ({error})") from error
        rows += [
            (
                claim.text,
                claim.place,
                f"**{claim.verdict}**",
                claim.numbers,
                claim.varied or "-",
                f"[{name}]({name}.md)",
            )
            for claim in claims
            if claim.cases
        ]
    if not rows:
        return None
    columns = ("claim", "in the paper", "verdict", "our numbers", "varied", "evidence")
    page = folder / PAGE
    table = Table("Claims", columns, rows, words=True).markdown()
    write_atomically(page, "\n".join([HEAD, "", table, *_pages(folder)]).encode())
    return page


def _pages(folder: Path) -> list[str]:
    """Every page of the folder under its title."""
    titles = {
        path.name: path.read_text().partition("\n")[0].removeprefix("# ")
        for path in sorted(folder.glob("*.md"))
        if path.name != PAGE
    }
    return ["## All pages", "", *(f"- [{title}]({name})" for name, title in titles.items()), ""]


# Whatever stands in a record stays text: tags are not let through.
MARKDOWN = MarkdownIt("commonmark", {"html": False})
NEIGHBOUR = re.compile(r'(?<=href=")([\w-]+)\.md(?=[#"])')
"""A link to another artefact's page of Markdown; its HTML lies next to it."""


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
