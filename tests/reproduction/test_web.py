from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fedpmt.report.theme import new_figure
from reproduction.artefact import Artefact, Picture, Table, publish
from reproduction.claims import Case, Claim
from web_pages import read, shown_by_a_browser

if TYPE_CHECKING:
    from pathlib import Path


def artefact() -> Artefact:
    figure = new_figure(3, 2)
    figure.subplots().plot([0, 1], [0, 1])
    return Artefact(
        "trial",
        "A <trial>",
        "python -m reproduction trial",
        "It is **so**, see [studies](studies.md).\n\n- <b>one</b>\n- `two`",
        [
            Table("Numbers", ("method", "value"), [("**FedPMT**", "1 < 2")], "A *note*."),
            Table("Words", ("method", "said"), [("FedAvg", "a | b")], words=True),
        ],
        [Picture("trial-curve", figure, "A curve, 1 seed")],
        claims=[Claim("it is fast", "IV", [Case("here", True, "2 x")], "nothing")],
    )


def test_the_page_has_all_of_the_artefact_and_needs_nothing_beside_it(tmp_path: Path) -> None:
    paths = publish(artefact(), tmp_path)
    text = (tmp_path / "trial.html").read_text()
    assert tmp_path / "trial.html" in paths
    found = read(text, frozenset({"studies.html"}))
    assert found.tags["table"] == 3
    assert found.tags["svg"] == 1
    assert {"summary", "figures", "table-1", "table-2", "table-3"} <= set(found.ids)
    words = "".join(found.words)
    for one in (
        "A <trial>",
        "1 < 2",
        "a | b",
        "A curve, 1 seed",
        "it is fast",
        "python -m reproduction trial",
    ):
        assert one in words
    # Markup of ours is markup, that of records is text.
    assert "<strong>FedPMT</strong>" in text
    assert "<em>note</em>" in text
    assert "<b>one</b>" in words


def test_the_same_artefact_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        publish(artefact(), tmp_path / name)
    assert (tmp_path / "a" / "trial.html").read_bytes() == (tmp_path / "b" / "trial.html").read_bytes()


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it(tmp_path: Path, dark: bool) -> None:
    publish(artefact(), tmp_path)
    sections = ("summary", "figures", "table-1", "table-2", "table-3")
    shown_by_a_browser(tmp_path / "trial.html", sections, width=1360, dark=dark)
