"""What a device does: the hooks that a method may change. The one loop that calls them is in `loop`. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from fedpmt.training.optimizers import SGD

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.messages import Task
    from fedpmt.training.objective import Objective
    from fedpmt.training.optimizers import Moments, Optimizer, Stepper
    from fedpmt.training.privacy import Privacy
    from fedpmt.types import Arrays, Examples, Payload, Scalar, Tensors

D = TypeVar("D")
Rng = Callable[[str], "np.random.Generator"]
PriceOf = Callable[["Part"], "Cost"]


PLAIN = SGD()


@dataclass(frozen=True)
class LocalSettings:
    """How a device trains, the same for all devices in a round."""

    epochs: int  # E
    batch: int
    learning_rate: float  # η_t
    optimizer: Optimizer = PLAIN
    clip_norm: float | None = None  # the largest norm of a step's gradient
    prefix: Literal["cache", "recompute"] = "cache"
    privacy: Privacy | None = None

    def steps(self, samples: int, limit: int | None = None) -> int:
        """τ: the steps of a local round over this number of samples, at most `limit`."""
        steps = self.epochs * -(-samples // self.batch)
        return steps if limit is None else min(steps, limit)


@dataclass(frozen=True)
class Site:
    """What a device has at hand: the nets' forward passes, the objective and the settings."""

    models: Mapping[str, LayeredModel]
    objective: Objective
    settings: LocalSettings
    public: Examples | None = None  # U: unlabelled, the same for everybody
    fast: bool = False  # whether compiled code may be used

    def forward(self, model: LayeredModel, first: int = 0) -> Callable[[Tensors, Arrays], Tensor]:
        """The model's forward pass from layer `first` on, as it is run here."""
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
    forward: Callable[[Tensors, Arrays], Tensor]
    steps: int = 0  # τ so far
    trained: Mapping[str, Tensor] | None = None  # as it goes back, where compiled code has trained
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
