"""What an experiment publishes: a page of Markdown and one of HTML, its numbers as JSON, and its figures as SVG.

What the paper says of its experiments is a claim, with the cases it was checked in; one page has all verdicts.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field
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
from reproduction.verdicts import FAILS, HOLDS, NOT_RUN, UNDECIDED, Claim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure


LIBRARIES = ("torch", "numpy")
JUDGED = "Judged by the [rules](README.md#how-claims-are-judged); all cases of this page are one family."


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
        parts += [table.markdown() for table in self.tables]
        if self.claims:
            parts += ["## What the paper says", "", JUDGED, ""]
        for claim in self.claims:
            parts += [f"### Claim: {claim.name}", "", claim_table(claim).markdown()]
        return "\n".join([*parts, self.origin, ""])

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


def claim_table(claim: Claim) -> Table:
    """The cases of a claim, one per row."""
    rows = [(case.where, case.shown, case.chance, case.verdict) for case in claim.cases]
    verdict = verdict_text(claim)
    said = f"**{verdict[0].upper()}{verdict[1:]}.** {claim.note}"
    columns = ("case", claim.measure, "p, corrected", "verdict")
    return Table(f"{claim.text} ({claim.place})", columns, rows, said.strip(), words=True)


PAGE = "README.md"
ORDER = ("complexity", "accuracy", "completion-time", "studies", "variations", "convergence", "comparison")
"""Of the artefacts on the page: the paper's."""

SUMMARY = (
    "With FedPMT, a weak device trains only the last layers of the model, and the server averages each layer over the "
    "devices that trained it.",
    "We ran the experiments of its paper again, with the paper's settings. {total}",
    "The operations that a device saves, number by number as printed (Table I): {complexity.operations}.",
    '"FedPMT ends above FedDrop", which thins layers at random, at equal operations (Figure 1): {accuracy.lead}.',
    '"FedPMT ends like FedAvg", in which every device trains everything, within 2 points: with two levels of devices '
    "{accuracy.like-fedavg}; with four or five levels on the CNNs {accuracy.like-fedavg-deep}.",
    '"FedPMT is faster than FedAvg" to an accuracy, without a deadline (Table II): {completion-time.faster}.',
    "The same with a deadline that cuts off FedAvg's slow devices: {completion-time.faster-deadline}.",
    '"The last layers are the ones to train" at equal operations: {studies.blocks}.',
    '"The error falls like 1/T" on convex problems: {convergence.rate}. With fixed levels and unequal data it stops '
    "at a floor ([why](../theory.md)).",
    "What these pages do not show is listed in [limits](limits.md).",
)
"""Lines for a newcomer; a name in braces is a claim, whose verdict takes its place."""

RULES = f"""
## How claims are judged

The rules are in `reproduction/verdicts.py`; no page has others.

1. **Pairs.** Two methods are compared on equal seeds: the same data on the same devices, the same initial weights, the
   same devices in each round. What counts is the mean of the differences, with its 95 % interval (Student's t).
2. **Cases.** A claim is checked in every case it speaks of: a net, a split, a target. Each case *{HOLDS}*, *{FAILS}* or
   is *{UNDECIDED}*, and the claim's verdict counts them. *{NOT_RUN.capitalize()}* means that the runs are missing.
3. **Above and below.** A case is decided if a two-sided test gives p < 0.05 after Holm's correction over all cases of
   its page. It then holds or fails by the sign; else it is undecided, however large the mean. One seed decides nothing.
4. **Alike.** "A ends like B, within a margin" holds if the interval of the difference lies inside the margin, fails if
   it lies outside, and is undecided if it crosses a boundary. What is tested is the distance to the boundary, with the
   same correction.
5. **Times** are compared by ratio: the mean of the logarithms of paired ratios. A run that never reaches the target
   is given its last round; such a pair can weaken a lead, not reverse it. Pairs in which neither gets there are left
   out.
6. **Exact numbers** (operations, bytes, rows of a table) need no seeds: they come out as stated or not.
7. Where all seeds give the same difference, which happens with rounds to a target, the sign test replaces the t-test.
""".strip()

