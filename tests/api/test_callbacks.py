"""What a run tells while it goes on: callbacks, trackers, and the bar that shows its progress."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import fedpmt
from fedpmt import SettingError, Stop
from fedpmt.records import EVALUATION, RoundRecord
from fedpmt.simulation.evaluation import evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping


TINY: dict[str, Any] = {"rounds": 6, "devices": 5, "samples": 20, "cohort": 5, "batch": 10}


def bits(run: fedpmt.Run) -> tuple[str | None, bytes, bytes]:
    files = (run.folder / name for name in ("rounds.jsonl", "model.safetensors"))
    return (run.result and run.result.weights_sha256, *(path.read_bytes() for path in files))  # type: ignore[return-value]


def stop_after(number: int) -> Any:
    def on_round(record: RoundRecord) -> None:
        if record.round == number:
            raise Stop

    return on_round


def test_weights_are_copies_of_what_would_be_saved(tmp_path: Path) -> None:
    seen: list[fedpmt.RoundEnd] = []
    weights: list[dict[str, torch.Tensor]] = []

    def look(record: fedpmt.RoundEnd) -> None:
        assert record.folder == tmp_path / "run"
        seen.append(record)
        weights.append(record.weights)
        for tensor in record.weights.values():
            tensor.zero_()

    run = fedpmt.run(on_round=look, out=tmp_path / "run", **TINY)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == weights[-1].keys()
    assert all(torch.equal(saved[name], weights[-1][name]) for name in saved)
    assert not torch.equal(weights[0]["out.weight"], weights[-1]["out.weight"])
    assert bits(run) == bits(fedpmt.run(**TINY))
    assert [record.model_dump() for record in seen] == [record.model_dump() for record in run.rounds]
    with pytest.raises(SettingError, match="inside a callback"):
        _ = seen[0].weights


def test_stop_ends_the_run_with_a_result_of_its_weights_and_it_can_be_continued(tmp_path: Path) -> None:
    given: dict[str, Any] = {**TINY, "eval_every": 4, "out": tmp_path / "run"}
    seen: list[int] = []
    after = lambda record: seen.append(record.round)  # noqa: E731
    run = fedpmt.run("scaffold", on_round=[stop_after(3), after], **given)
    assert run.result is not None
    assert (run.result.stopped, run.result.rounds, seen) == ("callback", 3, [1, 2, 3])
    # The third round is evaluated because it is the last, as in a run of three rounds.
    short = fedpmt.run("scaffold", **{**given, "rounds": 3, "out": None})
    assert bits(run) == bits(short)
    assert run.result.score == run.rounds[-1].score == short.rounds[-1].score
    resumed = fedpmt.run("scaffold", resume=True, **given)
    assert bits(resumed) == bits(fedpmt.run("scaffold", **{**given, "out": None}))
    assert resumed.result is not None
    assert resumed.result.stopped == "rounds"


def test_a_stop_in_the_last_round_changes_nothing() -> None:
    run = fedpmt.run(on_round=stop_after(6), **TINY)
    assert run.result is not None
    assert run.result.stopped == "rounds"


def test_patience_counts_evaluations_that_are_no_better(tmp_path: Path) -> None:
    given: dict[str, Any] = {**TINY, "rounds": 40, "eval_every": 2, "patience": 3, "lr": 0.3}
    run = fedpmt.run(out=tmp_path / "whole", **given)
    assert run.result is not None
    assert run.result.stopped == "patience"
    scores = [step.score for step in run.rounds if step.score is not None]
    assert len(scores) > 3
    best = max(scores[:-3])
    assert scores.index(best) == len(scores) - 4
    assert all(score <= best for score in scores[-3:])

    def interrupt(record: RoundRecord) -> None:
        if record.round == len(run.rounds) - 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedpmt.run(out=tmp_path / "parts", on_round=interrupt, **given)
    assert bits(fedpmt.run(out=tmp_path / "parts", resume=True, **given)) == bits(run)


def test_the_fields_of_an_evaluation_are_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on behind its last round forgets these, and only these."""
    found: dict[str, Any] = {}

    def spy(*arguments: Any) -> dict[str, Any]:
        found.update(evaluate(*arguments))
        return found

    monkeypatch.setattr("fedpmt.simulation.loop.evaluate", spy)
    fedpmt.run(**{**TINY, "rounds": 1})
    assert set(found) == set(EVALUATION)


SHORT: dict[str, Any] = {"rounds": 2, "devices": 5, "samples": 20, "cohort": 5, "batch": 10}


class ZMQInteractiveShell:
    """What a notebook's shell is called."""


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows below its cell, update by update."""
    shown: list[str] = []

    def display(html: str, display_id: bool) -> Any:
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    parts: dict[str, Any] = {
        "IPython": SimpleNamespace(get_ipython=ZMQInteractiveShell),
        "IPython.display": SimpleNamespace(HTML=str, display=display),
    }
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    return shown


def test_nothing_is_written_to_a_pipe_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    fedpmt.run(**SHORT)
    assert capsys.readouterr() == ("", "")
    fedpmt.compare(["fedpmt", "fedavg"], progress=True, **SHORT)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(",")[0] for line in err.splitlines()] == ["fedpmt", "fedavg"]
    assert all("round 2/2, accuracy " in line for line in err.splitlines())


def test_a_terminal_has_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fedpmt.run(progress=False, **SHORT)
    assert capsys.readouterr() == ("", "")
    fedpmt.run(**SHORT)
    out, err = capsys.readouterr()
    assert out == ""
    assert "━" in err
    assert "2/2" in err


def test_a_notebook_has_a_bar_with_the_score(cells: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = fedpmt.run(**SHORT)
    assert len(cells) == 3
    assert '<progress value="2" max="2">' in cells[-1]
    assert f"2/2 accuracy {run.rounds[-1].score_text}, " in cells[-1]
    assert capsys.readouterr() == ("", "")


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "'click", DeprecationWarning)
    from fedpmt.cli.main import program

TRACKED: dict[str, Any] = {"rounds": 2, "devices": 5, "samples": 20, "cohort": 5, "batch": 10}
FLAGS = [word for key, value in TRACKED.items() for word in (f"--{key}", str(value))]


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
        runs = fedpmt.compare(["fedpmt", "fedavg"], on_round=tracker, **TRACKED)
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
        fedpmt.compare(["fedpmt", "fedavg"], on_round=tracker, **TRACKED)
    assert len(list(Path(tmp_path).glob("wandb/offline-run-*/*.wandb"))) == 2


@pytest.mark.filterwarnings("default")
def test_the_real_mlflow_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlflow")
    with fedpmt.MLflow() as tracker:
        runs = fedpmt.compare(["fedpmt", "fedavg"], on_round=tracker, **TRACKED)
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
