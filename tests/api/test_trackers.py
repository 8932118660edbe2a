"""W&B and MLflow: each run is a run there, with its settings and each round's numbers.

The real packages are used, offline, where they are installed; everywhere, stand-ins say what is called.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import fedpmt
from fedpmt import SettingError

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "'click", DeprecationWarning)
    from fedpmt.cli.main import program

if TYPE_CHECKING:
    from collections.abc import Mapping

TINY: dict[str, Any] = {"rounds": 2, "devices": 5, "samples": 20, "cohort": 5, "batch": 10}
FLAGS = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]


class FakeWandB:
    """What is used of `wandb`."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []

    def init(self, **arguments: Any) -> Any:
        logged: dict[str, Any] = {**arguments, "steps": [], "finished": False}
        self.runs.append(logged)
        return SimpleNamespace(
            log=lambda values, step: logged["steps"].append((step, values)),
            finish=lambda: logged.update(finished=True),
        )


class FakeMLflow:
    """What is used of `MlflowClient`."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def get_experiment_by_name(self, name: str) -> None:
        assert name == "fedpmt"

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.runs[run_name] = {"params": {}, "metrics": [], "finished": False}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_param(self, run_id: str, name: str, value: Any) -> None:
        self.runs[run_id]["params"][name] = value

    def log_metric(self, run_id: str, name: str, value: float, step: int) -> None:
        self.runs[run_id]["metrics"].append((step, name, value))

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["finished"] = True


def check_numbers(found: Mapping[int, Mapping[str, float]], one: fedpmt.Run) -> None:
    assert list(found) == [1, 2]
    for step in one.rounds:
        assert found[step.round]["accuracy"] == step.score
        assert found[step.round]["virtual_seconds"] == step.virtual_seconds
        assert found[step.round]["coverage/out"] == step.layers["out"]


def test_each_run_is_a_run_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with fedpmt.WandB(project="phones", mode="offline") as tracker:
        runs = fedpmt.compare(["fedpmt", "fedavg"], on_round=tracker, **TINY)
    for logged, one in zip(fake.runs, runs, strict=True):
        assert (logged["project"], logged["mode"], logged["name"]) == ("phones", "offline", one.folder.name)
        assert logged["config"] == one.settings
        assert logged["finished"]
        check_numbers(dict(logged["steps"]), one)


def test_each_run_is_a_run_of_mlflow_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: fake))
    out = tmp_path / "one"
    assert program(["run", *FLAGS, "--track", "mlflow", "--track", "tensorboard", "--out", str(out)]) == 0
    [(name, logged)] = fake.runs.items()
    assert (name, logged["params"]["method"], logged["finished"]) == ("one", "fedpmt", True)
    found: dict[int, dict[str, float]] = {}
    for step, key, value in logged["metrics"]:
        found.setdefault(step, {})[key] = value
    check_numbers(found, fedpmt.read_run(out))
    assert any((out / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("name", "words"),
    [("wandb", "fedpmt[tracking]"), ("mlflow", "fedpmt[tracking]"), ("wandbb", "did you mean 'wandb'?")],
)
def test_what_is_not_installed_or_unknown_is_refused_before_anything_runs(
    name: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert program(["run", *FLAGS, "--track", name, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_in_python_it_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingError, match="W&B is not installed"):
        fedpmt.WandB()


@pytest.mark.filterwarnings("default")
def test_the_real_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with fedpmt.WandB(mode="offline", dir=str(tmp_path)) as tracker:
        fedpmt.compare(["fedpmt", "fedavg"], on_round=tracker, **TINY)
    assert len(list(Path(tmp_path).glob("wandb/offline-run-*/*.wandb"))) == 2


@pytest.mark.filterwarnings("default")
def test_the_real_mlflow_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlflow")
    with fedpmt.MLflow() as tracker:
        runs = fedpmt.compare(["fedpmt", "fedavg"], on_round=tracker, **TINY)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("fedpmt")
    found = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    for one in runs:
        stored = found[one.folder.name]
        assert stored.info.status == "FINISHED"
        assert stored.data.params["method"] == one.settings["method"]
        history = client.get_metric_history(stored.info.run_id, "accuracy")
        assert [(point.step, point.value) for point in history] == [
            (step.round, step.score) for step in one.rounds
        ]
