"""Small things that several tests build on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from fedpmt.devices.fleet import Device
from fedpmt.methods.base import Prototype, Round, Server, Setup, aggregate
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.parts.part import GLOBAL, size
from fedpmt.pricing.cost import Cost, Memory
from fedpmt.pricing.meter import Meter, Plan
from fedpmt.resources import Resources
from fedpmt.seeds import Seeds
from fedpmt.training.local import Job, LocalSettings, Site
from fedpmt.training.loop import train
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.types import Examples

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fedpmt.methods.base import Method, Step
    from fedpmt.parts.part import Part

SMALL = {"devices": 10, "samples": 20, "cohort": 5, "batch": 10, "rounds": 2, "lr": 0.1}
"""Settings of a run that takes a moment."""


def small_net(seed: int = 0) -> nn.Sequential:
    """A convolution, a flatten and two linear layers: every kind of cut, few numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def samples(count: int, shape: tuple[int, ...] = (1, 8, 8), classes: int = 3, seed: int = 0) -> Examples:
    """Random samples as tensors."""
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.normal(size=(count, *shape)).astype(np.float32))
    return Examples(inputs, torch.from_numpy(rng.integers(classes, size=count)), np.arange(count))


def flat_cost(operations: float) -> Cost:
    """A price that is an update and nothing else."""
    return Cost(0, 0, 0, 0, operations, share=1.0, memory=Memory(0, 0, 0, 0), sustained=operations)


def images(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three classes, told apart by which third of the picture is bright."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    inputs = rng.normal(0, 0.3, size=(count, 1, 6, 6)).astype(np.float32)
    for sample, label in enumerate(labels):
        inputs[sample, 0, 2 * label : 2 * label + 2] += 1
    return inputs, labels


FEW: dict[str, Any] = {"devices": 6, "samples": 20, "cohort": 3, "batch": 5, "levels": "1/4,1/2,1"}
"""A fleet for so few images."""


def stored_accuracy(folder: Path, module: nn.Module, test: tuple[np.ndarray, np.ndarray]) -> float:
    """Of the model that a run has stored, loaded into the user's own module."""
    module.load_state_dict(load_file(folder / "model.safetensors"))
    inputs, labels = test
    return float((module.eval()(torch.from_numpy(inputs)).argmax(1).numpy() == labels).mean())


class FlatPrice:
    """A stand-in for a price: operations are the number of trained entries, and a local round is one batch."""

    batch, epochs = 1, 1

    def __init__(self, model: LayeredModel, **others: LayeredModel) -> None:
        self.models = {GLOBAL: model, **others}

    def __call__(self, part: Part) -> Cost:
        shapes = self.models[part.model].structure.shapes
        return flat_cost(
            sum(size(selection, shapes[name]) for name, selection in part.resident().trained.items())
        )

    def round_operations(self, cost: Cost, *, samples: int, epochs: float) -> float:
        return cost.sustained

    # As much of Times as a meter asks for: nothing takes any time.
    @property
    def price(self) -> FlatPrice:
        return self

    def training(self, device: Device, cost: Cost, samples: int, share: float = 1.0) -> float:
        return 0.0

    def transfer(self, device: Device, bytes_down: float, bytes_up: float) -> float:
        return 0.0


STAGES: dict[str, dict[str, Any]] = {
    "prunefl": {"initial_rounds": 1, "interval": 1, "start_factor": 0.0, "sweeps": 1}
}
"""What brings a method to all its stages within a few rounds: PruneFL first prunes on one device alone."""


class Bench:
    """One method on one small model, driven by hand, without clock or records."""

    def __init__(
        self, method: Method[Any, Any], model: nn.Module | LayeredModel | None = None, **local: Any
    ) -> None:
        self.method: Any = method  # each has functions of its own to be asked
        self.model = model if isinstance(model, LayeredModel) else layered(model or small_net())
        others = dict(method.models(self.model, samples(2).inputs, Seeds(0)))
        self.models = {GLOBAL: self.model, **others}
        self.price = FlatPrice(self.model, **others)
        self.public, self.validation = samples(12, seed=100), samples(8, seed=101)
        self.settings = LocalSettings(**{"epochs": 1, "batch": 4, "learning_rate": 0.1, **local})
        prototypes = {name: Prototype(net.structure, net.initial()) for name, net in self.models.items()}
        self.state = method.init(
            Setup(prototypes, 8, self.price, self.public, self.validation, batch=self.settings.batch)
        )

    def round(self, index: int) -> Round:
        return Round(index, self.price, Seeds(0, index), cohort=tuple(range(4)))

    @property
    def server(self) -> Server:
        return Server(self.site, self.public, self.validation)

    def aggregate(self, replies: Iterable[Reply], index: int = 0) -> Step[Any]:
        """What the server makes of these replies; the bench's own state stays as it is."""
        return aggregate(self.method, self.state, replies, self.round(index), self.server)

    @property
    def site(self) -> Site:
        return Site({**self.models, GLOBAL: self.model}, CLASSIFICATION, self.settings, self.public)

    def client(self, device: int, budget: float = float("inf"), count: int = 8) -> Client:
        steps = self.settings.steps(count)
        structures = {name: net.structure for name, net in self.models.items()}

        def extra(part: Part) -> Any:
            return self.method.local.extra(part, self.price, structures[part.model])

        times: Any = self.price
        meter = Meter(times, structures, Device(device, 1, 1.0), count, steps, extra)
        plan = Plan(meter, Resources.limit(operations=budget))
        return Client(device, 1, 1.0, count, steps, plan=plan)

    def task(self, device: int, index: int = 0, budget: float = float("inf"), count: int = 8) -> Task:
        """What a device is asked to do, its parts complete with what the method's work adds to them."""
        client = self.client(device, budget, count)
        task: Task = self.method.assign(self.state, client, self.round(index))
        assert client.plan is not None
        return replace(task, offer=tuple(client.plan.meter.complete(part) for part in task.offer))

    def reply(
        self, device: int, index: int = 0, budget: float = float("inf"), count: int = 8, own: Any = None
    ) -> Reply:
        """What a device answers; `own` is what it kept, else it is its first time."""
        return self.work(device, index, budget, count, own)[0]

    def work(
        self, device: int, index: int = 0, budget: float = float("inf"), count: int = 8, own: Any = None
    ) -> tuple[Reply, Any]:
        """What a device answers, and what it keeps."""
        task, seeds, work = self.task(device, index, budget, count), Seeds(0, index), self.method.local
        if own is None:
            own = work.first(device, lambda purpose: Seeds(0)(purpose, device))

        def rng(purpose: str) -> np.random.Generator:
            return seeds(purpose, device)

        data = samples(count, seed=device)
        return train(work, Job(self.site, task, task.offer[0], own, data, rng, device, index))
