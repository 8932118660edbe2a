"""The paper's comparison table, found out from the methods."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fedpmt.cli.main import program
from fedpmt.experiments.comparison import FIXED, NOTES, PRINTED, ROLLS, YES, Row, differs, observe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("name", "row", "rest"),
    [
        ("fedpmt", Row("Yes", YES, f"{YES} up only", FIXED, "-"), ("weights", "averages", "-", "global")),
        ("fedrolex", Row("Yes", YES, YES, ROLLS, "-"), ("weights", "averages", "-", "global")),
        ("comet", Row("Yes", YES, "-", FIXED, "unlabelled"), ("answers", "clusters", "a net", "personal")),
    ],
)
def test_a_row_is_what_the_method_does(name: str, row: Row, rest: tuple[str, ...]) -> None:
    found = observe(name)
    assert found.row == row
    assert (found.up, found.server, found.keeps, found.evaluates) == rest


def test_words_for_the_same_thing_are_no_correction() -> None:
    assert not differs(PRINTED["feddrop"], Row("Yes", YES, YES, "at random", "-"))
    assert not differs(PRINTED["fedavg"], Row("No", "-", "-", "whole", "-"))
    assert differs(PRINTED["heterofl"], Row("Yes", YES, YES, "fixed", "-"))


@pytest.mark.slow
def test_every_correction_is_argued(tmp_path: Path) -> None:
    assert program(["reproduce", "comparison", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "comparison.json").read_text())
    assert set(numbers["corrected"]) == set(NOTES)
