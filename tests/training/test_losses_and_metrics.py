"""Losses and metrics of samples, tokens and pixels, from outputs of any kind; and training on a net's answers."""

from __future__ import annotations

import importlib
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor
from torch.nn import functional

import published  # noqa: F401  (makes transformers importable)
from fedpmt.methods.feddf import Student
from fedpmt.models.build import build
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL
from fedpmt.parts.width import narrow_start, thinned
from fedpmt.seeds import Seeds, generator
from fedpmt.training.batches import CHUNK, channels_last
from fedpmt.training.distillation import answers, divergence
from fedpmt.training.local import Job, LocalSettings, Run, Site
from fedpmt.training.loop import train_on_server
from fedpmt.training.messages import Task
from fedpmt.training.objective import (
    CLASSIFICATION,
    Mean,
    Metric,
    cross_entropy,
    judge,
    logits_of,
    with_logits,
)
from fedpmt.training.optimizers import Adam, Moments
from fedpmt.training.ready_made import OBJECTIVES, READY_MADE, Sums, make_metric, make_objective
from fedpmt.types import IGNORED, MODEL, Examples, SettingError
from support import samples


@dataclass
class Answer:
    features: list[int]
    logits: Tensor


Pair = namedtuple("Pair", ["scores", "hidden"])


def kinds_of(logits: Tensor) -> list[Any]:
    """The same logits as models give them."""
    published_outputs: Any = importlib.import_module("transformers.modeling_outputs")
    other = torch.zeros(3)
    return [
        logits,
        published_outputs.SequenceClassifierOutput(loss=other, logits=logits),
        {"hidden": other, "logits": logits},
        Answer([1], logits),
        (logits, other),
        Pair(logits, other),
        {"out": logits, "aux": other},
    ]


def test_logits_are_found_and_replaced_in_outputs_of_any_kind() -> None:
    logits = torch.randn(4, 3)
    for outputs in kinds_of(logits):
        assert logits_of(outputs) is logits
        changed = with_logits(outputs, logits + 1)
        assert type(changed) is type(outputs)
        assert torch.equal(logits_of(changed), logits + 1)
        assert logits_of(outputs) is logits
        assert cross_entropy(outputs, torch.tensor([0, 1, 2, 0])).ndim == 0
    with pytest.raises(SettingError, match=r"must hold a tensor of logits \(got list\)"):
        logits_of([1.0])


def test_classification_of_samples_has_the_bits_of_torch() -> None:
    for count in (1, 7, 64):
        logits = torch.randn(count, 10, requires_grad=True)
        labels = torch.randint(10, (count,))
        ours, theirs = cross_entropy(logits, labels), functional.cross_entropy(logits, labels)
        assert torch.equal(ours, theirs)
        gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", ["samples", "tokens", "pixels"])
def test_what_is_labelled_minus_100_does_not_count(shape: str) -> None:
    """The classes of tokens are on the last axis, those of pixels on the second, also where all axes are as long."""
    size = {"samples": (4,), "tokens": (4, 4), "pixels": (4, 4, 4)}[shape]
    labels = torch.randint(4, size)
    labels.view(-1)[::3] = IGNORED
    rows = torch.randn(labels.numel(), 4)
    logits = rows.reshape(*size, 4)
    logits = logits.movedim(-1, 1) if shape == "pixels" else logits
    logits.requires_grad_()
    counted = labels.flatten() != IGNORED
    wanted = functional.cross_entropy(rows[counted], labels.flatten()[counted])
    assert torch.allclose(cross_entropy(logits, labels), wanted)
    assert torch.allclose(cross_entropy(logits, {"labels": labels, "more": labels}), wanted)
    right = rows.argmax(1)[counted] == labels.flatten()[counted]
    examples = Examples(logits.detach(), labels, np.arange(4))
    found = judge(OBJECTIVES["classification"], lambda outputs: outputs, examples)
    assert found.score == pytest.approx(float(right.double().mean()))
    assert found.loss == pytest.approx(float(wanted))
    nothing = cross_entropy(logits, torch.full_like(labels, IGNORED))
    assert nothing == 0
    assert not torch.autograd.grad(nothing, logits)[0].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits, labels = torch.zeros(4, 5, 3), torch.zeros(4, 2, dtype=torch.int64)
    refused: dict[str, tuple[Any, Any]] = {
        r"one more axis than the labels \(got shapes \(4, 5, 3\) and \(4, 2\)\)": (logits, labels),
        "targets must have an entry 'labels'": (logits, {"a": labels, "b": labels}),
    }
    for says, given in refused.items():
        with pytest.raises(SettingError, match=says):
            cross_entropy(*given)
    for name in ("causal-lm", "multi-label", "regression"):
        with pytest.raises(SettingError, match=r"4, 5, 3\) and .*4, 2"):
            OBJECTIVES[name].loss(logits, labels)


