"""The interface carries a method with device state, extra tensors, device choice and personal evaluation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedpmt import api
from fedpmt.methods.averaging import PartAveraging
from fedpmt.records import DEVICES, MODEL_FILE, ROUNDS, RunRecord
from fedpmt.simulation.checkpoint import read_value
from fedpmt.testing import ON_A_BENCH, check_method

sys.path.insert(0, str(Path(__file__).parent))
from diary import Diary, DiaryMethod, play


def state(folder: Path) -> dict[str, bytes]:
    """Every accepted device state, by file."""
    return {path.name: path.read_bytes() for path in sorted((folder / DEVICES).glob("*/*"))}


def personal_accuracy(run: RunRecord, owned: dict[int, Diary]) -> float:
    """The mean over devices of the shared model plus their own bias, on test samples of their own classes."""
    problem = api.paper_problem_of(api.settings_of(run.settings))
    weights = load_file(run.folder / MODEL_FILE)
    test, means = problem.data.test, []
    for device, diary in owned.items():
        counts = problem.data.label_counts(device)
        assert counts is not None
        mine = test.take(np.flatnonzero(counts[test.targets] > 0))
        outputs = problem.model.forward(weights, torch.from_numpy(mine.inputs)) + diary.bias
        means.append(float((outputs.argmax(1).numpy() == mine.targets).mean()))
    return float(np.mean(means))


def test_runs_with_state_choice_and_extra_tensors(tmp_path: Path) -> None:
    run = play(tmp_path / "run")
    assert run.result.evaluates == "personal"
    labels = {device.part for record in run.rounds for device in record.devices}
    assert len(labels) > 1  # devices chose different depths
    arrived = [device for record in run.rounds for device in record.devices if device.outcome == "arrived"]
    lost = [device for record in run.rounds for device in record.devices if device.outcome != "arrived"]
    assert lost
    kept = {int(name.split("-")[0]): name for name in state(tmp_path / "run")}
    assert set(kept) == {device.device for device in arrived}  # no state for devices that never took part
    owned: dict[int, Diary] = {}
    for device, name in kept.items():
        diary = read_value(next((tmp_path / "run" / DEVICES).glob(f"*/{name}")))
        assert isinstance(diary, Diary)
        assert diary.rounds == sum(one.device == device for one in arrived)
        owned[device] = diary
    assert run.result.accuracy == pytest.approx(personal_accuracy(run, owned))


def test_it_keeps_the_contract() -> None:
    check_method(DiaryMethod(classes=3), checks=ON_A_BENCH)


def test_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    runs = [play(tmp_path / str(workers), workers=workers) for workers in (1, 2, 3)]
    assert len({run.result.weights_sha256 for run in runs}) == 1
    assert state(tmp_path / "1") == state(tmp_path / "2") == state(tmp_path / "3")


@pytest.mark.parametrize("checkpoint_seconds", ["0", "10"])
def test_killed_at_any_round_and_resumed(tmp_path: Path, checkpoint_seconds: str) -> None:
    whole = play(tmp_path / "whole")
    folder = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for lines in (2, 7):
        call = f"diary.play(pathlib.Path({str(folder)!r}), checkpoint_seconds={checkpoint_seconds})"
        program = f"import diary, pathlib; {call}"
        process = subprocess.Popen([sys.executable, "-c", program], env=environment)
        rounds = folder / ROUNDS
        while process.poll() is None and not (rounds.exists() and rounds.read_bytes().count(b"\n") >= lines):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    resumed = play(folder)
    assert resumed.result.model_copy(update={"run": ""}) == whole.result.model_copy(update={"run": ""})
    assert (folder / ROUNDS).read_bytes() == (tmp_path / "whole" / ROUNDS).read_bytes()
    assert state(folder) == state(tmp_path / "whole")


def test_methods_without_state_leave_no_device_files(tmp_path: Path) -> None:
    api.run("fedpmt", out=tmp_path / "run", rounds=1, devices=5, samples=10, cohort=5)
    assert not (tmp_path / "run" / DEVICES).exists()
    assert PartAveraging.__abstractmethods__ == {"part"}
