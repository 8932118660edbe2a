"""What tests of methods run on: a bench of devices, narrow runs on both paths, and quadratics with known answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import support
from fedpmt.devices.fleet import Device
from fedpmt.methods.base import Prototype, Round, Server, Setup, aggregate
from fedpmt.models.build import build
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.parts.part import GLOBAL, take, within
from fedpmt.pricing.meter import Meter, Plan, Times
from fedpmt.resources import Resources
from fedpmt.seeds import Seeds, generator
from fedpmt.training.local import Job, LocalSettings, Site
from fedpmt.training.loop import compiled_round, conclude, local_round, train
from fedpmt.training.messages import Client
from fedpmt.training.objective import CLASSIFICATION, Objective
from fedpmt.training.optimizers import SGD
from fedpmt.types import MODEL, Examples
from support import FlatPrice, samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from fedpmt.methods.base import Method, Step
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.pricing.cost import StepCost
    from fedpmt.training.local import LocalWork
    from fedpmt.training.messages import Reply
    from fedpmt.types import Tensors


class Bench(support.Bench):
    """One method on one small model, driven by hand."""

    def aggregate(
        self, replies: Iterable[Reply], index: int = 0, *, state: Any = None, **server: Any
    ) -> Step[Any]:
        """Fold replies into this state, or the bench's own, on a server that may have other things at hand."""
        state, at_hand = self.state if state is None else state, replace(self.server, **server)
        return aggregate(self.method, state, replies, self.round(index), at_hand)

    def cost(self, part: Part) -> StepCost:
        """The price of one batch of the method's local work on a part."""
        return work_cost(self.method.local, part, self.price, self.models[part.model].structure)


class ForwardPrice(support.FlatPrice):
    """With a price of a forward pass too."""

    def __call__(self, part: Part, samples: int | None = None) -> StepCost:
        return replace(super().__call__(part), forward=100.0)


def work_cost(work: LocalWork[Any], part: Part, price: Any, structure: Structure) -> StepCost:
    """The price of one batch of a part, with all that this local work adds to it."""
    meter = Meter(Times(price, 1.0, 1), {}, Device(0, 1, 1.0), 1, 1)
    return meter.cost(replace(part, extra=work.extra(part, price, structure)))


def trained(received: Tensors, reply: Reply) -> dict[str, Tensor]:
    """The weights w_k that a reply stands for: what it changed, added to what it was sent of w."""
    found = reply.part.trained
    return {name: take(received[name], found[name]) + change for name, change in reply.update.items()}


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


WEIGHT = "0.weight"


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean() / 2


class Quadratics:
    """A method on such devices, round by round, with what each device keeps."""

    def __init__(
        self,
        method: Method[Any, Any],
        curvatures: Sequence[float],  # a_i
        centres: Sequence[float],  # b_i
        *,
        steps: int,
        learning_rate: float = 0.1,
        momentum: float = 0.0,
    ) -> None:
        self.method, self.curvatures, self.centres = method, curvatures, centres
        line = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(line.weight)
        self.model = layered(nn.Sequential(line))
        self.settings = LocalSettings(steps, 1, learning_rate, SGD(momentum))
        self.price = FlatPrice(self.model)
        prototype = Prototype(self.model.structure, self.model.initial())
        self.state = method.init(Setup({GLOBAL: prototype}, len(centres), self.price))
        self.kept: dict[int, Any] = {}
        self.index = 0

    @property
    def weight(self) -> float:
        """w."""
        return float(self.method.predictor(self.state).tensors[WEIGHT])

    @property
    def site(self) -> Site:
        return Site({GLOBAL: self.model}, Objective(half_square), self.settings)

    def data(self, device: int) -> Examples:
        """One sample, x = √a_i and y = √a_i b_i."""
        root = self.curvatures[device] ** 0.5
        inputs, targets = ([[root]], [[root * self.centres[device]]])
        return Examples(
            torch.tensor(inputs, dtype=torch.float64),
            torch.tensor(targets, dtype=torch.float64),
            np.arange(1),
        )

    def ask(self, device: int) -> tuple[Reply, Any]:
        """What a device answers in this round, and what it would keep."""
        seeds, work = Seeds(0, self.index), self.method.local
        client = Client(device, 1, 1.0, 1, self.settings.epochs)
        task = self.method.assign(self.state, client, Round(self.index, self.price, seeds))
        own = self.kept.get(device)
        if own is None:
            own = work.first(device, lambda purpose: Seeds(0)(purpose, device))

        def rng(purpose: str) -> np.random.Generator:
            return seeds(purpose, device)

        data = self.data(device)
        return train(work, Job(self.site, task, task.offer[0], own, data, rng, device, self.index))

    def play(self, asked: Iterable[int], lost: Iterable[int] = ()) -> float:
        """One round; a device whose reply is lost keeps what it had before."""
        answers = {device: self.ask(device) for device in sorted(asked)}
        counted = {device: answer for device, answer in answers.items() if device not in set(lost)}
        round_ = Round(self.index, self.price, Seeds(0, self.index))
        replies = [reply for reply, _ in counted.values()]
        self.state = aggregate(self.method, self.state, replies, round_, Server(self.site)).state
        self.kept.update({device: own for device, (_, own) in counted.items()})
        self.index += 1
        return self.weight
