"""The folder that Flower starts an app from, and what Flower's programs are started with."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from deployments import READ_ONCE, InProcessGrid, deploy, nodes_of, start
from flwr.app import Context, RecordDict
from torch import nn

from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.data.sets import embedded
from fedpmt.flower import apps, node_problem, processes
from fedpmt.flower.client import spend, state_folder
from fedpmt.flower.deployment import Deployment, begin, read_config, write_config
from fedpmt.flower.guard import start_time
from fedpmt.flower.loopback import node_configs
from fedpmt.flower.processes import environment_of
from fedpmt.records import read_run
from fedpmt.training.optimizers import Adam
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from flwr.app import Message


EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-mnist"
TWO_NODES: dict[str, Any] = {"devices": 2, "samples": 20, "cohort": 2, "batch": 10, "executor": "plain"}


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """As Flower flattens an app's config."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def config_of(folder: Path) -> dict[str, Any]:
    read = tomllib.loads((folder / "pyproject.toml").read_text())
    return flat(read["tool"]["flwr"]["app"]["config"])


def test_settings_come_back_from_the_app_folder(tmp_path: Path) -> None:
    flags = [
        "--method",
        "feddrop",
        "--set",
        "feddrop.keep=0.5",
        "--set",
        "feddrop.scope=all",
        "--deadline",
        "30",
        "--server-cap",
        "none",
    ]
    assert program(["deploy", "--write-only", "--out", str(tmp_path / "here"), *flags]) == 0
    settings, deployment = read_config(config_of(tmp_path / "here" / "app"))
    assert (settings.method, settings.deadline, settings.devices) == ("feddrop", 30.0, 5)
    # What has no value here would have one if nothing were said.
    assert settings.server_cap is None
    assert settings.options == {"keep": 0.5, "scope": "all"}
    assert deployment.out == str(tmp_path / "here" / "run")
    assert write_config(settings, deployment) == config_of(tmp_path / "here" / "app")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--failure", "0.1"], "failure = '0.1' is refused: only the simulator has it"),
        (["--over-select", "2"], "over-select = '2.0' is refused"),
        (["--update-limit", "0"], "update-limit = '0.0' is refused: input should be greater than 0"),
        (["--server-speed", "2"], "server-speed = '2.0' is refused: only the simulator has it"),
        (["--method", "comet"], "method = 'comet' is refused on Flower: its devices keep nets of their own"),
        (["--method", "fedpmtt"], "did you mean 'fedpmt'?"),
    ],
)
def test_what_cannot_be_deployed_is_refused_in_one_line(
    flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["deploy", "--out", str(tmp_path / "here"), *flags]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "here").exists()


def test_a_folder_with_a_run_is_only_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"devices": 2, "samples": 20, "cohort": 2, "rounds": 1, "batch": 10, "executor": "plain"}
    first, _ = deploy(tmp_path, given)
    assert program(["deploy", "--out", str(tmp_path)]) == 2
    assert "already holds a run; continue it with --resume" in capsys.readouterr().err
    # A finished run prints its result again, and starts nothing.
    assert program(["deploy", "--resume", "--json", "--out", str(tmp_path)]) == 0
    assert first.result is not None
    assert json.loads(capsys.readouterr().out) == first.result.as_json()


def test_wrong_settings_of_the_deployment() -> None:
    for given, reason in (
        ({"update-limit": -1}, "update-limit = '-1' is refused"),
        ({"lrr": 1}, "did you mean 'lr'"),
    ):
        with pytest.raises(SettingError, match=reason):
            read_config(given)


def test_each_node_has_a_folder_and_a_speed_of_its_own(tmp_path: Path) -> None:
    first, second = node_configs(2, tmp_path, [0.5, 1.0])
    assert (first["partition-id"], first["speed"], second["speed"]) == (0, 0.5, 1.0)
    assert first["state-dir"] != second["state-dir"]