RECOMPUTE = """
## Check ten numbers yourself

The runs behind the pages are in `records/`, one archive per page with a list of hashes. This script picks ten final
accuracies of [accuracy](accuracy.md) at random and computes them from the raw records, without our code:

```python
import json, pathlib, random, statistics, tarfile

with tarfile.open("docs/results/records/accuracy.tar.xz") as tar:
    runs = [json.load(tar.extractfile(member)) for member in tar if member.name.endswith(".json")]
published = json.loads(pathlib.Path("docs/results/accuracy.json").read_text())
for row in random.sample(published["final"], 10):
    same = {key: row[key] for key in ("task", "partition", "method", "depths") if row[key]}
    curves = [run["rounds"]["score"] for run in runs if same.items() <= run["settings"].items()]
    finals = [statistics.fmean([score for score in curve if score is not None][-5:]) for curve in curves]
    print(*same.values(), f"{statistics.fmean(finals):.4f}, published {row['mean']:.4f}, {len(finals)} seeds")
    assert abs(statistics.fmean(finals) - row["mean"]) < 1e-9
```

To draw a whole page again from its runs, add `--draw-only --out docs/results` to the command at its end. With the
versions named there, the page is the same to the byte. `python -m reproduction all` plays every run again
([how long it takes](../reproducing.md)).
""".strip()


def write_verdicts(folder: Path) -> Path | None:
    """The page of verdicts, from all artefacts published in a folder; None where none makes a claim."""
    found = {name: claims for name in ORDER if (claims := _published_claims(folder / f"{name}.json"))}
    if not found:
        return None
    rows = [
        (claim.text, claim.place, f"**{verdict_text(claim)}**", f"[{name}]({name}.md#claim-{claim.name})")
        for name, claims in found.items()
        for claim in claims
    ]
    columns = ("claim", "in the paper", "verdict", "evidence")
    lines = ["# What of the paper reproduces", "", *_summary(found), ""]
    lines += ["## Claims", "", JUDGED_HERE, "", Table("All claims", columns, rows, words=True).markdown()]
    page = folder / PAGE
    write_atomically(page, "\n".join([*lines, RULES, "", RECOMPUTE, "", *_pages(folder)]).encode())
    return page


JUDGED_HERE = (
    "The paper's claims in our words, and how many of the cases that we checked hold "
    "([rules](#how-claims-are-judged)). The evidence has a row per case, with our number and its interval."
)


def _published_claims(path: Path) -> list[Claim]:
    """The claims of a page; none where it does not exist or is a taste, which judges nothing."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        return [Claim.read(one) for one in found.get("claims", []) if "--quick" not in found["command"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(f"'{path}' is not an artefact of this version ({error})") from error


def verdict_text(claim: Claim) -> str:
    """The verdict with what belongs to it."""
    return f"{claim.verdict}; {claim.remark}" if claim.remark else claim.verdict


PLURALS = {HOLDS: "hold", FAILS: "fail", UNDECIDED: "are undecided", NOT_RUN: "are not run yet"}


def _summary(found: Mapping[str, Sequence[Claim]]) -> list[str]:
    """The lines for a newcomer, those left out whose claims are not published here."""
    words = {
        f"{name}.{claim.name}": verdict_text(claim) for name, claims in found.items() for claim in claims
    }
    every = [case.verdict for claims in found.values() for claim in claims for case in claim.cases]
    counts = ", ".join(f"{every.count(word)} {plural}" for word, plural in PLURALS.items() if word in every)
    judged = f"{len(words)} claims in {len(every)} cases: {counts}"
    words["total"] = f"We checked {judged} ([rules](#how-claims-are-judged))."
    lines = []
    for line in SUMMARY:
        if set(re.findall(r"\{(.+?)\}", line)) <= words.keys():
            lines.append("- " + re.sub(r"\{(.+?)\}", lambda name: words[name[1]], line))
    return lines


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
    tables = {f"table-{number}": table for number, table in enumerate(artefact.tables, 1)}
    tables |= {f"claim-{claim.name}": claim_table(claim) for claim in artefact.claims}
    for name, table in tables.items():
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
