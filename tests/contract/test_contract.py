"""The contract: every method keeps it, each check finds what it is for, and the interface carries unusual methods."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import broken_methods as broken
import numpy as np
import pytest
import torch
from diary import Diary, DiaryMethod, play
from safetensors.torch import load_file

from fedpmt import api
from fedpmt.methods.averaging import Composed, PartAveraging
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.methods.proximal import Proximal
from fedpmt.methods.registry import METHODS, create, general_methods
from fedpmt.records import DEVICES, MODEL_FILE, ROUNDS, RunRecord
from fedpmt.simulation.checkpoint import read_value
from fedpmt.testing import CHECKS, ON_A_BENCH, WHOLE_RUNS, Subject, check_method
from fedpmt.testing.checks import (
    declares_what_replies_carry,
    discounts_late_replies,
    keeps_server_work_within_cap,
    learns_with_default_settings,
    same_bits_after_resume,
)
from fedpmt.training.server import Yogi
from fedpmt.types import SettingError
from support import PRESETS, STAGES

SHARED = {"depths": None, "splitting": "server"}
ENOUGH = {"fjord": 24, "comet": 80, "fedgkt": 6, "prunefl": 24, "fedasync": 120}
"""That a method needs to get off the ground, where narrow nets learn little at first, or one device is alone."""

LONG = ("comet", "fedgkt", "prunefl", "fiarse", "fedgen", "scaffold")
"""Methods that need many rounds, or long ones, until they are better than a guess: `make test-slow` waits for them."""

WHOLE = ("fedpmt", "scaffold", "fedgkt", "fedbuff")
"""Of each kind of state that devices keep, one whose whole runs are checked in CI."""

GENERATING = ("fedgen", "feddf")
"""Methods whose server trains for long."""

OTHER_CLOCK = (
    "fedavg",
    "fedpmt",
    "heterofl",
    "fedprox",
    "fjord",
    "fedmp",
    "depthfl",
    "scaffold",
    "feddf",
    "fedasync",
    "fedbuff",
    "timelyfl",
)
"""Of each kind one that runs on both clocks, or refuses to; the others are left to `make test-slow`."""

TOGETHER: dict[str, dict[str, Any]] = {"prunefl": {"initial_rounds": 0, "interval": 1}}
"""What lets several devices reply from the first round on."""

QUICK: dict[str, dict[str, Any]] = {"feddf": {"steps": 20}}
"""What spares time on a bench, where a server without a cap would work for long."""

ONE_BY_ONE: dict[str, dict[str, Any]] = {"fedmp": {"bandit": False}}
"""What lets a method do without rounds."""

NO_FEDAVG = {"comet", "fedgkt", "flexlora"}
"""Methods that do not average weights, and so are FedAvg under no settings; their own tests have their reductions."""


def subject(name: str, *, quick: bool = True) -> Subject:
    options = QUICK.get(name, {}) if quick else {}
    together, early = (
        create(name, table[name], SHARED) if name in table else None for table in (TOGETHER, STAGES)
    )
    return Subject(create(name, options, SHARED), together, early, ENOUGH.get(name, 12))


def cases() -> list[Any]:
    """Every check of every method."""
    found = []
    for name in METHODS:
        for check in CHECKS:
            long = (
                (name in LONG and check is learns_with_default_settings)
                or (name not in WHOLE and check in WHOLE_RUNS)
                or (name in GENERATING and check is declares_what_replies_carry)
            )
            slow = [pytest.mark.slow] if long or (name in PRESETS and check not in ON_A_BENCH) else []
            found.append(pytest.param(name, check, id=f"{name}-{check.__name__}", marks=slow))
    return found


@pytest.mark.parametrize(("name", "check"), cases())
def test_keeps_the_contract(name: str, check: Any) -> None:
    check(subject(name, quick=check is not learns_with_default_settings))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in OTHER_CLOCK else [pytest.mark.slow]) for one in METHODS]
)
def test_keeps_the_contract_on_the_other_clock(name: str) -> None:
    """Methods that usually run on events do on rounds, unless they need an interval, and the others on events."""
    method = create(name, ONE_BY_ONE.get(name, {}), SHARED)
    clock = "rounds" if method.traits.events else "events"
    given = replace(subject(name), method=method, settings={"clock": clock})
    try:
        api.check(api.settings_of({"method": name, "clock": clock}), method=method)
    except SettingError:
        return  # tests/simulation/test_events.py says who may refuse
    discounts_late_replies(given)
    same_bits_after_resume(given)
    keeps_server_work_within_cap(given)


def test_only_these_are_fedavg_under_no_settings() -> None:
    assert {name for name in METHODS if create(name, {}, SHARED).neutral() is None} == NO_FEDAVG


def test_files_of_methods_load_no_torch() -> None:
    """Settings are refused before torch is loaded, and hooks stand in the same files."""
    modules = sorted({module for module, _ in METHODS.values()})
    program = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n"
    program += "    assert 'torch' not in sys.modules, name\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


sys.path.insert(0, str(Path(__file__).parent))

DEFECTS: list[tuple[str, Any, str]] = [
    ("is_a_frozen_picklable_value", broken.Changeable(), "is not frozen"),
    ("declares_what_replies_carry", broken.Chatty(), "traits.sends_more is false"),
    ("leaves_the_state_alone", broken.Overwriting(), "folding changed the state"),
    ("leaves_kept_state_alone", broken.Forgetful(), "training changed what device 0 had kept"),
    ("restores_states_from_disk", broken.Unwritable(), "TypeError: a state may not hold a set"),
    ("ignores_arrival_order", broken.Hasty(), "state.tensors"),
    ("discounts_late_replies", broken.Undiscounted(), "late replies count as much as others"),
    ("keeps_uncovered_entries", broken.Restless(), "changed where nobody trained it"),
    ("server_optimizer_skips_uncovered_entries", broken.Uncovered(), "the moment 'mean' of"),
    ("keeps_the_model_without_training", broken.Restless(), "though nobody has learnt anything"),
    ("sends_differences", broken.Weighty(), "is not zero, though nothing was learnt"),
    ("accounts_for_bytes", broken.Chatty(), "and is priced as"),
    ("reduces_to_fedavg", broken.NotNeutral(), "is not FedAvg's after three rounds"),
    ("assigns_by_round_and_device", broken.Whimsical(), "another part"),
    ("keeps_server_work_within_cap", broken.Busy(), "above its cap"),
    ("same_bits_for_any_number_of_workers", broken.Drifting(), "other weights with other numbers of workers"),
    ("same_bits_after_resume", broken.Drifting(), "other content after a resume"),
    ("learns_with_default_settings", broken.Idle(), "after 2 rounds"),
]


@pytest.mark.parametrize(("name", "method", "reason"), DEFECTS, ids=[name for name, _, _ in DEFECTS])
def test_a_defect_is_named(name: str, method: Any, reason: str) -> None:
    (check,) = (one for one in CHECKS if one.__name__ == name)
    with pytest.raises(AssertionError) as failed:
        check_method(method, rounds=2, checks=[check])
    assert str(failed.value).startswith(f"{type(method).__name__}: {name}: ")
    assert reason in str(failed.value)


def test_every_check_has_a_defect() -> None:
    assert [name for name, _, _ in DEFECTS] == [check.__name__ for check in CHECKS]


def test_the_first_failing_check_is_told_and_a_sound_method_passes() -> None:
    with pytest.raises(AssertionError, match=r"^Chatty: declares_what_replies_carry: "):
        check_method(broken.Chatty(), checks=ON_A_BENCH)
    check_method(FedAvg(), checks=ON_A_BENCH)


@pytest.mark.parametrize(
    "method",
    [
        Composed(parts=FedPMT(), local=Proximal(0.1)),
        Composed(parts=FedPMT(), rule="fill"),
        Composed(parts=HeteroFL(masked=False)),
        FedPMT(server=Yogi()),
        FedPMT(plan="traded"),
        FedPMT(plan="rotated"),
    ],
    ids=["parts-local", "parts-mean", "parts", "server", "traded", "rotated"],
)
def test_compositions_keep_the_contract(method: Any) -> None:
    check_method(method, checks=ON_A_BENCH)


sys.path.insert(0, str(Path(__file__).parent))


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
    assert run.result.score == pytest.approx(personal_accuracy(run, owned))


def test_it_keeps_the_contract() -> None:
    check_method(DiaryMethod(classes=3), checks=ON_A_BENCH)


def test_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    runs = [play(tmp_path / str(workers), workers=workers) for workers in (1, 2, 3)]
    assert len({run.result.weights_sha256 for run in runs}) == 1
    assert state(tmp_path / "1") == state(tmp_path / "2") == state(tmp_path / "3")


@pytest.mark.parametrize("checkpoint_seconds", ["0", pytest.param("10", marks=pytest.mark.slow)])
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


GUESS = 0.1
SLOW_STARTERS = {"comet": 100, "feddf": 100, "prunefl": 100, "fedasync": 300}
"""Rounds for methods that need the default number; the others are clear of a guess after fewer."""


def accuracy(method: str, partition: str, rounds: int, seed: int = 0) -> float:
    run = api.run(method, partition=partition, rounds=rounds, eval_every=rounds, seed=seed)
    assert run.result is not None
    assert run.result.accuracy is not None
    return run.result.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["iid", "classes:2"])
@pytest.mark.parametrize("method", general_methods())
def test_no_method_ends_at_a_guess(method: str, partition: str) -> None:
    assert accuracy(method, partition, SLOW_STARTERS.get(method, 50)) > 2.5 * GUESS


@pytest.mark.slow
def test_fedgen_does_not_diverge() -> None:
    """With latent = 10 this run is no longer finite after 13 rounds."""
    assert accuracy("fedgen", "iid", rounds=13, seed=1) > 5 * GUESS


@pytest.mark.parametrize("method", ["feddf", "comet"])
def test_two_classes_per_device_fit_what_is_left_by_held_out_data(method: str) -> None:
    """3,560 and 3,600 images are left, of no class quite a tenth: 71 and 72 for each of 50 devices are too many."""
    settings = api.settings_of({"method": method, "partition": "classes:2"})
    left, most = {"feddf": (3560, 69), "comet": (3600, 71)}[method]
    assert settings.samples == most < left // settings.devices
    data = api.paper_problem_of(settings).data
    assert {data.samples(device) for device in range(50)} == {most}
    # What the user asks for is refused where it cannot be met, and never changed.
    given = api.settings_of({"method": method, "partition": "classes:2", "samples": 72})
    assert given.samples == 72
