"""A user's own model, with data that only the nodes have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedpmt.data.datasets import from_arrays
from fedpmt.flower.node_data import NodeData
from fedpmt.models.layered import layered
from fedpmt.simulation.problem import Problem
from fedpmt.training.batches import placed
from fedpmt.training.objective import make_objective

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from fedpmt.settings import Settings
    from fedpmt.training.objective import Loss, Metric
    from fedpmt.types import Arrays, Examples


def node_problem(
    settings: Settings,
    model: nn.Module,
    *,
    test: tuple[Arrays, Arrays],
    shard: Callable[[int], tuple[Arrays, Arrays]],
    layers: Sequence[str] | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    maximize: bool = True,
) -> Problem:
    """A problem for `apps`. The server tests on `test`; `shard(device)` is called on that device's node alone.

    Training starts from the model's own weights on the server. The other arguments are those of `fedpmt.run`.
    """
    tested = from_arrays(test, test)

    def examples(device: int) -> Examples:
        return from_arrays(shard(device), test).train

    data = NodeData(tested.test, examples, settings.devices, tested.classes)
    example = placed(tested.test.take(np.arange(2) % len(tested.test))).inputs
    objective = make_objective(loss, metric, maximize=maximize)
    return Problem(layered(model, layers=layers, example=example), data, objective)
