"""A run that is continued for more rounds than it was begun with: the bits of one that was meant to be that long."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from killed_runs import bits, interrupted, refused, run, tree

import fedpmt

if TYPE_CHECKING:
    from pathlib import Path

SIZES = ("--devices", "10", "--samples", "20", "--cohort", "5", "--batch", "10")


@pytest.mark.parametrize(
    "flags",
    [
        ("--eval-every", "2", "--schedule", "step:2,0.5"),
        ("--method", "scaffold", "--schedule", "inverse:3", "--warmup", "2", "--eval-every", "5"),
        ("--dp-clip", "1", "--dp-noise", "2", "--server-optimizer", "adam"),
    ],
)
def test_the_same_bits_as_from_the_start(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*SIZES, *flags, "--rounds", "6", "--out", tmp_path / "whole").code == 0
    out = tmp_path / "parts"
    assert run(*SIZES, *flags, "--rounds", "3", "--out", out).json["rounds"] == 3
    # Killed on the way, and then continued without a word about rounds.
    assert interrupted(monkeypatch, 4, "--resume", "--out", out, "--rounds", "6").code == 130
    assert not (out / "result.json").exists()
    ended = run("--resume", "--out", out)
    assert (ended.json["rounds"], ended.json["stopped"]) == (6, "rounds")
    assert bits(out) == bits(tmp_path / "whole")
    assert json.loads((out / "config.json").read_bytes())["settings"]["rounds"] == 6
    if "--dp-clip" in flags:
        stated = [step.metrics["epsilon"] for step in fedpmt.read_run(out).rounds]
        assert stated == sorted(stated)
        assert len(set(stated)) == 6


def test_from_python_and_in_the_latest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"devices": 10, "samples": 20, "cohort": 5, "batch": 10}
    whole = fedpmt.run(rounds=3, **given)
    for rounds in (2, 3, None):  # None: as many as there are
        more: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
        found = fedpmt.run(out=tmp_path / "run", resume=True, **more, **given)
        assert len(found.rounds) == (rounds or 3)
    assert bits(tmp_path / "run") == bits(whole.folder)
    monkeypatch.chdir(tmp_path)
    assert run(*SIZES, "--rounds", "2").code == 0
    assert run(*SIZES, "--rounds", "3", "--resume").json["rounds"] == 3
    [only] = (tmp_path / "runs").iterdir()
    assert bits(only) == bits(whole.folder)


@pytest.mark.parametrize(
    ("flags", "rounds", "words"),
    [
        (("--schedule", "cosine"), "4", "rounds must be 3, .* the rates of schedule = 'cosine' depend on it"),
        ((), "2", "rounds must be >= 3"),
    ],
)
def test_what_would_be_another_run_is_refused(
    flags: tuple[str, ...], rounds: str, words: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert run(*SIZES, *flags, "--rounds", "3", "--out", out).code == 0
    before = tree(out)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refused("--resume", "--out", out, "--rounds", rounds))
    assert tree(out) == before
