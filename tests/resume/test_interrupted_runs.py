"""A run that is stopped, however and whenever, and continued: the same bits as if nothing had happened."""

from __future__ import annotations

import functools
import json
import random
import signal
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from killed_runs import Process, bits, environment, interrupted, lines, refused, run, tree

import fedpmt
from fedpmt.simulation import runner
from fedpmt.simulation.checkpoint import read_value

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fedpmt.records import RoundRecord
    from fedpmt.simulation.loop import Progress


SIZES = ("--devices", "10", "--samples", "20", "--cohort", "5", "--batch", "10", "--failure", "0.1")
FLAGS = (*SIZES, "--rounds", "8")
LONG = (*SIZES, "--rounds", "30")
OFTEN = ("--checkpoint-seconds", "0")
CLOCKS = {"rounds": LONG, "events": (*SIZES, "--rounds", "50", "--clock", "events", "--buffer", "3")}
"""Runs on both clocks that are long enough to be hit; with a buffer of 3, others of the five are at work."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes, bytes]:
    """The bits of the run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ended = run(*FLAGS, "--out", out)
    assert ended.code == 0, ended.err
    return bits(out)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, bytes, bytes]]:
    """The bits of the run on a clock that nobody stopped."""

    @functools.cache
    def played(clock: str) -> tuple[str, bytes, bytes]:
        out = tmp_path_factory.mktemp(clock) / "run"
        ended = run(*CLOCKS[clock], "--out", out)
        assert ended.code == 0, ended.err
        return bits(out)

    return played


@pytest.fixture(scope="module")
def long(uninterrupted: Callable[[str], tuple[str, bytes, bytes]]) -> tuple[str, bytes, bytes]:
    """Those of more rounds, so that there is time to hit one."""
    return uninterrupted("rounds")


def test_killed_as_its_folder_appears(tmp_path: Path, whole: tuple[str, bytes, bytes]) -> None:
    """Torch is not even loaded then; the folder already says which run it is."""
    out = tmp_path / "run"
    process = Process(*FLAGS, "--out", out)
    process.wait_until(out.exists)
    assert process.stop(signal.SIGKILL).code == -signal.SIGKILL
    assert (out / "config.json").exists()
    assert run(*FLAGS, "--resume", "--out", out).code == 0
    assert bits(out) == whole


