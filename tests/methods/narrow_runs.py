"""One local round of a method on one of the paper's nets, by the oracle and by the fast path."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fedpmt import kernels
from fedpmt.methods.base import Prototype, Round, Setup
from fedpmt.models.build import build
from fedpmt.models.nets import NETS
from fedpmt.parts.part import GLOBAL
from fedpmt.pricing.budget import Budget
from fedpmt.seeds import Seeds, generator
from fedpmt.training.compiled import train_compiled
from fedpmt.training.local import LocalSettings, Site, train
from fedpmt.training.messages import Client, Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.types import MODEL, Examples
from support import flat_price, samples

if TYPE_CHECKING:
    from fedpmt.methods.base import Method

CLASSES = 10


def local_round(
    method: Method[Any, Any],
    net: str,
    *,
    share: float = 0.4,
    index: int = 3,
    held: int = CLASSES,
    **local: Any,
) -> tuple[Site, Task, Examples]:
    """A task in double precision for a device that can afford this share of the net and holds some classes."""
    model = build(NETS[net], generator(0, "init"))
    price = flat_price(model)
    state = method.init(Setup({GLOBAL: Prototype(model.structure, model.initial())}, 8, price))
    budget = Budget(share * model.structure.size(model.structure.parameters))
    client = Client(1, 1, 1.0, budget, 30, 5, np.arange(CLASSES) < held)
    round_ = Round(index, price, Seeds(0, index), cohort=(0, 1, 2))
    task = method.assign(state, client, round_)
    weights = {name: tensor.double() for name, tensor in task.tensors[MODEL].items()}
    data = samples(30, NETS[net].input_shape, held)
    site = Site(
        {GLOBAL: model},
        CLASSIFICATION,
        LocalSettings(**{"epochs": 1, "batch": 7, "learning_rate": 0.05, **local}),
    )
    return site, replace(task, tensors={MODEL: weights}), replace(data, inputs=data.inputs.double())


def in_single_precision(task: Task, data: Examples) -> tuple[Task, Examples]:
    """As compiled code knows it."""
    single = {name: one.float() for name, one in task.tensors[MODEL].items()}
    return replace(task, tensors={MODEL: single}), replace(data, inputs=data.inputs.float())


def takes_fast_path(method: Method[Any, Any], net: str, **options: Any) -> bool:
    """Whether compiled code takes the work; without a compiler there is nothing to be found out."""
    if not kernels.available():
        pytest.skip("there is no C compiler here")
    site, task, data = local_round(method, net, **options)
    single, short = in_single_precision(task, data)
    found = train_compiled(method.local(), site, single, task.offer[0], None, short, Seeds(0, 0))
    return found is not None


def check_fast_path(method: Method[Any, Any], net: str, **options: Any) -> None:
    """Compiled code takes the work, and does what the oracle does."""
    site, task, data = local_round(method, net, **options)
    work, part = method.local(), task.offer[0]
    assert any(tuple(task.tensors[MODEL][name].shape) != shape for name, shape in _shapes(site).items())
    oracle, _ = train(work, site, task, part, None, data, Seeds(0, 0), device=0, round_index=0)
    if not kernels.available():
        pytest.skip("there is no C compiler here")
    single, short = in_single_precision(task, data)
    found = train_compiled(work, site, single, part, None, short, Seeds(0, 0))
    assert found is not None
    compiled, _ = found
    assert set(oracle.tensors[MODEL]) == set(compiled.tensors[MODEL]) == set(part.trained)
    for key, tensor in oracle.tensors[MODEL].items():
        assert (compiled.tensors[MODEL][key] - tensor).norm() <= 2e-5 * tensor.norm() + 1e-7, key
    assert abs(compiled.metrics["train_loss"] - oracle.metrics["train_loss"]) < 1e-4


def _shapes(site: Site) -> dict[str, tuple[int, ...]]:
    return dict(site.models[GLOBAL].structure.shapes)
