from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import matplotlib.image
import pytest
from report_samples import comparison, run

from fedpmt.report import write_page
from fedpmt.report.page import SECTIONS, page
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Checks that tags close in order and keeps what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags = Counter[str]()
        self.ids = Counter[str]()
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("src", "href", "xlink:href", "action", "srcset"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def check(text: str) -> Reader:
    """What holds for every page, whatever the runs."""
    found = Reader(text)
    assert set(SECTIONS) - {"budget"} <= set(found.ids)
    assert [identity for identity, count in found.ids.items() if count > 1] == []
    anchors = {address[1:] for address in found.addresses if address.startswith("#")}
    assert anchors <= set(found.ids)
    assert {address for address in found.addresses if not address.startswith("#")} <= {"data:,", "table.csv"}
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "http:" not in without_names
    assert "https:" not in without_names
    assert "@import" not in text
    assert found.tags["script"] == 0
    return found


def test_sixty_runs_are_six_lines() -> None:
    found = check(page(comparison(rounds=5, seeds=10), "table.csv"))
    words = " ".join(found.words)
    assert "60 runs, 3 methods, 2 partitions, 10 seeds" in words
    assert "Run by run (60)" in words
    assert "Cost mode" in words
    assert "exact" in words
    assert "deadline 26.5 s" in words
    # Two panels with three curves and two bar charts each, three methods at work, two tables of layers.
    assert found.tags["figure"] == 2 * 3 + 3 + 2 + 2 * 2
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
    assert "not finished, 1 rounds" in words


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


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1360, False), (1360, True), (500, False)])
def test_a_browser_shows_it(tmp_path: Path, width: int, dark: bool) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    path, _ = write_page(comparison(rounds=20), tmp_path / "page.html")
    common = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
        "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},3000",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]  # fmt: skip
    dumped = subprocess.run(
        [*common, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    for identity in SECTIONS:
        assert f'<section id="{identity}"' in dumped.stdout
    picture = tmp_path / "page.png"
    subprocess.run(
        [*common, f"--screenshot={picture}", path.as_uri()], capture_output=True, timeout=120, check=True
    )
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape[:2] == (3000, width)
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, 3).tolist()}) > 50
    assert (pixels[5, 5].mean() < 0.3) == dark