@pytest.mark.parametrize(
    "checkpoints", [pytest.param(OFTEN, id="often"), pytest.param((), id="default", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("clock", CLOCKS)
def test_killed_between_rounds(
    clock: str,
    checkpoints: tuple[str, ...],
    tmp_path: Path,
    uninterrupted: Callable[[str], tuple[str, bytes, bytes]],
) -> None:
    """After a few rounds; while it works no other process may, and what it did is then not done twice over."""
    out, flags = tmp_path / "run", CLOCKS[clock]
    process = Process(*flags, *checkpoints, "--out", out)
    process.wait_until(lambda: lines(out) >= 3)
    assert "in use by another process" in refused(*flags, "--resume", "--out", out)
    assert process.stop(signal.SIGKILL).code == -signal.SIGKILL
    assert not (out / "result.json").exists()
    assert (out / "checkpoint.safetensors").exists() == bool(checkpoints)
    saved = read_value(out / "checkpoint.safetensors").progress if checkpoints else None
    assert run(*flags, *checkpoints, "--resume", "--out", out).code == 0
    assert bits(out) == uninterrupted(clock)
    if saved is not None:
        check_landed_once(out, saved)


def check_landed_once(out: Path, saved: Progress) -> None:
    """Whoever was at work when a checkpoint was written ends in a later step, and in no other."""
    found = fedpmt.read_run(out)
    assert (saved.flights is not None) == (found.settings["clock"] == "events")
    flights = saved.flights.devices if saved.flights else ()
    steps: dict[Any, list[int]] = {flight.key: [] for flight in flights}
    for step in found.rounds:
        for one in step.devices:
            steps.get((one.version, one.turn, one.device), []).append(step.round)
    due = [flight.key for flight in flights if flight.ends <= found.rounds[-2].virtual_seconds]
    assert bool(due) == bool(flights) == (saved.flights is not None)
    assert all(len(steps[key]) == 1 and steps[key][0] > saved.rounds for key in due)


def test_killed_within_a_step_with_devices_at_work(
    tmp_path: Path, uninterrupted: Callable[[str], tuple[str, bytes, bytes]]
) -> None:
    """After one reply of a step has been trained and before it is folded with the others; the step is played anew."""
    out, flags = tmp_path / "run", (*CLOCKS["events"], *OFTEN)
    command = ["run", *flags, "--workers", "1", "--out", str(out)]
    code = KILLED_WITHIN.format(command=command, after=8)
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    saved = read_value(out / "checkpoint.safetensors").progress
    assert saved.rounds == lines(out) == 2
    assert run(*flags, "--resume", "--out", out).code == 0
    assert bits(out) == uninterrupted("events")
    check_landed_once(out, saved)


KILLED_WITHIN = """
import os, signal
from fedpmt.cli.main import program
from fedpmt.methods.averaging import MeanFold

add, folded = MeanFold.add, 0

def killed(fold, reply):
    global folded
    add(fold, reply)
    folded += 1
    if folded == {after}:
        os.kill(os.getpid(), signal.SIGKILL)

MeanFold.add = killed
program({command})
"""
"""A run that kills itself when this many replies have been folded, of three in each step."""


def test_ctrl_c_leaves_a_run_that_can_be_continued(tmp_path: Path, long: tuple[str, bytes, bytes]) -> None:
    """Exit code 130, no traceback, a line that says how to go on, and a checkpoint at once."""
    out = tmp_path / "run"
    process = Process(*LONG, "--out", out)
    process.wait_until(
        lambda: lines(out) >= 4
    )  # so the third round is done with, while the fourth may be half written down
    ended = process.stop(signal.SIGINT)
    assert ended.code == 130
    assert ended.out == ""
    assert f"continue with --resume --out {out}" in ended.err
    assert "Traceback" not in ended.err
    saved = read_value(out / "checkpoint.safetensors")
    assert saved.progress.rounds >= 3
    assert run("--resume", "--out", out).code == 0
    assert bits(out) == long


@pytest.mark.parametrize("seconds", [0.1, 0.4, 0.8])
def test_ctrl_c_while_torch_is_loading(
    seconds: float, tmp_path: Path, whole: tuple[str, bytes, bytes]
) -> None:
    """The same before the first round, wherever in the loading it falls."""
    out = tmp_path / "run"
    process = Process(*FLAGS, "--out", out)
    process.wait_until(out.exists)
    time.sleep(seconds)
    ended = process.stop(signal.SIGINT)
    assert ended.code == 130
    assert f"continue with --resume --out {out}" in ended.err
    assert "Traceback" not in ended.err
    assert run("--resume", "--out", out).code == 0
    assert bits(out) == whole


@pytest.mark.parametrize("after", [0, 1, 7])
def test_only_the_folder_is_needed_to_continue(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, bytes, bytes]
) -> None:
    """`--resume --out X` takes the stored settings; only the rounds that are missing are played."""
    out = tmp_path / "run"
    assert interrupted(monkeypatch, after, *FLAGS, "--out", out).code == 130
    assert lines(out) == after
    played: list[int] = []
    add = runner.Journal.add

    def counted(journal: runner.Journal, progress: Progress, record: RoundRecord) -> RoundRecord:
        played.append(record.round)
        return add(journal, progress, record)

    monkeypatch.setattr(runner.Journal, "add", counted)
    assert run("--resume", "--out", out).code == 0
    assert played == list(range(after + 1, 9))
    assert bits(out) == whole


@pytest.mark.parametrize("place", ["Totals.plus", "_stop", "write"])
def test_an_interrupt_between_two_steps_loses_no_round(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, bytes, bytes]
) -> None:
    """Ctrl-C may fall between playing a round, recording it and saving it."""
    from fedpmt.simulation import checkpoint

    owner: object = {"Totals.plus": runner.Totals, "_stop": runner, "write": checkpoint}[place]
    name = {"Totals.plus": "plus", "_stop": "_stop", "write": "write_value"}[place]
    original, calls = getattr(owner, name), 0

    def once(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, once)
        assert run(*FLAGS, *OFTEN, "--out", out).code == 130
    assert run(*FLAGS, "--resume", "--out", out).code == 0
    assert bits(out) == whole


def test_a_line_cut_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, bytes, bytes]
) -> None:
    """What was being written when the machine went down is cut off and written again."""
    out = tmp_path / "run"
    interrupted(monkeypatch, 5, *FLAGS, "--out", out)
    with (out / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round":6,"virtual_sec')
    assert run(*FLAGS, "--resume", "--out", out).code == 0
    assert bits(out) == whole


def test_rounds_after_the_checkpoint_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, bytes, bytes]
) -> None:
    """A checkpoint of round 2 behind records of round 5, and no checkpoint at all."""
    out = tmp_path / "run"
    interrupted(monkeypatch, 2, *FLAGS, "--out", out)
    early = (out / "checkpoint.safetensors").read_bytes()
    interrupted(monkeypatch, 5, *FLAGS, "--resume", "--out", out)
    assert lines(out) == 5
    (out / "checkpoint.safetensors").write_bytes(early)
    interrupted(monkeypatch, 3, *FLAGS, "--resume", "--out", out)
    assert lines(out) == 3
    (out / "checkpoint.safetensors").unlink()
    assert run(*FLAGS, "--resume", "--out", out).code == 0
    assert bits(out) == whole