def test_the_next_token_is_predicted_as_transformers_does() -> None:
    """The loss is the one that GPT-2 gives when it gets labels itself; over chunks, perplexity is exp(its mean)."""
    transformers: Any = importlib.import_module("transformers")

    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_positions=6, n_embd=4, n_layer=1, n_head=1)
    ).eval()
    ids = torch.randint(11, (1100, 6))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, IGNORED)
    objective = make_objective(objective="causal-lm", metrics=["accuracy"])
    with torch.no_grad():
        whole = net(input_ids=ids, labels=labels)
        assert torch.allclose(objective.loss(net(input_ids=ids), labels), whole.loss)
        examples = Examples({"input_ids": ids}, labels, np.arange(1100))
        found = judge(objective, lambda inputs: net(**inputs), examples)
    assert (objective.score_name, objective.maximize) == ("perplexity", False)
    assert found.loss == pytest.approx(float(whole.loss), rel=1e-6)
    counted = labels[:, 1:] != IGNORED
    logs = whole.logits[:, :-1].double().log_softmax(-1)
    told = logs.gather(-1, ids[:, 1:, None])[..., 0][counted]
    assert found.score == pytest.approx(float(torch.exp(-told.mean())), rel=1e-6)
    right = whole.logits[:, :-1].argmax(-1) == labels[:, 1:]
    assert found.metrics == {"accuracy": pytest.approx(float(right[counted].double().mean()))}
    assert np.isnan(READY_MADE["causal-lm"]["perplexity"].start().compute())


@pytest.mark.parametrize("average", ["micro", "macro"])
def test_f1_is_that_of_scikit_learn_on_the_whole_test_set(average: str) -> None:
    """Of classes, one of which is never true or predicted, and of several labels per sample."""
    torch.manual_seed(0)
    logits, labels = torch.randn(1200, 5), torch.randint(4, (1200,)) ** 2 % 5
    logits[:, 3] = -10
    labels[:100] = IGNORED
    counted = labels != IGNORED
    wanted = f1_score(labels[counted], logits.argmax(1)[counted], average=average)
    assert score_of(logits, labels, "classification", f"{average}-f1") == pytest.approx(wanted, abs=1e-12)
    several = (torch.rand(1200, 5) < 0.3).long()
    wanted = f1_score(several, logits > 0, average=average, zero_division=0)
    assert score_of(logits, several, "multi-label", f"{average}-f1") == pytest.approx(wanted, abs=1e-12)


def score_of(logits: Tensor, labels: Tensor, objective: str, metric: Any) -> float:
    made = make_objective(objective=objective, metric=metric)
    return judge(made, lambda outputs: outputs, Examples(logits, labels, np.arange(len(labels)))).score


def test_several_labels() -> None:
    logits = torch.randn(6, 3)
    labels = torch.randint(2, (6, 3))
    objective = OBJECTIVES["multi-label"]
    wanted = functional.binary_cross_entropy_with_logits(logits, labels.float())
    assert torch.allclose(objective.loss({"logits": logits}, labels), wanted)
    half = labels.clone()
    half[3:] = IGNORED
    wanted = functional.binary_cross_entropy_with_logits(logits[:3], labels[:3].float())
    assert torch.allclose(objective.loss(logits, half), wanted)
    right = float(((logits > 0) == labels.bool())[:3].double().mean())
    assert score_of(logits, half, "multi-label", "accuracy") == pytest.approx(right)


def test_regression_never_broadcasts() -> None:
    outputs, targets = torch.randn(6, 1), torch.arange(6)
    wanted = float(((outputs[:, 0] - targets) ** 2).mean())
    assert float(OBJECTIVES["regression"].loss(outputs, targets)) == pytest.approx(wanted)
    assert score_of(outputs, targets, "regression", "mse") == pytest.approx(wanted)
    errors = float((outputs[:, 0] - targets).abs().mean())
    assert score_of(outputs, targets, "regression", "mae") == pytest.approx(errors)


