from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from report_samples import comparison, run

from fedpmt.report import write_page
from fedpmt.report.page import SECTIONS, page
from fedpmt.types import SettingError
from web_pages import Reader, read

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord


ALWAYS = set(SECTIONS) - {"budget", "clients"}
"""Sections that a page has whether or not its runs had a budget."""


def check(text: str) -> Reader:
    """What holds for every report, whatever the runs."""
    found = read(text, frozenset({"table.csv"}), scripts=2)
    assert set(found.ids) >= ALWAYS
    return found


def test_sixty_runs_are_six_lines() -> None:
    found = check(page(comparison(rounds=5, seeds=10), "table.csv"))
    words = " ".join(found.words)
    assert "60 runs, 3 methods, 2 partitions, 10 seeds" in words
    assert "Run by run (60)" in words
    assert "Cost mode" in words
    assert "exact" in words
    assert "deadline 26.5 s" in words
    # Two panels with three curves each, and three methods at work.
    assert found.tags["figure"] == 2 * 3 + 3
    assert "not finished" not in words


EDGES: dict[str, list[RunRecord]] = {
    "one run": [run([0.2, 0.8])],
    "one evaluation": [run([None, 0.8])],
    "never evaluated": [run([None, None]), run([None], method="fedavg")],
    "no rounds": [run([], finished=False)],
    "finished without rounds": [run([])],
    "no settings": [run([0.5], settings={})],
    "two tasks": [run([0.5], task="a", data="x"), run([0.6], task="b", data="y")],
}


@pytest.mark.parametrize("runs", EDGES.values(), ids=EDGES)
def test_edges_give_a_whole_page(runs: list[RunRecord]) -> None:
    check(page(runs, "table.csv"))


def test_unfinished_runs_are_named_and_a_target_not_reached_is_a_dash() -> None:
    runs = [run([0.5, 0.6]), run([0.5], method="fedavg", finished=False)]
    words = " ".join(check(page(runs, "table.csv", [0.6])).words)
    assert "60 %" in words
    assert "not reached" in words
    assert "1 of 2 runs is not finished" in words
    assert "not finished, 1 round" in words


def test_never_evaluated_is_said() -> None:
    words = " ".join(check(page([run([None])], "table.csv")).words)
    assert "No accuracy is recorded." in words
    assert "There is no target that a run reached" in words


def test_the_cost_modes_are_named() -> None:
    words = " ".join(
        check(
            page([run([None], mode="exact"), run([None], mode="paper", method="fedavg")], "table.csv")
        ).words
    )
    assert "as printed" in words
    assert "multiply-adds" in words


def test_hostile_names_stay_text() -> None:
    evil = "<script>alert(1)</script>"
    quote = '"><img src=x onerror=\'alert(1)\'> id="summary" url(#x) $\\frac{$ &amp; \x00\u202e--> ]]> </svg>'
    runs = [
        run([0.5, 0.6], name=evil, method=evil, partition=quote, options={evil: quote}),
        run([0.5, 0.6], name=quote, method="_hidden", partition="iid", levels=evil),
    ]
    text = page(runs, "table.csv", title=f"{evil}{quote}")
    found = check(text)
    assert found.tags["img"] == 0
    assert found.tags["script"] == 2
    assert evil in " ".join(found.words)
    assert "\x00" not in text


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written = write_page(
            comparison(rounds=3, seeds=1, partitions=("iid",)), tmp_path / name / "report.html"
        )
        assert [path.name for path in written] == ["report.html", "report.csv"]
    for name in ("report.html", "report.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert 'href="report.csv"' in (tmp_path / "a" / "report.html").read_text()


def test_what_cannot_be_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"ends in \.html"):
        write_page([run([0.5])], tmp_path)
    with pytest.raises(SettingError, match=r"ends in \.html"):
        write_page([run([0.5])], tmp_path / "page.csv")
    with pytest.raises(SettingError, match="no run to report on"):
        write_page([], tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
