"""Data that only the nodes have: the server tests the model and never sees a training sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedpmt.data.base import FederatedData, count_labels
from fedpmt.data.datasets import from_arrays
from fedpmt.models.layered import layered
from fedpmt.simulation.problem import Problem
from fedpmt.training.batches import placed
from fedpmt.training.ready_made import make_objective
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from fedpmt.flower.roster import Roster
    from fedpmt.settings import Settings
    from fedpmt.training.objective import Loss
    from fedpmt.training.optimizers import Optimizer
    from fedpmt.training.ready_made import Metrics, Score
    from fedpmt.types import Arrays, Examples


def node_problem(
    settings: Settings,
    model: nn.Module,
    *,
    test: tuple[Arrays, Arrays],
    shard: Callable[[int], tuple[Arrays, Arrays]],
    layers: Sequence[str] | None = None,
    loss: Loss | None = None,
    metric: Score | None = None,
    metrics: Metrics | None = None,
    maximize: bool | None = None,
    optimizer: Optimizer | None = None,
    rate: Callable[[int], float] | None = None,
) -> Problem:
    """Make a problem for `apps` from your own model and data that only the nodes have.

    Args:
        settings: The run's.
        model: Training starts from the weights that it has on the server.
        test: Inputs and targets that the server tests on.
        shard: Loads the inputs and targets of a device; it is called on that device's node alone.
        layers: Names of the model's layers, where they are not plain to see.
        loss: The mean loss of outputs and targets; that of the settings' objective where it is not given.
        metric: The score, as in `fedpmt.run`; that of the objective where it is not given.
        metrics: Other scores by name, as in `fedpmt.run`.
        maximize: Whether a higher score is better.
        optimizer: The optimizer on devices, in place of the settings', e.g. `Custom(make)` for one of torch's.
        rate: The learning rate of a round, in place of the settings'.
    """
    tested = from_arrays(test, test)

    def examples(device: int) -> Examples:
        return from_arrays(shard(device), test).train

    data = NodeData(tested.test, examples, settings.devices, tested.classes)
    example = placed(tested.test.take(np.arange(2) % len(tested.test))).inputs
    objective = make_objective(loss, metric, maximize=maximize, metrics=metrics, objective=settings.objective)
    net = layered(model, layers=layers, example=example)
    return Problem(net, data, objective, optimizer=optimizer, rate=rate)


class NodeData(FederatedData):
    """A test set, and a function that loads the samples of the node it is called on."""

    def __init__(
        self, test: Examples, shard: Callable[[int], Examples], devices: int, classes: int | None
    ) -> None:
        self.name, self.test, self.devices, self.classes = "node", test, devices, classes
        self._load = shard

    def samples(self, device: int) -> int:
        """How many samples the device holds, |D_k|."""
        return len(self.shard(device))

    def shard(self, device: int) -> Examples:
        """The device's samples; only its own node can load them."""
        return self._load(device)

    def label_counts(self, device: int) -> np.ndarray | None:
        """How many samples of each class the device holds."""
        return count_labels(self.shard(device).targets, self.classes)


class ReportedData(FederatedData):
    """What the server knows of the devices' data: what their nodes have reported."""

    def __init__(self, data: FederatedData, roster: Roster) -> None:
        self.name, self.test, self.devices, self.classes = data.name, data.test, data.devices, data.classes
        self.public, self.validation = data.public, data.validation
        self._data, self._roster = data, roster

    def samples(self, device: int) -> int:
        """How many samples the device's node has reported."""
        return self._roster.of(device).samples

    @property
    def sizes(self) -> int | np.ndarray | None:
        """What all nodes have reported; None as long as some have not."""
        if not all(self._roster.knows(device) for device in range(self.devices)):
            return None
        sizes = np.array([self._roster.of(device).samples for device in range(self.devices)])
        return int(sizes[0]) if (sizes == sizes[0]).all() else sizes

    def label_counts(self, device: int) -> np.ndarray | None:
        """How many samples of each class its node has reported; None where it was not asked."""
        return self._roster.of(device).label_counts if self._roster.knows(device) else None

    def shard(self, device: int) -> Examples:
        """The device's samples, where the server has a copy of them, as of a task that comes with fedpmt."""
        if isinstance(self._data, NodeData):
            raise SettingError("this method needs devices' data on the server, which only the nodes have")
        return self._data.shard(device)
