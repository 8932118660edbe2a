"""What a device does: the hooks that a method may change. The one loop that calls them is in `loop`. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from fedpmt.settings import parse_schedule
from fedpmt.training.optimizers import SGD, Adam
from fedpmt.training.privacy import Privacy

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import FrozenPrecision, Structure, TrainedPrecision
    from fedpmt.parts.part import Extra, Part
    from fedpmt.pricing.cost import StepCost
    from fedpmt.settings import Settings
    from fedpmt.training.batches import Transform
    from fedpmt.training.kept import KeptOutputs
    from fedpmt.training.messages import Task
    from fedpmt.training.objective import Objective
    from fedpmt.training.optimizers import Moments, Optimizer, Stepper
    from fedpmt.types import Arrays, Examples, Payload, Scalar, Tensors

D = TypeVar("D")
Rng = Callable[[str], "np.random.Generator"]
PriceOf = Callable[["Part"], "StepCost"]


PLAIN = SGD()


@dataclass(frozen=True)
class LocalSettings:
    """How a device trains, the same for all devices in a round."""

    epochs: int  # E
    batch: int
    learning_rate: float  # η_t
    optimizer: Optimizer = PLAIN
    clip_norm: float | None = None  # the largest norm of a step's gradient
    prefix: Literal["cache", "recompute", "streamed"] = "cache"
    privacy: Privacy | None = None
    precision: TrainedPrecision = "fp32"  # in which trained layers compute; their weights stay as they are
    frozen_precision: FrozenPrecision = "fp32"  # of the layers before the first trained one
    transform: Transform | None = None  # of the inputs of each batch
    keeps_base: bool = False  # whether what a frozen base makes of the samples is kept over rounds
    reuses_prefix: bool = False  # whether outputs of frozen layers are kept over rounds, too

    @property
    def lowered(self) -> str | None:
        """The setting by which steps are computed in less than the weights' precision; None where they are not."""
        if self.precision != "fp32":
            return f"precision = '{self.precision}'"
        return None if self.frozen_precision == "fp32" else f"frozen-precision = '{self.frozen_precision}'"

    def steps(self, samples: int, limit: int | None = None) -> int:
        """τ: the steps of a local round over this number of samples, at most `limit`."""
        steps = self.epochs * -(-samples // self.batch)
        return steps if limit is None else min(steps, limit)


def learning_rate(schedule: str, base: float, round_index: int, rounds: int = 1, warmup: int = 0) -> float:
    """η_t for t = round_index + 1.

    >>> [round(learning_rate("inverse:9", 0.1, t), 4) for t in (0, 10)]
    [0.1, 0.05]
    >>> [round(learning_rate("step:2,0.5", 0.1, t), 4) for t in range(5)]
    [0.1, 0.1, 0.05, 0.05, 0.025]
    >>> [round(learning_rate("cosine", 0.1, t, rounds=4), 4) for t in range(4)]
    [0.1, 0.0854, 0.05, 0.0146]
    >>> [round(learning_rate("constant", 0.1, t, warmup=2), 4) for t in range(4)]
    [0.0333, 0.0667, 0.1, 0.1]
    """
    if round_index < warmup:
        # Linear, and never zero: a round at rate zero would be thrown away.
        return base * (round_index + 1) / (warmup + 1)
    name, numbers = parse_schedule(schedule)
    if name == "inverse":
        # Theorem 1: η_t = 2 / (μ ε (t + λ)); given as its value at t = 1.
        return base * (1 + numbers[0]) / (round_index + 1 + numbers[0])
    if name == "step":
        return base * float(numbers[1] ** (round_index // numbers[0]))
    if name == "cosine":
        floor = numbers[0] if numbers else 0.0  # as a share of the base
        part = (round_index - warmup) / max(1, rounds - warmup)
        return base * (floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, part))) / 2)
    return base


def schedule_rate(settings: Settings) -> Callable[[int], float]:
    """The learning rate of each round that settings name."""
    return partial(
        learning_rate, settings.schedule, settings.lr, rounds=settings.rounds, warmup=settings.warmup
    )


def make_optimizer(settings: Settings) -> Optimizer:
    """The optimizer on devices that settings name."""
    if settings.optimizer == "sgd":
        return SGD(settings.momentum, settings.nesterov, settings.weight_decay)
    return Adam(settings.weight_decay, decoupled=settings.optimizer == "adamw")


def local_settings(
    settings: Settings,
    round_index: int = 0,
    optimizer: Optimizer | None = None,
    rate: Callable[[int], float] | None = None,
    transform: Transform | None = None,
) -> LocalSettings:
    """What settings, or a user's own optimizer, rate and transform, say about local training in this round."""
    return LocalSettings(
        settings.epochs,
        settings.batch,
        (rate or schedule_rate(settings))(round_index),
        optimizer or make_optimizer(settings),
        settings.clip_norm,
        "cache" if settings.keeps_prefix else "recompute",
        None if settings.dp_clip is None else Privacy(settings.dp_clip, settings.dp_noise),
        settings.precision,
        settings.frozen_precision,
        transform,
        reuses_prefix=settings.prefix_tolerance is not None,
    )


