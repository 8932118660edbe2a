"""The published pages come out of the kept runs again, byte for byte."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from reproduction.__main__ import PROGRAM, program
from reproduction.artefact import versions

RESULTS = Path(__file__).parents[2] / "docs" / "results"
QUICK = ("complexity", "leaderboard-embedded-even")
"""Made in seconds; the others read more runs, or train a little."""

SLOW = (
    "accuracy", "completion-time", "studies", "rivals", "leaderboard-cifar10", "leaderboard-embedded",
    "leaderboard-embedded-deadline",
)  # fmt: skip


@pytest.mark.parametrize("page", [*QUICK, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW)])
def test_a_page_is_made_again_to_the_byte(page: str, tmp_path: Path) -> None:
    published = json.loads((RESULTS / f"{page}.json").read_text())
    command = published["command"].removeprefix(PROGRAM).removesuffix("--draw-only")
    places = ["--out", str(tmp_path), "--records", str(RESULTS / "records"), "--draw-only"]
    assert program([*shlex.split(command), *places]) == 0
    made = {
        path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix in (".md", ".json", ".svg")
    }
    made.pop("README.md", None)
    assert {f"{page}.md", f"{page}.json"} <= made.keys()
    for name, text in made.items():
        # The page names the versions it was made with; others may give the same numbers.
        same = text.replace(", ".join(versions()), ", ".join(published["versions"]))
        for here, there in zip(versions(), published["versions"], strict=True):
            same = same.replace(f'"{here}"', f'"{there}"')
        assert same == (RESULTS / name).read_text(), name


def test_every_page_with_kept_runs_is_tried_here() -> None:
    kept = {path.name.partition(".")[0] for path in (RESULTS / "records").iterdir()}
    assert kept <= {*QUICK, *SLOW}
