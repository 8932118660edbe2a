"""Runs on targets of any shape: tokens, pixels, language, several labels, numbers, dicts."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpmt
import published  # noqa: F401  (makes transformers importable)
from fedpmt.cli.results import run_facts
from fedpmt.report import summary, tidy
from fedpmt.report.page import page
from fedpmt.types import IGNORED, SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import ResultRecord, RunRecord

FEW: dict[str, Any] = {"devices": 4, "cohort": 2, "samples": 15, "batch": 5, "rounds": 3, "lr": 0.5}
WORDS = 8
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(WORDS, size=(90, 6))
TAGS = np.where(RNG.random(TOKENS.shape) < 0.2, IGNORED, TOKENS % 3)
PIXELS = RNG.normal(size=(90, 1, 5, 5)).astype(np.float32)
VALUES = RNG.normal(size=(90, 4)).astype(np.float32)


def split(inputs: Any, targets: Any) -> dict[str, Any]:
    def rows(arrays: Any, span: slice) -> Any:
        return {name: one[span] for name, one in arrays.items()} if isinstance(arrays, dict) else arrays[span]

    parts = {"train": slice(0, 60), "test": slice(60, 90)}
    return {name: (rows(inputs, span), rows(targets, span)) for name, span in parts.items()}


def result_of(run: RunRecord) -> ResultRecord:
    assert run.result is not None
    return run.result


def learns(run: RunRecord) -> None:
    losses = [step.loss for step in run.rounds if step.loss is not None]
    assert len(losses) == len(run.rounds)
    assert losses[-1] < losses[0]


class Tagger(nn.Module):
    """A label for each token, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.words(tokens)
        return {"hidden": hidden, "logits": self.head(hidden)}


def tags(**changes: Any) -> RunRecord:
    data = split({"tokens": TOKENS}, {"labels": TAGS, "weights": np.ones((90, 6))})
    return fedpmt.run(
        "fedpmt", model=Tagger(), **data, **{"metrics": ["macro-f1", "perplexity"], **FEW, **changes}
    )


def test_tokens_in_dicts_with_labels_that_do_not_count() -> None:
    run = tags(rounds=6)
    learns(run)
    result = result_of(run)
    assert (result.score_name, run.settings["objective"]) == ("accuracy", "classification")
    assert set(result.scores) == {"macro-f1", "perplexity"}
    assert result.loss is not None
    assert result.scores["perplexity"] == pytest.approx(np.exp(result.loss), rel=1e-5)
    assert result.scores == run.rounds[-1].scores
    assert [step.score_by_class for step in run.rounds] == [None] * 6


def test_scores_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    one, two = (
        fedpmt.run(
            "fedavg",
            model=nn.Sequential(nn.Linear(4, 3)),
            train=(VALUES, VALUES[:, :3].argmax(1)),
            test=(np.tile(VALUES, (20, 1)), np.tile(VALUES[:, :3].argmax(1), 20)),
            metrics={"macro-f1": "macro-f1", "mean": lambda outputs, _: outputs[:, 0]},
            out=tmp_path / str(workers),
            workers=workers,
            **FEW,
        )
        for workers in (1, 2)
        if torch.manual_seed(0)
    )
    assert [step.scores for step in one.rounds] == [step.scores for step in two.rounds]
    assert [(step.score, step.score_by_class) for step in one.rounds] == [
        (step.score, step.score_by_class) for step in two.rounds
    ]


def test_pixels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    labels = (PIXELS[:, 0] > 0).astype(np.int64)
    labels[:, 0] = IGNORED
    for method in ("fedpmt", "heterofl"):
        run = fedpmt.run(method, model=model, **split(PIXELS, labels), **{**FEW, "lr": 0.2})
        learns(run)
        assert run.rounds[-1].score_by_class is None


def test_language() -> None:
    """Of a published model; sequences count up, so that the next token can be learnt."""
    transformers: Any = importlib.import_module("transformers")

    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=WORDS, n_positions=6, n_embd=8, n_layer=2, n_head=2, **none)
    )
    ids = (TOKENS[:, :1] + np.arange(6)) % WORDS
    run = fedpmt.run(
        "fedpmt", model=model, **split({"input_ids": ids}, ids), objective="causal-lm", **{**FEW, "rounds": 5}
    )
    learns(run)
    result = result_of(run)
    assert (result.score_name, result.maximize, result.accuracy) == ("perplexity", False, None)
    assert result.loss is not None
    assert result.score == pytest.approx(np.exp(result.loss), rel=1e-5)


