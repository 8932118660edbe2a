"""A score has a name: only an accuracy is a share, and nothing else is ever called one."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpmt
from fedpmt import records
from fedpmt.cli.results import run_facts
from fedpmt.data import from_arrays
from fedpmt.progress import named_score
from fedpmt.records import ResultRecord, RoundRecord, RunRecord
from fedpmt.report import default_targets, summary, tidy, time_to_target
from fedpmt.report.page import page
from fedpmt.report.quantities import show
from fedpmt.training.ready_made import make_objective
from fedpmt.types import DivergedError, SettingError

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
VALUES = 20 * (INPUTS @ np.array([1.0, -2.0, 0.5, 3.0], dtype=np.float32))[:, None]
SPLIT: dict[str, Any] = {"train": (INPUTS[:60], VALUES[:60]), "test": (INPUTS[60:], VALUES[60:])}
FEW: dict[str, Any] = {
    "devices": 4,
    "cohort": 2,
    "samples": 15,
    "batch": 5,
    "lr": 0.1,
    "epochs": 2,
    "rounds": 6,
}


def identity(problem: Any) -> Any:
    return problem


def squared(outputs: Tensor, wanted: Tensor) -> Tensor:
    return ((outputs - wanted) ** 2).squeeze(1)


def regression(**changes: Any) -> RunRecord:
    """A linear model, whose squared error falls from hundreds to nearly nothing."""
    torch.manual_seed(0)
    given = {"loss": nn.functional.mse_loss, "metric": {"mse": squared}, "maximize": False, **FEW, **changes}
    return fedpmt.run("fedavg", model=nn.Sequential(nn.Linear(4, 1)), **SPLIT, **given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    out = tmp_path_factory.mktemp("runs")
    return [regression(out=out / str(seed), seed=seed) for seed in (0, 1)]


def test_an_error_is_recorded_under_its_name_and_is_no_accuracy(runs: list[RunRecord]) -> None:
    for run in runs:
        result = run.result
        assert result is not None
        assert result.score is not None
        assert (result.score_name, result.maximize, result.accuracy) == ("mse", False, None)
        assert (run.score_name, run.maximize) == ("mse", False)
        assert [step.accuracy for step in run.rounds] == [None] * 6
        scores = [step.score for step in run.rounds if step.score is not None]
        assert scores[0] > 100 > scores[-1]
        assert scores[-1] == result.score == pytest.approx(result.loss, rel=1e-5)
        assert "accuracy" not in result.as_json()
        assert fedpmt.read_run(run.folder) == run


def test_tables_show_it_as_a_plain_number_and_know_that_lower_is_better(runs: list[RunRecord]) -> None:
    [row] = summary(runs)
    last = [step.score for run in runs for step in run.rounds[-1:] if step.score is not None]
    assert row.score is not None
    assert row.best_score is not None
    assert row.score.mean == pytest.approx(np.mean(last))
    assert row.best_score.mean <= row.score.mean
    assert "accuracy" not in row.texts()
    assert "%" not in row.texts()["score (mse)"] + row.texts()["best"]
    assert {"score:mse", "loss"} <= set(tidy(runs)[0])
    assert "accuracy" not in tidy(runs)[0]
    assert default_targets(runs) == ()
    assert time_to_target(runs) == []
    [target] = time_to_target(runs, [100.0])
    assert (target.reached, target.texts()["target"]) == (2, "mse 100")
    first = [next(step.round for step in run.rounds if (step.score or 0) <= 100) for run in runs]
    assert target.rounds is not None
    assert (target.rounds.low, target.rounds.high) == (min(first), max(first))
    assert first != [1, 1]


def test_the_page_labels_everything_with_the_name(runs: list[RunRecord]) -> None:
    text = page(runs, "table.csv", [100.0])
    assert "accuracy" not in text.lower()
    for words in ("final mse", "best mse", ">test mse</text>", "<h2>Mse</h2>", "at or below each target"):
        assert words in text
    assert "no default targets for mse" in page(runs, "table.csv")
    mixed = page([*runs, fedpmt.run("fedavg", rounds=1, devices=4, cohort=2, samples=10)], "table.csv")
    for words in (">test mse</text>", ">test accuracy</text>", "final score", "<h2>Score</h2>"):
        assert words in mixed


def test_the_command_line_shows_it_by_its_name(runs: list[RunRecord]) -> None:
    result = runs[0].result
    assert result is not None
    best = min(step.score for step in runs[0].rounds if step.score is not None)
    assert f" best {show(best)} in round " in run_facts(runs[0])["score (mse)"]
    assert named_score(runs[0].rounds[0]).startswith("mse ")
    assert named_score(RoundRecord.model_validate({**EMPTY, "score": 0.5})) == "accuracy 50.0%"
    assert result.model_copy(update={"score": None}).score_text == "-"


def test_a_run_stops_at_a_target_from_its_own_side(runs: list[RunRecord]) -> None:
    stopped = regression(target=100.0)
    assert stopped.result is not None
    assert stopped.result.stopped == "target"
    assert stopped.result.score is not None
    assert stopped.result.score <= 100 < (stopped.rounds[-2].score or 0)
    up = regression(metric=lambda outputs, wanted: -squared(outputs, wanted), maximize=True, target=-100.0)
    assert up.result is not None
    assert (up.result.score_name, up.result.stopped, up.result.rounds) == (
        "score",
        "target",
        stopped.result.rounds,
    )


def test_a_resumed_run_keeps_its_score(tmp_path: Path) -> None:
    out = tmp_path / "run"
    regression(out=out)
    with pytest.raises(SettingError, match="another configuration"):
        regression(out=out, resume=True, metric={"mae": squared})
    again = regression(out=out, resume=True)
    assert again.score_name == "mse"


def test_what_a_diverged_run_is_scored(tmp_path: Path) -> None:
    """The accuracy of a guess; other scores have no guess."""
    from fedpmt import api
    from fedpmt.settings import resolve

    with pytest.raises(DivergedError):
        regression(lr=1e30)
    settings = resolve({"method": "fedavg", "task": "own", "data": "arrays", **FEW, "lr": 3e38})
    for name, metric, classes in (("mse", {"mse": squared}, None), ("accuracy", None, 3)):
        values = VALUES if classes is None else np.arange(80) % classes
        objective = make_objective(nn.functional.mse_loss if classes is None else None, metric)
        problem = api.own_problem(
            settings,
            nn.Sequential(nn.Linear(4, classes or 1)),
            from_arrays((INPUTS[:60], values[:60]), (INPUTS[60:], values[60:])),
            objective,
        )
        request = api.Request(settings, api.method_of(settings), partial(identity, problem))
        run = api.start(request, tmp_path / name, keep_diverged=True)
        assert run.result is not None
        assert (run.result.stopped, run.result.score_name) == ("diverged", name)
        assert run.result.score == (1 / 3 if classes else None)


def test_names_of_metrics() -> None:
    assert make_objective().score_name == "accuracy"
    assert make_objective(metric=squared).score_name == "squared"
    assert make_objective(metric=lambda outputs, wanted: outputs).score_name == "score"
    assert make_objective(metric=nn.MSELoss(reduction="none")).score_name == "score"
    assert make_objective(metric={"R²": squared}).score_name == "R²"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metric": {}}, r"metric must have exactly one entry \(got 0\)"),
        ({"metric": {"a": squared, "b": squared}}, r"metric must have exactly one entry \(got 2\)"),
        ({"metric": {"a": 3}}, "metric must be a function, an object with update and compute, or a mapping"),
        ({"metric": {" ": squared}}, "metric must have a name that is not empty"),
        ({"metrics": {"mse": squared}}, r"metrics must not repeat the score \('mse'\)"),
        ({"metrics": ["mape"], "objective": "regression"}, "metric = 'mape' is unknown; did you mean 'mae'"),
        ({"metrics": [squared]}, "metrics must be a mapping from names to metrics, or a list of names"),
        ({"metrics": {"mean": lambda outputs, wanted: squared(outputs, wanted).mean()}}, "not their mean"),
        (
            {"metrics": {"crossed": lambda outputs, wanted: outputs - wanted[:, 0]}},
            "5 x 5 values for 5 samples",
        ),
        ({"metric": None, "maximize": True, "objective": "regression"}, "maximize must be false for mse"),
        ({"metric": None, "maximize": False}, "maximize must be true for accuracy"),
        (
            {"metric": {"accuracy": squared}, "maximize": True, "target": 2.0},
            r"target must be > 0 and <= 1 .*got 2",
        ),
        ({"target": float("nan")}, "target"),
    ],
)
def test_what_cannot_be_a_score_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=says):
        regression(out=tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_paper_task_takes_no_metric() -> None:
    for given in (
        {"metric": squared},
        {"maximize": False},
        {"metrics": ["macro-f1"]},
        {"objective": "causal-lm"},
    ):
        with pytest.raises(SettingError, match="objective need a model of your own"):
            fedpmt.run("fedavg", rounds=1, **given)


EMPTY: dict[str, Any] = {
    "round": 1, "virtual_seconds": 1.0, "round_seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "operations": 1.0,
    "layers": {}, "devices": [],
}  # fmt: skip


def test_records_of_the_first_edition_are_read() -> None:
    """They say `accuracy`, `accuracy_by_class` and `accuracy_by_level`."""
    old = {**EMPTY, "accuracy": 0.5, "accuracy_by_class": {"0": 0.25}, "accuracy_by_level": {"1": 0.75}}
    for step in (RoundRecord.model_validate(old), RoundRecord.model_validate_json(json.dumps(old))):
        assert (step.score, step.accuracy, step.score_name, step.maximize) == (0.5, 0.5, "accuracy", True)
        assert (step.score_by_class, step.score_by_level) == ({"0": 0.25}, {"1": 0.75})
    new = records.migrate(old)
    assert set(new) == {*EMPTY, "score", "score_by_class", "score_by_level"}
    assert records.migrate(new) == new
    fields = {"method": "m", "task": "t", "seed": 0, "rounds": 1, "virtual_seconds": 1.0, "bytes_up": 1}
    fields |= {"bytes_down": 1, "operations": 1.0, "weights_sha256": "0", "accuracy": 0.25}
    result = ResultRecord.model_validate(fields)
    assert result.accuracy == result.as_json()["accuracy"] == 0.25
    assert ResultRecord.model_validate(result.as_json()) == result
