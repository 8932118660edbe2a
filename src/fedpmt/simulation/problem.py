"""What is learned: a model, the devices' data and an objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedpmt.data.lazy import is_read
from fedpmt.models.build import build
from fedpmt.models.nets import Net, net
from fedpmt.parts.part import GLOBAL
from fedpmt.seeds import generator
from fedpmt.training.batches import CPU, placed
from fedpmt.training.objective import CLASSIFICATION, Mean, Objective, class_rows, labels_of
from fedpmt.training.ready_made import next_token_loss, next_tokens
from fedpmt.types import IGNORED, Arrays, SettingError, one_line_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fedpmt.data.federated import FederatedData
    from fedpmt.models.layered import LayeredModel
    from fedpmt.settings import Settings
    from fedpmt.training.batches import Transform
    from fedpmt.training.optimizers import Optimizer


@dataclass(frozen=True)
class Problem:
    """A learning task spread over devices."""

    model: LayeredModel
    data: FederatedData
    objective: Objective = CLASSIFICATION
    net: Net | None = None  # where the model is one of the paper's
    prototypes: Mapping[str, LayeredModel] = field(default_factory=dict)  # a method's own nets
    optimizer: Optimizer | None = None  # a user's own, in place of the settings'
    rate: Callable[[int], float] | None = None  # round -> η, likewise
    transform: Transform | None = None  # of the inputs of each training batch

    @property
    def models(self) -> dict[str, LayeredModel]:
        """All nets in play, by the name that parts call them."""
        return {GLOBAL: self.model, **self.prototypes}

    @property
    def depths(self) -> int:
        """|I| where the user says nothing: the paper's larger one, else one depth per layer."""
        return self.net.depths[0] if self.net else len(self.model.structure.layers)

    def example(self, device: torch.device = CPU) -> Arrays:
        """Two test inputs, for finding out what a forward pass does."""
        return placed(self.data.test.take(np.arange(2) % len(self.data.test)), device).inputs


def sizes_of(problem: Problem, settings: Settings) -> int | np.ndarray:
    """|D_k| of every device as far as it is known here; one number where all are equal."""
    sizes = problem.data.sizes
    return settings.samples if sizes is None else sizes


def paper_problem(settings: Settings, data: FederatedData) -> Problem:
    """One of the paper's nets on this data, its weights drawn from the run's seed."""
    chosen = net(settings.task)
    if tuple(data.input_shape) != chosen.input_shape:
        raise SettingError(
            f"task = '{settings.task}' takes inputs of shape {chosen.input_shape}, "
            f"data = '{settings.data}' has {tuple(data.input_shape)}"
        )
    if data.classes is None or data.classes > chosen.classes:
        has = "no classes" if data.classes is None else f"{data.classes} classes"
        raise SettingError(
            f"task = '{settings.task}' tells {chosen.classes} classes apart, data = '{settings.data}' has {has}"
        )
    return Problem(build(chosen, generator(settings.seed, "init")), data, net=chosen)


def draws_at_random(model: LayeredModel, example: Arrays) -> bool:
    """Whether a forward pass in training mode draws from torch's global generator (dropout does)."""
    # Where torch's generator is the one that forward passes draw from; an accelerator has its own.
    trial = model.clone().to(CPU)
    trial.set_training([True] * len(model.structure.layers))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        trial.forward(trial.initial(), example)
        return not torch.equal(before, torch.get_rng_state())


def try_out(problem: Problem, settings: Settings) -> None:
    """Run a few samples through a user's model, loss and metrics, so that what cannot work is refused at once."""
    model, data = problem.model.clone(), problem.data
    # BatchNorm cannot train on one value per channel, which the last batch of some device may come down to.
    sizes = np.atleast_1d(sizes_of(problem, settings))
    lasts = np.where(sizes % settings.batch, sizes % settings.batch, settings.batch)
    smallest = int(lasts.argmin())
    last = int(lasts[smallest])
    shapes = {}
    for count, examples in ((2, data.test), (last, data.shard(smallest))):
        few, training = placed(examples.take(np.arange(count) % len(examples))), examples is not data.test
        model.set_training([training] * len(model.structure.layers))
        how = f"training on a batch of {last}" if training else "evaluating two samples"
        with one_line_errors(f"model: {how}"), torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = model.forward(model.initial(), few.inputs)
            if not training:
                _check_labels(problem, outputs, few.targets)
            loss = problem.objective.loss(outputs, few.targets)
            shapes[count] = _try_metrics(problem.objective, outputs, few.targets)
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise SettingError(f"loss must give the mean over a batch as a tensor of shape () (got {shape})")
    for name, shape in shapes[last].items():
        # With one number of samples it may be by chance.
        if last > 2 and shape[:2] == (last, last) and shapes[2][name][:2] == (2, 2):
            raise SettingError(
                f"metric '{name}' gives {last} x {last} values for {last} samples: "
                "outputs and targets differ in shape and are broadcast"
            )


def _try_metrics(objective: Objective, outputs: Any, targets: Arrays) -> dict[str, tuple[int, ...]]:
    """Use each metric once; the shapes of their values, where they give any."""
    shapes = {}
    for name, metric in {objective.score_name: objective.score, **objective.metrics}.items():
        meter, measured = metric.start(), metric.measure(outputs, targets)
        meter.update(measured)  # a score is not asked for: of a few samples there may be none
        values = measured[0] if isinstance(measured, tuple) else measured
        shapes[name] = tuple(values.shape) if isinstance(meter, Mean) else ()
    return shapes


def _check_labels(problem: Problem, outputs: Any, targets: Arrays) -> None:
    """Cross-entropy needs labels from 0 to the number of outputs - 1, or -100 for what does not count."""
    loss = problem.objective.loss
    if not (problem.objective.plain or loss is next_token_loss) or labels_of(targets).is_floating_point():
        return
    rows = next_tokens if loss is next_token_loss else class_rows
    classes = rows(outputs, targets)[0].shape[-1]
    for name, examples in (("train", problem.data.training_set()), ("test", problem.data.test)):
        if examples is None or is_read(examples):
            continue
        labels = labels_of(examples.targets)
        counted = labels[labels != IGNORED]
        if not counted.size:
            raise SettingError(f"{name}: all labels are {IGNORED}, so nothing counts")
        low, high = int(counted.min()), int(counted.max())
        if low < 0 or high >= classes:
            raise SettingError(
                f"{name}: labels run from {low} to {high}, but the model has {classes} outputs, "
                f"for labels 0 to {classes - 1}"
            )