def test_several_labels_and_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    several = fedpmt.run(
        "fedavg",
        model=model,
        **split(VALUES, (VALUES[:, :3] > 0).astype(np.int64)),
        objective="multi-label",
        metrics=["accuracy"],
        **FEW,
    )
    learns(several)
    assert result_of(several).score_name == "micro-f1"
    # Whole numbers are values here, and may be below zero.
    years = np.round(10 * VALUES[:, 0]).astype(np.int64)
    model = nn.Sequential(nn.Linear(4, 1))
    numbers = fedpmt.run(
        "fedavg", model=model, **split(VALUES, years), objective="regression", **{**FEW, "lr": 0.1}
    )
    learns(numbers)
    assert (result_of(numbers).score_name, result_of(numbers).maximize) == ("mse", False)
    assert result_of(numbers).score == pytest.approx(result_of(numbers).loss, rel=1e-5)
    assert numbers.rounds[0].score_by_class is None


def test_samples_without_a_label_are_left_out() -> None:
    labels = VALUES[:, :3].argmax(1)
    labels[::4] = IGNORED
    run = fedpmt.run("fedpmt", model=nn.Sequential(nn.Linear(4, 3)), **split(VALUES, labels), **FEW)
    learns(run)
    assert set(run.rounds[-1].score_by_class or {}) == {"0", "1", "2"}


@dataclass
class Detections:
    boxes: Tensor
    sure: Tensor


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.sure = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, images: Tensor) -> Detections:
        hidden = self.body(images).relu()
        return Detections(self.boxes(hidden), self.sure(hidden))


def test_an_own_loss_and_metric_get_what_the_model_gave_and_dicts_of_targets() -> None:
    def loss(found: Detections, wanted: dict[str, Tensor]) -> Tensor:
        apart = nn.functional.l1_loss(found.boxes, wanted["boxes"])
        return apart + nn.functional.binary_cross_entropy_with_logits(found.sure[:, 0], wanted["there"])

    def distance(found: Detections, wanted: dict[str, Tensor]) -> Tensor:
        return (found.boxes - wanted["boxes"]).abs().sum(dim=1)

    targets = {"boxes": VALUES, "there": (VALUES[:, 0] > 0).astype(np.float32)}
    torch.manual_seed(0)
    run = fedpmt.run(
        "fedpmt",
        model=Detector(),
        layers=["body", "boxes", "sure"],
        **split(VALUES, targets),
        loss=loss,
        metric=distance,
        maximize=False,
        metrics={"sure": lambda found, wanted: (found.sure[:, 0] > 0) == (wanted["there"] > 0)},
        **FEW,
    )
    learns(run)
    assert (run.settings["objective"], run.score_name) == ("custom", "distance")
    assert 0 <= result_of(run).scores["sure"] <= 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"partition": "classes:2"}, "partition = 'classes:2' needs one class per sample as target"),
        ({"partition": "dirichlet:1"}, "partition = 'dirichlet:1' needs one class per sample as target"),
        (
            {"objective": "causal-lm", "metrics": None},
            "train: labels run from 0 to 7, but the model has 3 outputs",
        ),
        ({"objective": "custom"}, "objective = 'custom' stands for a loss"),
        ({"objective": "ranking"}, "objective"),
        ({"metrics": ["f1"]}, "metric = 'f1' is unknown"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    data = split({"tokens": TOKENS}, TOKENS if changes.get("objective") else TOKENS % 3)
    with pytest.raises(SettingError, match=says) as caught:
        fedpmt.run("fedpmt", model=Tagger(), **data, **{**FEW, **changes})
    assert "\n" not in str(caught.value)


def test_methods_that_need_a_class_per_sample_say_so() -> None:
    chain = nn.Sequential(nn.Embedding(WORDS, 8), nn.ReLU(), nn.Linear(8, 3))
    for method in ("feddf", "fedgkt", "fedgen", "comet"):
        with pytest.raises(SettingError, match="needs targets that are classes"):
            fedpmt.run(method, model=chain, **split(TOKENS, TOKENS % 3), **{**FEW, "samples": 10})


def test_other_metrics_are_in_tables_page_and_command_line(tmp_path: Path) -> None:
    runs = [tags(out=tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    [row] = summary(runs)
    last = [run.rounds[-1].scores["perplexity"] for run in runs]
    spread = row.scores["perplexity"]
    assert spread is not None
    assert spread.mean == pytest.approx(np.mean(last))
    assert "score (macro-f1)" in row.texts()
    assert tidy(runs)[0]["score:perplexity"] == runs[0].rounds[0].scores["perplexity"]
    text = page(runs, "table.csv")
    assert ">macro-f1</th>" in text
    result = result_of(runs[0])
    assert run_facts(runs[0])["score (perplexity)"] == f"{last[0]:.3g}"
    assert json.loads(json.dumps(result.as_json()))["scores"] == result.scores
    again = tags(out=tmp_path / "0", seed=0, resume=True)
    assert again == runs[0]
    with pytest.raises(SettingError, match="another configuration"):
        tags(out=tmp_path / "0", seed=0, resume=True, metrics=["perplexity"])
