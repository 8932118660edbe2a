"""What a method is checked on: a subject, and a bench on which it is driven round by round by hand.

The bench has a small model, samples and prices.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedpmt.devices.fleet import Device
from fedpmt.methods.base import Prototype, Round, Server, Setup, aggregate
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.lora import lora
from fedpmt.parts.part import GLOBAL, size
from fedpmt.pricing.cost import RoundMemory, StepCost
from fedpmt.pricing.meter import Meter, Plan
from fedpmt.resources import Resources
from fedpmt.seeds import Seeds
from fedpmt.simulation.checkpoint import write_value
from fedpmt.training.local import Job, LocalSettings, LocalWork, Site
from fedpmt.training.loop import train
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.training.optimizers import SGD
from fedpmt.types import Examples

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedpmt.methods.base import Method, Step
    from fedpmt.parts.part import Extra, Part
    from fedpmt.types import Tensors


BUDGETS = (200.0, 400.0, float("inf"), float("inf"))
"""Of the devices of a bench: two weak ones and two that can train everything."""

WEAK = 60.0
"""A budget that only pays for a small part of the model."""


@dataclass(frozen=True)
class Subject:
    """The method under test.

    Attributes:
        method: The method as it is checked.
        together: The same method with settings under which several devices reply from the first round on; needed only
            where it does not do that anyway.
        early: The same method with settings under which it goes through all its stages within a few rounds.
        rounds: Rounds after which it must be better than a guess on the embedded data, with no other setting.
        settings: Settings of all runs, e.g. `{"task": "cnn-mnist"}`.
    """

    method: Method[Any, Any]
    together: Method[Any, Any] | None = None
    early: Method[Any, Any] | None = None
    rounds: int = 12
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_stages(self) -> Method[Any, Any]:
        """The method as it is run for a few rounds."""
        return self.method if self.early is None else self.early

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep something between rounds."""
        return type(self.method.local).first is not LocalWork.first


def expect(condition: bool, message: str) -> None:
    """Raise an AssertionError with this message where a condition does not hold; works under `python -O` too."""
    if not condition:
        raise AssertionError(message)


