"""The paper's comparison table, found out from the methods."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from reproduction.__main__ import program
from reproduction.comparison import (
    FIXED,
    LAYERS,
    LEARNED,
    MASKED,
    NESTED,
    NOTES,
    OWN,
    PRINTED,
    RANDOM,
    ROLLS,
    YES,
    Row,
    differs,
    observe,
)


@pytest.mark.parametrize(
    ("name", "row", "rest"),
    [
        (
            "fedpmt",
            ("Yes", "overlap mean", YES, f"{YES} up only", LAYERS, "-"),
            ("weights", "averages", "-", "global"),
        ),
        ("fedrolex", ("Yes", "overlap mean", YES, YES, ROLLS, "-"), ("weights", "averages", "-", "global")),
        ("fedmp", ("Yes", "fill mean", YES, YES, LEARNED, "-"), ("weights", "averages", "-", "global")),
        (
            "prunefl",
            ("No", "mean under one mask", "-", "-", MASKED, "-"),
            ("weights, squared gradients", "averages", "tensors", "global"),
        ),
        ("slimfl", ("No", "overlap mean", "-", "-", NESTED, "-"), ("weights", "averages", "-", "global")),
        (
            "feddf",
            ("Yes", "mean of each prototype, then distillation", YES, YES, OWN, "unlabelled, labelled"),
            ("weights", "trains", "-", "global"),
        ),
        (
            "comet",
            ("Yes", "clusters of answers, for distillation", YES, "-", OWN, "unlabelled"),
            ("answers", "clusters", "a net", "personal"),
        ),
    ],
)
def test_a_row_is_what_the_method_does(name: str, row: tuple[str, ...], rest: tuple[str, ...]) -> None:
    found = observe(name)
    assert astuple(found.row) == row
    assert (found.up, found.server, found.keeps, found.evaluates) == rest


def test_words_for_the_same_thing_are_no_correction() -> None:
    assert not differs(PRINTED["feddrop"], Row("Yes", "overlap mean", YES, YES, RANDOM, "-"))
    assert not differs(PRINTED["fedavg"], Row("No", "mean", "-", "-", "whole", "-"))
    assert not differs(PRINTED["feddf"], Row("Yes", "mean, then distillation", "-", "-", OWN, "unlabelled"))
    assert differs(PRINTED["feddf"], Row("Yes", "mean", "-", "-", OWN, "unlabelled"))
    assert differs(PRINTED["fedmp"], Row("Yes", "fill mean", YES, YES, RANDOM, "-"))
    assert differs(PRINTED["heterofl"], Row("Yes", "overlap mean", YES, YES, FIXED, "-"))


@pytest.mark.slow
def test_every_correction_is_argued(tmp_path: Path) -> None:
    assert program(["comparison", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "comparison.json").read_text())
    assert set(numbers["corrected"]) == set(NOTES)
    published = Path(__file__).parents[2] / "docs" / "results" / "comparison.json"
    assert numbers["rows"] == json.loads(published.read_text())["rows"]