@dataclass(frozen=True)
class Site:
    """What a device has at hand: the nets' forward passes, the objective and the settings."""

    models: Mapping[str, LayeredModel]
    objective: Objective
    settings: LocalSettings
    public: Examples | None = None  # U: unlabelled, the same for everybody
    fast: bool = False  # whether compiled code may be used
    kept: KeptOutputs | None = None  # what frozen bases made of devices' samples before

    def forward(self, model: LayeredModel, first: int | None = None) -> Callable[[Tensors, Arrays], Any]:
        """The model's forward pass, whole or from layer `first` on, as it is run here."""
        from fedpmt.training.loop import forward_pass

        return forward_pass(self, model, first)


@dataclass(frozen=True)
class Job(Generic[D]):
    """One device's local round, ready to be trained."""

    site: Site
    task: Task
    part: Part
    own: D | None  # what the device kept from its last accepted round
    data: Examples
    rng: Rng  # one generator for each purpose, of this device and round
    device: int = -1  # -1 where the server trains
    round: int = 0

    @property
    def model(self) -> LayeredModel:
        """The net that the part is cut from."""
        return self.site.models[self.part.model]

    def rule(self, **more: Any) -> StepRule | None:
        """A step of this round as compiled code takes it, with `more` that it does; None where it cannot."""
        from fedpmt.kernels import StepRule

        settings = self.site.settings
        if not isinstance(settings.optimizer, SGD) or settings.clip_norm is not None:
            return None
        how = settings.optimizer
        return StepRule(settings.learning_rate, how.momentum, how.nesterov, how.weight_decay, **more)


@dataclass
class Run(Generic[D]):
    """A local round in progress, or finished."""

    job: Job[D]
    part: Part  # what is trained: the job's, and what the device keeps
    params: dict[str, Tensor]  # trained, leaves of the graph
    fixed: dict[str, Tensor]  # frozen tensors, and buffers, which the forward pass updates in trained layers
    data: Examples  # what batches are drawn from: samples, or what the frozen prefix makes of them
    forward: Callable[[Tensors, Arrays], Any]
    steps: int = 0  # τ so far
    trained: Mapping[str, Tensor] | None = None  # as it goes back, where compiled code has trained
    changes: Mapping[str, Tensor] | None = None  # the same less what was received, where that is all it gave
    optimizer: Optimizer | None = None  # in place of the settings'
    moments: Moments | None = None  # where it starts from
    stepper: Stepper | None = None  # the optimizer at work, once steps are taken
    rate: Callable[[int], float] | None = None  # step -> η, in place of the round's
    corner: Mapping[str, tuple[slice, ...]] = field(
        default_factory=dict
    )  # where the next step moves a tensor
    memo: dict[str, Any] = field(default_factory=dict)  # whatever the hooks want to remember

    @property
    def site(self) -> Site:
        """What the device has at hand."""
        return self.job.site

    @property
    def task(self) -> Task:
        """What the device was asked to do."""
        return self.job.task

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the local model."""
        return {**self.fixed, **self.params}


@dataclass(frozen=True)
class Reach:
    """How far a device can have come in its local round, by what the server knows of it."""

    moved: float  # ‖w_k - w‖, at most
    settings: LocalSettings
    steps: int  # τ
    samples: int  # |D_k|
    rounds: int  # so far, with this one

    @property
    def gradient(self) -> float:
        """The norm of one gradient, at most: a single step goes no further than all of them may."""
        rate = self.settings.learning_rate
        return self.moved / rate if rate else math.inf


@dataclass(frozen=True)
class Outcome:
    """What a reply carries in addition to the update."""

    tensors: Payload = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class LocalWork(Generic[D]):
    """What a device does. The same value serves all devices; what differs comes in as arguments.

    The defaults train the part by the run's optimizer and send back what changed. D is what a device keeps between
    rounds.
    """

    frozen_norms: bool = False
    """Whether BatchNorm uses the statistics it was sent; else it uses a batch's own, and moves the stored ones."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def first(self, device: int, rng: Rng) -> D | None:
        """What a device keeps before its first round: nothing."""
        return None

    def start(self, job: Job[D]) -> Run[D]:
        """Set up the local model and what it is trained on."""
        from fedpmt.training.loop import begin

        return begin(job, frozen_norms=self.frozen_norms)

    def loss(self, run: Run[D], batch: Examples) -> Tensor:
        """The loss of one batch."""
        return run.site.objective.loss(run.forward(run.tensors, batch.inputs), batch.targets)

    def correct(self, run: Run[D], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Change the gradients before a step is taken."""
        return gradients

    def reply(self, run: Run[D]) -> tuple[Outcome, D | None]:
        """What goes back in addition to the update, and what the device keeps."""
        return Outcome(), run.job.own

    def compiled(self, job: Job[D]) -> StepRule | None:
        """The same work as one compiled call: what its steps do, or None where only the hooks can say.

        `reply` is asked afterwards as always, of a run that has no forward pass.
        """
        own, plain = type(self), LocalWork
        alike = (own.start, own.loss, own.correct) == (plain.start, plain.loss, plain.correct)
        return job.rule() if alike and not self.frozen_norms else None

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """What this work takes in addition to plain SGD on the part: what the part says of itself."""
        return part.extra

    def bounds(self, task: Task, reach: Reach) -> Mapping[str, float]:
        """The largest norm of groups of a reply other than the update; replies are checked against it."""
        return {}

    def predict(self, site: Site, shared: Tensors, own: D | None, inputs: Arrays) -> Any:
        """What a device's own model gives, in evaluation mode; only split and personal methods have one."""
        raise NotImplementedError