@pytest.mark.parametrize("name", ["run", "été 2026", "..", "a" * 250, "--x"])
def test_a_run_has_one_name_that_nodes_take(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name if name != ".." else tmp_path
    folder.mkdir(exist_ok=True)
    first = begin(folder, Deployment()).run
    assert first == begin(folder, Deployment()).run
    context = Context(1, 2, {"partition-id": 0, "state-dir": str(tmp_path / "own")}, RecordDict(), {})
    assert state_folder(first, context, "") == tmp_path / "own" / first


@pytest.mark.parametrize("name", ["../other", "/etc", "", "a/b", "x" * 300])
def test_a_node_writes_nowhere_else(name: str, tmp_path: Path) -> None:
    context = Context(1, 2, {"partition-id": 0, "state-dir": str(tmp_path)}, RecordDict(), {})
    with pytest.raises(SettingError, match="is not a run's name"):
        state_folder(name, context, "")


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flower_mnist_example", EXAMPLE / "app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_learns_and_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(len(path.read_text().splitlines()) for path in EXAMPLE.iterdir() if path.is_file()) < 100
    monkeypatch.setattr(embedded, "_table", READ_ONCE)
    module, config = example(), {**config_of(EXAMPLE), "out": str(tmp_path / "run"), "rounds": 3}
    nodes = nodes_of(5)
    grid = InProcessGrid(module.client, config, nodes)
    start(module.server, grid, config)
    run = read_run(tmp_path / "run")
    assert run.result is not None
    assert run.result.accuracy is not None
    assert run.result.accuracy > 0.6
    parts = [one.part for one in run.rounds[0].devices]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == ("depth 1", "depth 4")


def test_a_node_may_say_its_own_speed(tmp_path: Path) -> None:
    given = {**TWO_NODES, "rounds": 1, "levels": "1/2,1"}
    nodes = {11: {"partition-id": 0, "speed": 1.0}, 12: {"partition-id": 1, "speed": 0.25}}
    run, _ = deploy(tmp_path, given, nodes=nodes)
    assert [one.speed for one in run.rounds[0].devices] == [1.0, 0.25]
    assert [one.part for one in run.rounds[0].devices] == ["depth 4", "depth 1"]


def test_devices_choose_their_own_width(tmp_path: Path) -> None:
    """Option II: all masks are offered, the node chooses by its own speed, and the reply says which it was."""
    given: dict[str, Any] = {"devices": 3, "samples": 20, "cohort": 3, "rounds": 2, "batch": 10}
    given |= {"executor": "plain", "levels": "1/4,1/2,1", "splitting": "device"}
    simulated = api.run(out=tmp_path / "simulated", **given)
    run, grid = deploy(tmp_path, given)
    assert run.result is not None
    assert simulated.result is not None
    assert run.result.weights_sha256 == simulated.result.weights_sha256
    chosen = [one.part for one in run.rounds[0].devices]
    assert chosen == [one.part for one in simulated.rounds[0].devices]
    assert len(set(chosen)) > 1
    offered = [one.question.config_records["task"]["offer"] for one in grid.traffic if one.kind == "train"]
    assert len(set(offered)) == 1


def test_widths_follow_measured_seconds(tmp_path: Path) -> None:
    """Both nodes are stated to be equal; one takes ten times as long as it should."""

    def slow(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train":
            said = answer.content.config_records["reply"]
            said["seconds"] = 100.0 if said["device"] == 0 else 10.0
        return answer

    given = {**TWO_NODES, "rounds": 3, "levels": "1"}
    run, _ = deploy(tmp_path, {**given, "speeds": "measured", "deadline": 50.0}, slow, transport_seconds=5.0)
    assert [one.part for one in run.rounds[0].devices] == ["depth 4", "depth 4"]
    assert run.rounds[-1].devices[0].part < "depth 4"
    assert run.rounds[-1].devices[1].part == "depth 4"
    assert [one.seconds for one in run.rounds[-1].devices] == [100.0, 10.0]


def test_a_deadline_that_transport_eats_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="transport-seconds = 30 leaves nothing of it"):
        deploy(tmp_path, {"devices": 2, "cohort": 2, "deadline": 20.0}, transport_seconds=30.0)


def test_private_noise_is_the_devices_own_and_its_replies_are_counted(tmp_path: Path) -> None:
    given = {**TWO_NODES, "rounds": 2, "dp_clip": 0.1}
    runs = [deploy(tmp_path / name, given)[0] for name in ("first", "second")]
    first, second = (run.result.weights_sha256 for run in runs if run.result is not None)
    assert first != second  # whoever knows the seed cannot take the noise off again
    assert all(one.outcome == "arrived" for run in runs for step in run.rounds for one in step.devices)
    counts = [path.read_text() for path in (tmp_path / "first" / "nodes").rglob("releases.json")]
    assert counts == ['{"releases": 2}', '{"releases": 2}']
    spend(tmp_path / "other", 1)
    with pytest.raises(SettingError, match="has sent the 1 replies"):
        spend(tmp_path / "other", 1)


def adaptive(settings: Any) -> Any:
    """A task that comes with fedpmt, with an optimizer and a rate that no setting has."""
    plain = api.paper_problem_of(settings)
    return replace(plain, optimizer=Adam(betas=(0.5, 0.9)), rate=lambda index: 0.01 / (index + 1))


def test_an_app_may_have_an_optimizer_of_its_own(tmp_path: Path) -> None:
    given = {**TWO_NODES, "method": "fedavg", "rounds": 2, "levels": "1"}
    run, _ = deploy(tmp_path / "own", given, apps=apps(adaptive))
    plain, _ = deploy(tmp_path / "plain", {**given, "optimizer": "adam", "lr": 0.01})
    assert (run.settings["optimizer"], run.settings["schedule"]) == ("custom", "custom")
    assert run.rounds[1].learning_rate == 0.005
    assert run.result is not None
    assert plain.result is not None
    assert run.result.weights_sha256 != plain.result.weights_sha256
    with pytest.raises(
        SettingError, match=r"^optimizer = 'custom' is refused: the app's problem has no optimizer"
    ):
        deploy(tmp_path / "none", {**given, "optimizer": "custom"})


def normed(settings: Any) -> Any:
    """A user's own model with BatchNorm, and data that only the nodes have."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 2
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return node_problem(
        settings, net, test=(inputs, targets), shard=lambda device: (inputs[:20], targets[:20])
    )


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "ist"])
def test_statistics_that_only_nodes_could_find_are_refused_before_anything_runs(
    method: str, tmp_path: Path
) -> None:
    given = {**TWO_NODES, "method": method, "rounds": 1}
    with pytest.raises(
        SettingError, match=rf"{method}.norm = 'static' is refused: .*set {method}.norm=averaged"
    ):
        deploy(tmp_path / "static", given, apps=apps(normed))
    assert not (tmp_path / "static").exists()
    run, _ = deploy(tmp_path / "averaged", {**given, "options": {"norm": "averaged"}}, apps=apps(normed))
    assert [one.outcome for one in run.rounds[0].devices] == ["arrived"] * 2
    assert run.result is not None
    assert run.result.accuracy is not None


def test_flowers_programs_are_found_by_name_where_no_environment_is_activated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`.venv/bin/fedpmt deploy` from any shell: the SuperLink starts `flower-superexec` by its bare name."""
    monkeypatch.setenv("PATH", os.defpath)
    found = shutil.which("flower-superexec", path=environment_of({})["PATH"])
    assert found is not None
    assert Path(found).parent == Path(processes.program("flower-superlink")).parent


def test_folders_of_modules_hold_in_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["here", str(tmp_path)]))
    assert environment_of({})["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "here"), str(tmp_path)])


STARTER = """
import subprocess, sys, time
from fedpmt.flower.guard import Guard

child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
child += "start_new_session=True); time.sleep(600)"
guard = Guard()
left = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
guard.watch(left.pid)
print(left.pid, flush=True)
sys.stdin.readline()
guard.release()
"""
"""Starts a program that starts another in a session of its own, as Flower does."""


def below(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    return [child for child, parent in rows if parent == process]


def gone(process: int) -> bool:
    """Ended, or a defunct entry that nobody has collected."""
    listed = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False
    )
    return listed.stdout.strip()[:1] in ("", "Z")


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_killed_program_has_started_is_stopped_and_what_it_released_is_not(killed: bool) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=pipe, stdout=pipe, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        until(lambda: len(below(child)) == 1)
        (grandchild,) = below(child)
        if killed:
            starter.send_signal(signal.SIGKILL)
        else:
            starter.stdin.write("\n")
            starter.stdin.flush()
        starter.wait(60)
    try:
        if killed:
            until(lambda: gone(child) and gone(grandchild))
        else:
            time.sleep(1.0)
            assert not gone(child)
            assert not gone(grandchild)
    finally:
        for process in (child, grandchild):
            if not gone(process):
                os.kill(process, signal.SIGKILL)


def test_a_process_is_known_by_when_it_began() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid()) != ""
    assert start_time(2**22 + 1) == ""  # above the largest id
