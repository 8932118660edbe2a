"""What the paper says of its experiments: every claim with the cases it was checked in, and one page of verdicts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedpmt.records import write_atomically
from fedpmt.types import SettingError
from reproduction.artefact import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PAGE = "README.md"
ORDER = ("complexity", "accuracy", "completion-time", "studies", "convergence")
"""Of the artefacts on the page: the paper's."""

HEAD = """
# What of the paper reproduces

One line per claim of its experimental section (IV) and of its theorem (III-C). A claim *holds* where every case we
could check bears it out, *holds partly* where some do, and *does not reproduce* where none does; what was varied
because the paper does not state it stands beside it. Numbers are ours, and each page names its command and seeds.

The runs behind the pages are kept in records/, one archive per page with a list of hashes; a run that several pages
need is in one of them. With `--draw-only --out docs/results` behind its command a page is made again from these runs,
to the byte if the libraries have the versions named at its end, and nothing is trained.
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