def test_killed_before_the_result_is_written(tmp_path: Path, whole: tuple[str, bytes, bytes]) -> None:
    """All rounds played, but no result yet: a resume writes it, from the last checkpoint."""
    out = tmp_path / "run"
    first = run(*FLAGS, "--out", out)
    (out / "result.json").unlink()
    (out / "model.safetensors").unlink()
    again = run("--resume", "--out", out)
    assert (again.code, again.out) == (0, first.out)
    assert bits(out) == whole


def reached(out: Path, count: int) -> bool:
    """Whether this round is being recorded, or all are."""
    return lines(out) == count or (out / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoints", [OFTEN, (), ("--checkpoint-seconds", "0.2")], ids=["often", "default", "some"]
)
@pytest.mark.parametrize("clock", CLOCKS)
def test_killed_again_and_again(
    clock: str,
    checkpoints: tuple[str, ...],
    tmp_path: Path,
    uninterrupted: Callable[[str], tuple[str, bytes, bytes]],
) -> None:
    """The same folder, killed at every stage of starting up and at random moments of training."""
    out = tmp_path / "run"
    command = (*CLOCKS[clock], *checkpoints, "--out", out)
    moments, last = (
        random.Random(len(checkpoints)),
        int(CLOCKS[clock][CLOCKS[clock].index("--rounds") + 1]) - 1,
    )
    for seconds in (0.05, 0.5, 1.5, 2.5, *(moments.uniform(2.0, 6.0) for _ in range(6))):
        process = Process(*command, *(["--resume"] if out.exists() else []))
        time.sleep(seconds)
        process.stop(signal.SIGKILL)
    for step in (1, 5, 12):
        if (out / "result.json").exists():
            break
        begun = lines(out) if checkpoints == OFTEN else 0
        process = Process(*command, "--resume")
        process.wait_until(partial(reached, out, min(last, begun + step)))
        process.stop(signal.SIGKILL)
    assert run(*command, "--resume").code == 0
    assert bits(out) == uninterrupted(clock)


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


EXTENDED = ("--devices", "10", "--samples", "20", "--cohort", "5", "--batch", "10")


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
    assert run(*EXTENDED, *flags, "--rounds", "6", "--out", tmp_path / "whole").code == 0
    out = tmp_path / "parts"
    assert run(*EXTENDED, *flags, "--rounds", "3", "--out", out).json["rounds"] == 3
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
    assert run(*EXTENDED, "--rounds", "2").code == 0
    assert run(*EXTENDED, "--rounds", "3", "--resume").json["rounds"] == 3
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
    assert run(*EXTENDED, *flags, "--rounds", "3", "--out", out).code == 0
    before = tree(out)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refused("--resume", "--out", out, "--rounds", rounds))
    assert tree(out) == before
