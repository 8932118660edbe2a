"""What is learned: a model, the devices' data and an objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedpmt.models.build import build
from fedpmt.models.nets import Net, net
from fedpmt.parts.part import GLOBAL
from fedpmt.seeds import generator
from fedpmt.training.batches import CPU, placed
from fedpmt.training.objective import CLASSIFICATION, Objective
from fedpmt.types import Arrays, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fedpmt.data.federated import FederatedData
    from fedpmt.models.layered import LayeredModel
    from fedpmt.settings import Settings
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
    """Run a few samples through a user's model, loss and metric, so that what cannot work is refused at once."""
    model, data = problem.model.clone(), problem.data
    layers = len(model.structure.layers)
    # BatchNorm cannot train on one value per channel, which the last batch may come down to.
    last = settings.samples % settings.batch or min(settings.batch, settings.samples)
    for mode, examples in ((False, data.test), (True, data.shard(0))):
        few = placed(examples.take(np.arange(last if mode else 2) % len(examples)))
        model.set_training([mode] * layers)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                outputs = model.forward(model.initial(), few.inputs)
                loss = problem.objective.loss(outputs, few.targets)
                scores = problem.objective.score(outputs, few.targets)
        except Exception as error:
            what = " ".join(str(error).split())[:200]
            how = f"training on a batch of {last}" if mode else "evaluating two samples"
            raise SettingError(f"model: {how} fails: {type(error).__name__}: {what}") from error
        if loss.ndim != 0 or scores.shape != (len(few),):
            raise SettingError(
                f"loss gives a tensor of shape {tuple(loss.shape)} and metric one of {tuple(scores.shape)}: "
                f"one number, and one per sample ({len(few)},), are needed"
            )
    _check_labels(problem, outputs.shape[-1])


def _check_labels(problem: Problem, outputs: int) -> None:
    """Cross-entropy needs labels from 0 to the number of outputs - 1."""
    if problem.objective.loss is not CLASSIFICATION.loss:
        return
    everything = problem.data.training_set()
    for name, examples in (("train", everything), ("test", problem.data.test)):
        if examples is None or not np.issubdtype(examples.targets.dtype, np.integer):
            continue
        low, high = int(examples.targets.min()), int(examples.targets.max())
        if low < 0 or high >= outputs:
            raise SettingError(
                f"{name}: labels run from {low} to {high}, but the model has {outputs} outputs, "
                f"for labels 0 to {outputs - 1}"
            )
