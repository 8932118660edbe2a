"""What is learned: a model, the devices' data and an objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedpmt.models.build import build
from fedpmt.models.nets import Net, net
from fedpmt.seeds import generator
from fedpmt.training.batches import CPU, placed
from fedpmt.training.objective import CLASSIFICATION, Objective
from fedpmt.types import Arrays, SettingError

if TYPE_CHECKING:
    from fedpmt.data.federated import FederatedData
    from fedpmt.models.layered import LayeredModel
    from fedpmt.settings import Settings


@dataclass(frozen=True)
class Problem:
    """A learning task spread over devices."""

    model: LayeredModel
    data: FederatedData
    objective: Objective = CLASSIFICATION
    net: Net | None = None  # where the model is one of the paper's

    @property
    def widths(self) -> int:
        """|I| where the user says nothing: the paper's larger one, else one width per layer."""
        return self.net.widths[0] if self.net else len(self.model.structure.layers)

    def example(self, device: torch.device = CPU) -> Arrays:
        """Two test inputs, for finding out what a forward pass does."""
        return placed(self.data.test.take(slice(0, 2)), device).inputs


def paper_problem(settings: Settings, data: FederatedData) -> Problem:
    """One of the paper's nets on this data, its weights drawn from the run's seed."""
    chosen = net(settings.task)
    if tuple(data.input_shape) != chosen.input_shape:
        raise SettingError(
            f"task = '{settings.task}' takes inputs of shape {chosen.input_shape}, "
            f"data = '{settings.data}' has {tuple(data.input_shape)}"
        )
    return Problem(build(chosen, generator(settings.seed, "init")), data, net=chosen)


def draws_at_random(model: LayeredModel, example: Arrays) -> bool:
    """Whether a forward pass in training mode draws from torch's global generator (dropout does)."""
    trial = model.clone()
    trial.set_training([True] * len(model.structure.layers))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        trial.forward(trial.initial(), example)
        return not torch.equal(before, torch.get_rng_state())