@contextmanager
def scratch() -> Iterator[Path]:
    """Open a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fedpmt-check-") as folder:
        yield Path(folder)


def encode(value: Any) -> bytes:
    """Return all that a checkpoint would keep of a value, to compare two values by their bits."""
    with scratch() as folder:
        write_value(folder / "value", value)
        return (folder / "value").read_bytes()


def expect_close(one: Any, other: Any, where: str = "state") -> None:
    """Expect two values to be equal within rounding, in all their parts."""
    expect(type(one) is type(other), f"{where}: {type(one).__name__} is not {type(other).__name__}")
    if one is other:
        return
    if dataclasses.is_dataclass(one):
        for item in dataclasses.fields(one):
            expect_close(getattr(one, item.name), getattr(other, item.name), f"{where}.{item.name}")
    elif isinstance(one, Mapping):
        expect(set(one) == set(other), f"{where} has other keys")
        for key in one:
            expect_close(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        expect(len(one) == len(other), f"{where} has another length")
        for place, pair in enumerate(zip(one, other, strict=True)):
            expect_close(*pair, f"{where}[{place}]")
    elif isinstance(one, torch.Tensor | np.ndarray | float):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")
    else:
        expect(bool(one == other), f"{where}: {one!r} is not {other!r}")


POPULATION = 8
"""Devices of a bench; the first four are the cohort of every round."""


def small_net(seed: int = 0) -> nn.Sequential:
    """Build a convolution, a flatten and two linear layers: every kind of cut, few numbers."""
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


def adapted_net(side: int = 8, classes: int = 3, width: int = 8) -> nn.Module:
    """Build linear layers with LoRA adapters behind a frozen one, for methods that need adapters."""
    torch.manual_seed(0)
    hidden = [module for _ in range(3) for module in (nn.Linear(width, width), nn.ReLU())]
    first, last = nn.Linear(side * side, width), nn.Linear(width, classes)
    net = nn.Sequential(nn.Flatten(), first, nn.ReLU(), *hidden, last)
    for layer in (first, *hidden[::2]):
        # As a pretrained base it passes on what it is given, which torch's own initial weights do not.
        nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))  # type: ignore[arg-type]
    return lora(net, rank=4, targets=["3", "5", "7"])


def adapted_images() -> nn.Module:
    """Build such a net for the embedded images; whole runs take it by its name."""
    return adapted_net(28, 10, width=32)


def samples(count: int, shape: tuple[int, ...] = (1, 8, 8), classes: int = 3, seed: int = 0) -> Examples:
    """Draw random samples, as tensors."""
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.normal(size=(count, *shape)).astype(np.float32))
    return Examples(inputs, torch.from_numpy(rng.integers(classes, size=count)), np.arange(count))


def flat_cost(operations: float) -> StepCost:
    """Make a price that is an update and nothing else."""
    return StepCost(0, 0, 0, 0, operations, share=1.0, memory=RoundMemory(0, 0, 0, 0), sustained=operations)


class FlatPrice:
    """A price whose operations are the number of trained entries; a local round is one batch and takes no time.

    It also has as much of `Times` as a meter asks for.
    """

    batch, epochs = 1, 1

    def __init__(self, model: LayeredModel, **others: LayeredModel) -> None:
        self.models = {GLOBAL: model, **others}

    def __call__(self, part: Part, samples: int | None = None) -> StepCost:
        """Price a part by what it trains."""
        shapes = self.models[part.model].structure.shapes
        trained = part.resident().trained
        return flat_cost(sum(size(selection, shapes[name]) for name, selection in trained.items()))

    @property
    def price(self) -> FlatPrice:
        """Itself."""
        return self

    def round_operations(self, cost: StepCost, *, samples: int, epochs: float) -> float:
        """Return the operations of one batch and of as many epochs."""
        return cost.sustained * epochs

    def training(self, device: Device, cost: StepCost, samples: int, share: float = 1.0) -> float:
        """Return 0."""
        return 0.0

    def transfer(self, device: Device, bytes_down: float, bytes_up: float) -> float:
        """Return 0."""
        return 0.0


class Bench:
    """One method on one small model, driven by hand, without a clock, a fleet or records.

    A device's budget is the number of entries that it can afford to train. `state` is the server's; assign the state
    of the `Step` that `aggregate` returns to go on to the next round.

    Examples:
        >>> from fedpmt.methods.fedavg import FedAvg
        >>> bench = Bench(FedAvg(), learning_rate=0.5)
        >>> step = bench.aggregate([bench.reply(device) for device in range(4)])
        >>> sorted(step.state.tensors)[:2]
        ['0.bias', '0.weight']
    """

    def __init__(
        self, method: Method[Any, Any], model: nn.Module | LayeredModel | None = None, **local: Any
    ) -> None:
        """Set the method up.

        Args:
            method: What is driven.
            model: The global model; a small net by default, with adapters if the method needs some.
            local: Fields of `LocalSettings`; by default one epoch, batches of 4 and a learning rate of 0.1.
        """
        self.method: Any = method  # each has functions of its own to be asked
        if model is None and method.traits.needs_adapters:
            model = layered(adapted_net(), example=samples(2).inputs)
        self.model = model if isinstance(model, LayeredModel) else layered(model or small_net())
        others = dict(method.models(self.model, samples(2).inputs, Seeds(0)))
        self.models = {GLOBAL: self.model, **others}
        self.price = FlatPrice(self.model, **others)
        self.public, self.validation = samples(12, seed=100), samples(8, seed=101)
        self.settings = LocalSettings(**{"epochs": 1, "batch": 4, "learning_rate": 0.1, **local})
        self.server_budget = math.inf
        prototypes = {name: Prototype(net.structure, net.initial()) for name, net in self.models.items()}
        self.state = method.init(
            Setup(prototypes, POPULATION, self.price, self.public, self.validation, batch=self.settings.batch)
        )

    @property
    def tensors(self) -> Tensors:
        """The global model: the state's `tensors` where it has some, else those of the predictor."""
        return model_of(self.method, self.state)

    def round(self, index: int) -> Round:
        """Make what the method may know of a round."""
        optimizer = self.settings.optimizer
        momentum = optimizer.momentum if isinstance(optimizer, SGD) else 0.0
        return Round(index, self.price, Seeds(0, index), tuple(range(4)), momentum)

    @property
    def server(self) -> Server:
        """What the server has at hand."""
        return Server(self.site, self.public, self.validation, self.server_budget)

    @property
    def site(self) -> Site:
        """What a device has at hand."""
        return Site({**self.models, GLOBAL: self.model}, CLASSIFICATION, self.settings, self.public)

    def aggregate(self, replies: Iterable[Reply], index: int = 0) -> Step[Any]:
        """Fold replies into the next state; the bench's own state stays as it is."""
        return aggregate(self.method, self.state, replies, self.round(index), self.server)

    def client(self, device: int, budget: float = math.inf, count: int = 8) -> Client:
        """Make what the method may know of a device with this budget and this number of samples."""
        steps = self.settings.steps(count)
        structures = {name: net.structure for name, net in self.models.items()}

        def extra(part: Part) -> Extra:
            found: Extra = self.method.local.extra(part, self.price, structures[part.model])
            return found

        times: Any = self.price
        meter = Meter(times, structures, Device(device, 1, 1.0), count, steps, extra)
        plan = Plan(meter, Resources.limit(operations=budget))
        return Client(device, 1, 1.0, count, steps, plan=plan)

    def task(self, device: int, index: int = 0, budget: float = math.inf, count: int = 8) -> Task:
        """Assign a device its task, its parts complete with what the method's local work adds to them."""
        client = self.client(device, budget, count)
        task: Task = self.method.assign(self.state, client, self.round(index))
        assert client.plan is not None
        return replace(task, offer=tuple(client.plan.meter.complete(part) for part in task.offer))

    def reply(
        self, device: int, index: int = 0, budget: float = math.inf, count: int = 8, own: Any = None
    ) -> Reply:
        """Return what a device answers; `own` is what it kept, else it is its first time."""
        return self.work(device, index, budget, count, own)[0]

    def work(
        self, device: int, index: int = 0, budget: float = math.inf, count: int = 8, own: Any = None
    ) -> tuple[Reply, Any]:
        """Return what a device answers, and what it keeps."""
        task, work = self.task(device, index, budget, count), self.method.local
        if own is None:
            own = work.first(device, Seeds(0, None, device))
        rng = Seeds(0, index, device)
        data = samples(count, seed=device)
        reply, kept = train(work, Job(self.site, task, task.offer[0], own, data, rng, device, index))
        return replace(reply, steps=self.settings.steps(count, task.steps), chances=task.chances), kept


def model_of(method: Method[Any, Any], state: Any) -> Tensors:
    """Return the global model of a state."""
    tensors: Mapping[str, torch.Tensor] | None = getattr(state, "tensors", None)
    return method.predictor(state).tensors if tensors is None else tensors
