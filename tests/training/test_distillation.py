"""Answers of a net, and training on the server by the one local loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.nn import functional

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
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.training.optimizers import Adam, Moments
from fedpmt.types import MODEL, Examples
from support import samples


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
    # ∂KL / ∂z_s = (q - p) / T, over the batch, and no T² beside it
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