class Largest:
    """As of torchmetrics: a state that every chunk changes."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.largest = 0.0

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.chunks.append(len(targets))
        self.largest = max(self.largest, float(outputs.max()))

    def compute(self) -> Tensor:
        assert self.chunks == [500, 500, 200]
        return torch.tensor(self.largest)


def test_a_metric_is_a_function_an_object_or_two_halves() -> None:
    logits, labels = torch.randn(1200, 5), torch.randint(5, (1200,))
    mine = Largest()
    mine.update(logits + 100, labels)
    assert score_of(logits, labels, "classification", {"largest": mine}) == pytest.approx(float(logits.max()))
    assert mine.largest > 100  # each evaluation has a copy of its own
    pairs, labels = torch.stack([logits[:, 0], torch.rand(1200)], dim=1), labels % 2
    values = make_metric(lambda outputs, _: outputs[:, 0])
    assert score_of(pairs, labels, "classification", values) == pytest.approx(
        float(pairs[:, 0].mean()), abs=1e-6
    )
    weighted = {"weighted": lambda outputs, _: (outputs[:, 0], outputs[:, 1])}
    wanted = np.average(pairs[:, 0], weights=pairs[:, 1])
    assert score_of(pairs, labels, "classification", weighted) == pytest.approx(float(wanted), abs=1e-6)
    counts = Metric(
        lambda outputs, _: (outputs[:, :2] > 0).sum(dim=0), lambda: Sums(lambda sums: sums[0] - sums[1])
    )
    wanted = int((pairs[:, 0] > 0).sum() - (pairs[:, 1] > 0).sum())
    assert score_of(pairs, labels, "classification", counts) == wanted


def test_what_is_not_finite_does_not_matter_where_it_does_not_count() -> None:
    meter = Mean()
    meter.update((torch.tensor([1.0, torch.inf, torch.nan]), torch.tensor([True, False, False])))
    assert meter.compute() == 1.0
    assert np.isnan(Mean().compute())


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (torch.tensor(0.5), "not their mean"),
        (0.5, "must give a tensor of values"),
        ((torch.ones(3), 1.0), "must give a tensor of values, or a pair of tensors"),
        ((torch.ones(3), torch.ones(1)), r"must have one shape \(got \(3,\) and \(1,\)\)"),
    ],
)
def test_what_is_not_a_value_for_each_item_is_refused(measured: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Mean().update(measured)


@pytest.mark.parametrize("net", ["fcnn-mnist", "cnn-mnist", "cnn-cifar10"])
@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("last", [True, False])
def test_answers_are_those_of_the_module(net: str, rate: float, last: bool) -> None:
    """Of the whole net and of a narrow one, whichever layout images have, and from the middle on."""
    model = build(NETS[net], generator(0, "init"))
    axes = model.structure.require_axes("")
    tensors = narrow_start(model.structure, model.initial(), thinned(model.structure, axes, rate))
    data = samples(7, NETS[net].input_shape, 10)
    if last:
        data = Examples(channels_last(data.inputs), data.targets, data.ids)
    plain = model.forward(tensors, data.inputs)
    torch.testing.assert_close(answers(model, tensors, data), plain, rtol=1e-4, atol=1e-5)
    hidden = Examples(model.prefix(1, tensors, data.inputs), data.targets, data.ids)
    torch.testing.assert_close(answers(model, tensors, hidden, 1), plain, rtol=1e-4, atol=1e-5)


def test_divergence_by_hand() -> None:
    student, teacher = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    p, q = (functional.softmax(z / 2, dim=1).detach().double().numpy() for z in (teacher, student))
    found = divergence(student, teacher, 2.0)
    assert float(found.detach()) == pytest.approx(float((p * (np.log(p) - np.log(q))).sum() / 4), rel=1e-5)
    found.backward()  # type: ignore[no-untyped-call]
    assert teacher.grad is None
    # ∂KL / ∂z_s = (q - p) / T, over the batch, without a factor of T²
    assert student.grad is not None
    np.testing.assert_allclose(student.grad.numpy(), (q - p) / 2 / 4, atol=1e-6)


def test_many_samples_are_answered_as_each_of_them_is() -> None:
    """More than fit into one pass, none lost and none out of order."""
    model = build(NETS["fcnn-mnist"], generator(0, "init"))
    data = samples(2 * CHUNK + 3, (1, 28, 28), 10)
    found = answers(model, model.initial(), data)
    torch.testing.assert_close(found, model.forward(model.initial(), data.inputs), rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Noting(Student):
    """Notes the samples and the loss of each step."""

    batches: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def loss(self, run: Run[Moments], batch: Examples) -> torch.Tensor:
        self.batches.append(batch.ids.tolist())
        loss = super().loss(run, batch)
        self.losses.append(float(loss.detach()))
        return loss


def test_so_many_steps_are_taken_over_the_data_as_often_as_it_takes() -> None:
    """Batches of 4, 4 and 2 out of ten samples, in a new order each time."""
    model = build(NETS["fcnn-mnist"], generator(0, "init"))
    data = samples(10, (1, 28, 28), 10)
    data = Examples(data.inputs, torch.randn(10, 10), data.ids)
    site = Site({GLOBAL: model}, CLASSIFICATION, LocalSettings(1, 4, 0.1))
    part, tensors = full(model.structure), model.initial()
    for steps in (1, 3, 7):
        work = Noting(Adam(), total=100)
        job: Job[Moments] = Job(site, Task((part,), {MODEL: tensors}), part, None, data, Seeds(0, 0))
        run, loss = train_on_server(work, job, steps=steps, rate=1e-3)
        assert run.stepper is not None
        assert (run.steps, run.stepper.moments().steps) == (steps, steps)
        assert [len(batch) for batch in work.batches] == [4, 4, 2, 4, 4, 2, 4][:steps]
        seen = [sample for batch in work.batches for sample in batch]
        passes = [seen[start : start + 10] for start in range(0, len(seen) - 9, 10)]
        assert all(sorted(one) == list(range(10)) for one in passes)
        assert len(passes) < 2 or passes[0] != passes[1]
        assert loss == pytest.approx(np.mean(work.losses))
        assert set(run.tensors) == set(tensors)
        assert not torch.equal(run.tensors["out.weight"], tensors["out.weight"])
