"""One local round of a method on one of the paper's nets, by the oracle and by the fast path."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedpmt.devices.fleet import Device
from fedpmt.methods.base import Prototype, Round, Setup
from fedpmt.models.build import build
from fedpmt.models.nets import NETS
from fedpmt.parts.part import GLOBAL, take, within
from fedpmt.pricing.meter import Meter, Plan
from fedpmt.resources import Resources
from fedpmt.seeds import Seeds, generator
from fedpmt.training.local import Job, LocalSettings, Site
from fedpmt.training.loop import compiled_round, conclude, local_round
from fedpmt.training.messages import Client
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.types import MODEL
from support import FlatPrice, samples

if TYPE_CHECKING:
    from fedpmt.methods.base import Method

CLASSES = 10


def local_job(
    method: Method[Any, Any],
    net: str,
    *,
    share: float = 0.4,
    index: int = 3,
    held: int = CLASSES,
    **local: Any,
) -> Job[Any]:
    """The task of a device that can afford this share of the net and holds some classes."""
    model = build(NETS[net], generator(0, "init"))
    price: Any = FlatPrice(model)
    state = method.init(Setup({GLOBAL: Prototype(model.structure, model.initial())}, 8, price))
    meter = Meter(price, {GLOBAL: model.structure}, Device(1, 1, 1.0), 30, 5)
    limit = Resources.limit(operations=share * model.structure.size(model.structure.parameters))
    client = Client(1, 1, 1.0, 30, 5, np.arange(CLASSES) < held, Plan(meter, limit))
    task = method.assign(state, client, Round(index, price, Seeds(0, index), cohort=(0, 1, 2)))
    settings = LocalSettings(**{"epochs": 1, "batch": 7, "learning_rate": 0.05, **local})
    site = Site({GLOBAL: model}, CLASSIFICATION, settings, fast=True)
    data = samples(30, NETS[net].input_shape, held)
    return Job(site, task, task.offer[0], None, data, Seeds(0, 0), 0, 0)


def takes_fast_path(method: Method[Any, Any], net: str, **options: Any) -> bool:
    return compiled_round(method.local, local_job(method, net, **options)) is not None


def check_fast_path(method: Method[Any, Any], net: str, **options: Any) -> None:
    """Compiled code takes the work, and does what the oracle does in double precision."""
    job, work = local_job(method, net, **options), method.local
    shapes = job.model.structure.shapes
    assert any(tuple(tensor.shape) != shapes[name] for name, tensor in job.task.tensors[MODEL].items())
    found = compiled_round(work, job)
    assert found is not None
    compiled, _ = conclude(work, *found)
    precise = double(job)
    oracle, _ = conclude(work, *local_round(work, precise))
    assert set(oracle.update) == set(compiled.update) == set(job.part.trained)
    for key, change in oracle.update.items():
        assert change.dtype == torch.float64
        where = within(job.part.trained[key], job.part.sent[key])
        weight = take(precise.task.tensors[MODEL][key], where) + change
        assert (compiled.update[key] - change).norm() <= 2e-5 * weight.norm() + 1e-7, key
    assert abs(compiled.metrics["train_loss"] - oracle.metrics["train_loss"]) < 1e-4


def double(job: Job[Any]) -> Job[Any]:
    """The same work in double precision, which only autograd can do."""
    weights = {name: tensor.double() for name, tensor in job.task.tensors[MODEL].items()}
    data = replace(job.data, inputs=job.data.inputs.double())
    task, site = replace(job.task, tensors={MODEL: weights}), replace(job.site, fast=False)
    return replace(job, task=task, site=site, data=data)
