"""Same seed, same bits: however many workers, whichever executor, whatever is asked again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from killed_runs import bits, run, tree

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("--devices", "12", "--samples", "20", "--cohort", "6", "--rounds", "2", "--batch", "8")
UNSURE = (
    "--failure",
    "0.2",
    "--over-select",
    "1.5",
    "--availability",
    "0.8",
    "--epochs",
    "2",
    "--momentum",
    "0.5",
)
CASES = {
    "fedpmt": ("--method", "fedpmt"),
    "fedpmt-unsure": ("--method", "fedpmt", *UNSURE),
    "feddrop": ("--method", "feddrop", "--set", "scaling=true", "--level-draw", "round"),
    "fedavg-cnn": ("--method", "fedavg", "--task", "cnn-mnist", "--rounds", "2", "--cohort", "3"),
}


@pytest.mark.parametrize("case", CASES)
def test_workers_do_not_change_a_bit(case: str, tmp_path: Path) -> None:
    """Where a device is trained is not what it learns: weights and records agree to the bit."""
    ways = {
        "one": ("--workers", "1"),
        "two": ("--workers", "2"),
        "three": ("--workers", "3"),
    }
    for name, way in ways.items():
        ended = run(*SMALL, *CASES[case], *way, "--out", tmp_path / name)
        assert ended.code == 0, ended.err
    expected = bits(tmp_path / "one")
    assert all(bits(tmp_path / name) == expected for name in ways)


def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    """The seed is what decides: the test above would not pass on a constant."""
    for seed in (0, 1):
        run(*SMALL, "--seed", seed, "--out", tmp_path / str(seed))
    assert bits(tmp_path / "0")[0] != bits(tmp_path / "1")[0]


def test_a_finished_run_prints_its_result_again(tmp_path: Path) -> None:
    """Resumed, with its flags or with none, it computes nothing, changes nothing and says the same."""
    out = tmp_path / "run"
    first = run(*SMALL, "--out", out)
    before = tree(out)
    for again in (run(*SMALL, "--resume", "--out", out), run("--resume", "--out", out)):
        assert (again.code, again.out) == (0, first.out)
        assert "round" not in again.err
    assert tree(out) == before


def test_resume_where_nothing_is_begins(tmp_path: Path) -> None:
    """`--resume` may stand in a command from the start."""
    run(*SMALL, "--out", tmp_path / "one")
    assert run(*SMALL, "--resume", "--out", tmp_path / "two").code == 0
    assert bits(tmp_path / "two") == bits(tmp_path / "one")


def test_how_a_run_is_computed_may_change_when_it_is_resumed(tmp_path: Path) -> None:
    """Workers, checkpoints and the data folder are no part of what a run is."""
    out = tmp_path / "run"
    first = run(*SMALL, "--out", out)
    again = run(
        *SMALL,
        *("--workers", "2", "--checkpoint-seconds", "1", "--data-dir", tmp_path),
        *("--resume", "--out", out),
    )
    assert (again.code, again.out) == (0, first.out)
