"""Local work: the hooks a method may change, and the one local SGD loop that calls them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch

from fedpmt import kernels
from fedpmt.models.layered import PREFIX_BATCH
from fedpmt.parts.depth import frozen_prefix, mask
from fedpmt.parts.part import NOTHING, place, take, travelling_shapes, within
from fedpmt.pricing.budget import Usage
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.training.messages import Capacity, Reply, Task
from fedpmt.types import MODEL, Examples, Scalar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part, Shapes
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.objective import Objective
    from fedpmt.types import Arrays, Payload, Tensors

D = TypeVar("D")
TINY = 1e-6
"""Added to a norm that is divided by."""

Rng = Callable[[str], "np.random.Generator"]


@dataclass(frozen=True)
class LocalSettings:
    """How a device trains, the same for all devices in a round."""

    epochs: int  # E
    batch: int
    learning_rate: float  # η_t
    momentum: float = 0.0
    weight_decay: float = 0.0
    prefix: Literal["cache", "recompute"] = "cache"
    nesterov: bool = False


@dataclass(frozen=True)
class Site:
    """What a device has at hand: the nets' forward passes, the objective and the settings."""

    models: Mapping[str, LayeredModel]
    objective: Objective
    settings: LocalSettings
    public: Examples | None = None  # U: unlabelled, the same for everybody
    fast: bool = False  # whether forward passes may be compiled code's

    def forward(self, model: LayeredModel, first: int = 0) -> Callable[[Tensors, Arrays], Tensor]:
        """The model's forward pass from layer `first` on, as it is run here."""
        if self.fast:
            return kernels.differentiable(model, first)
        return partial(model.suffix, first) if first else model.forward


@dataclass
class Run:
    """One device's local round in progress."""

    site: Site
    task: Task
    part: Part
    params: dict[str, Tensor]  # trained, leaves of the graph
    fixed: dict[str, Tensor]  # frozen tensors, and buffers, which the forward pass updates in trained layers
    data: Examples  # what batches are drawn from: samples, or what the frozen prefix makes of them
    forward: Callable[[Tensors, Arrays], Tensor]
    steps: int = 0  # τ so far
    corner: Mapping[str, tuple[slice, ...]] = field(
        default_factory=dict
    )  # where the next step moves a tensor
    memo: dict[str, Any] = field(default_factory=dict)

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
    """What a device has to say after its local round."""

    tensors: Payload
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pull:
    """What every step adds to the gradient g(y): a constant, and a spring to the weights w received this round."""

    constant: Mapping[str, Tensor] = field(default_factory=dict)
    strength: float = 0.0  # μ
    received: Mapping[str, Tensor] = field(default_factory=dict)  # w, where there is a spring

    def on(self, gradient: Tensor, name: str, parameter: Tensor) -> Tensor:
        """g(y) + constant + μ (y - w), which is exactly g(y) where both are zero."""
        if name in self.constant:
            gradient = gradient + self.constant[name]
        if self.strength:
            gradient = gradient.add(parameter.detach() - self.received[name], alpha=self.strength)
        return gradient


PULL = "pull"


class LocalWork(Generic[D]):
    """What a device does. The same value serves all devices; what differs comes in as arguments.

    The defaults train the Part by SGD and send the trained tensors back.
    """

    measures: tuple[str, ...] = ("train_loss",)
    """The metrics that stand in every reply."""

    @property
    def moves_norms(self) -> bool:
        """Whether BatchNorm uses a batch's statistics, and moves its own; else it uses those it was sent."""
        return True

    def first(self, device: int, rng: Rng) -> D | None:
        """What a device keeps before its first round: nothing."""
        return None

    def choose(
        self,
        offer: tuple[Part, ...],
        device: Capacity,
        price: Callable[[Part], Cost],
        structure: Structure,
    ) -> Part:
        """Option II: the largest part on offer that the device can afford, else the smallest."""
        affordable = [
            part
            for part in offer[: device.budget.depth]
            if device.budget.allows(self.usage(part, price, structure))
        ]
        if affordable:
            return max(affordable, key=lambda part: price(part).operations)
        return min(offer, key=lambda part: price(part).operations)

    @property
    def fast(self) -> bool:
        """Whether this is no more than SGD on the objective, with the factors, absent classes and pull below.

        Where a part has others inside, each step then trains one of them or itself, drawn from `rng("width")`.
        """
        return type(self) is LocalWork

    def factors(self, task: Task, part: Part, structure: Structure) -> Mapping[str, float]:
        """What the forward pass multiplies some tensors by: none."""
        return {}

    def absent(self, part: Part, structure: Structure) -> np.ndarray | None:
        """Which classes the loss leaves out, their logits being set to zero: none."""
        return None

    def pulled(self, site: Site, task: Task, part: Part, own: D | None) -> Pull | None:
        """What is added to every gradient: nothing."""
        return None

    def start(self, site: Site, task: Task, part: Part, own: D | None, data: Examples, rng: Rng) -> Run:
        """Set up the local model and what it is trained on."""
        model = site.models[part.model]
        local = local_tensors(task, part, model.structure)
        model.set_training([bool(on) for on in mask(model.structure, part)], norms=self.moves_norms)
        parameters = {name for name in model.structure.parameters if name in part.trained}
        params = {
            name: local[name].clone().requires_grad_()
            for name in parameters_in_order(model.structure, parameters)
        }
        # The forward pass writes to the buffers of layers in training mode, whether they are sent back or not.
        buffers = set(model.structure.buffers)
        fixed = {
            name: tensor.clone() if name in buffers else tensor
            for name, tensor in local.items()
            if name not in params
        }
        data, forward = self.halves(site, model, part, fixed, data)
        pull = self.pulled(site, task, part, own)
        memo = {} if pull is None else {PULL: pull}
        return Run(site, task, part, params, fixed, data, forward, memo=memo)

    def halves(
        self, site: Site, model: LayeredModel, part: Part, fixed: Tensors, data: Examples
    ) -> tuple[Examples, Callable[[Tensors, Arrays], Tensor]]:
        """What batches are drawn from and how they are run: the frozen prefix is cut off."""
        return split_forward(site, model, part, fixed, data)

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        """The loss of one batch."""
        return run.site.objective.loss(run.forward(run.tensors, batch.inputs), batch.targets)

    def correct(self, run: Run, gradients: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Change the gradients before the step is taken: by the pull, if there is one."""
        pull: Pull | None = run.memo.get(PULL)
        if pull is None:
            return gradients
        return {name: pull.on(gradient, name, run.params[name]) for name, gradient in gradients.items()}

    def step(self, run: Run, gradients: dict[str, Tensor], velocity: dict[str, Tensor]) -> None:
        """Move the parameters: by SGD."""
        sgd_step(run.params, gradients, velocity, run.site.settings, run.corner)

    def reply(self, run: Run, own: D | None, data: Examples) -> tuple[Outcome, D | None]:
        """Send back what was trained, nothing else."""
        tensors = run.tensors
        trained = {
            name: take(tensors[name].detach(), within(selection, run.part.sent[name]))
            for name, selection in run.part.trained.items()
        }
        return self.concluded(Outcome({MODEL: trained}), run.site, run.task, own, run.steps)

    def concluded(
        self, outcome: Outcome, site: Site, task: Task, own: D | None, steps: int
    ) -> tuple[Outcome, D | None]:
        """What is made of the trained tensors after so many steps, sent beside them and kept: nothing."""
        return outcome, own

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        """What this work costs per batch: the price of the part, and what its task takes beside."""
        cost, beside = price(part), part.beside
        if beside is NOTHING:
            return cost
        return cost.plus(step=beside.step, once=beside.once, memory_bytes=beside.memory_bytes)

    def usage(self, part: Part, price: Callable[[Part], Cost], structure: Structure) -> Usage:
        """What a local round with this part takes of a device."""
        down = self.download_bytes(part, structure) + part.overhead_bytes
        return Usage(self.cost(part, price), down, self.upload_bytes(part, structure))

    def download_bytes(self, part: Part, structure: Structure) -> int:
        """How long the task's tensors are; must be what the method really sends."""
        shapes = travelling_shapes(part.sent, structure.shapes)
        return FLOAT_BYTES * sum(math.prod(shape) for shape in shapes.values()) + part.beside.task_bytes

    def upload(self, part: Part, structure: Structure) -> dict[str, Shapes]:
        """What `reply` really sends, as shapes by group and name: it is priced by it, and checked against it."""
        return {MODEL: travelling_shapes(part.trained, structure.shapes), **part.beside.answers}

    def bounds(self, task: Task, reach: Reach) -> Mapping[str, float]:
        """The largest norm of groups that are sent beside the weights and are no weights; a reply is checked by it."""
        return {}

    def upload_bytes(self, part: Part, structure: Structure) -> int:
        """How long the reply's tensors are."""
        return FLOAT_BYTES * sum(
            math.prod(shape) for shapes in self.upload(part, structure).values() for shape in shapes.values()
        )

    def evaluate(self, site: Site, shared: Tensors, own: D | None, data: Examples) -> Tensor:
        """Scores of a device's own model; only split and personal methods have one."""
        raise NotImplementedError


def parameters_in_order(structure: Structure, names: set[str]) -> list[str]:
    """Names in the order of the forward pass, so that gradients are always taken in one order."""
    return [name for name in structure.parameters if name in names]


def local_tensors(task: Task, part: Part, structure: Structure) -> dict[str, Tensor]:
    """The received weights as the device works with them."""
    received = task.tensors[MODEL]
    return {
        name: place(received[name], selection, structure.shapes[name])
        for name, selection in part.sent.items()
    }


def received(task: Task, part: Part, structure: Structure) -> dict[str, Tensor]:
    """What a device was sent of what it trains, in the form in which it goes back."""
    local = local_tensors(task, part, structure)
    return {
        name: take(local[name], within(selection, part.sent[name]))
        for name, selection in part.trained.items()
    }


def split_forward(
    site: Site, model: LayeredModel, part: Part, fixed: Tensors, data: Examples
) -> tuple[Examples, Callable[[Tensors, Arrays], Tensor]]:
    """Cut the forward pass before the first trained layer: no graph exists for what is frozen.

    With `cache` the frozen prefix sees each sample once per round, in large batches; its activations
    cannot change while its weights do not.
    """
    frozen = frozen_prefix(model.structure, part)
    if frozen == 0 or not model.composable:
        # Frozen tensors require no gradient, so autograd builds no graph before the first trained layer.
        return data, site.forward(model)
    suffix = site.forward(model, frozen)
    if site.settings.prefix == "recompute":
        return data, lambda tensors, inputs: suffix(tensors, model.prefix(frozen, tensors, inputs))
    hidden = [
        model.prefix(frozen, fixed, data.take(slice(start, start + PREFIX_BATCH)).inputs)
        for start in range(0, len(data), PREFIX_BATCH)
    ]
    return Examples(torch.cat(hidden), data.targets, data.ids), suffix


def train(
    work: LocalWork[D],
    site: Site,
    task: Task,
    part: Part,
    own: D | None,
    data: Examples,
    rng: Rng,
    *,
    device: int,
    round_index: int,
) -> tuple[Reply, D | None]:
    """The local loop: E epochs of mini-batch SGD on the trained tensors (equation 6 of the paper)."""
    run = work.start(site, task, part, own, data, rng)
    settings = site.settings
    velocity: dict[str, Tensor] = {}
    limit = math.inf if task.steps is None else task.steps
    order = rng("order")
    total_loss = 0.0
    for _ in range(settings.epochs):
        positions = order.permutation(len(data))
        for start in range(0, len(data), settings.batch):
            if run.steps >= limit or not run.params:
                break
            batch = run.data.take(positions[start : start + settings.batch])
            loss = work.loss(run, batch, rng)
            gradients = dict(
                zip(run.params, torch.autograd.grad(loss, list(run.params.values())), strict=True)
            )
            gradients = work.correct(run, gradients, run.steps)
            work.step(run, gradients, velocity)
            run.steps += 1
            total_loss += float(loss.detach())
            # Else the next step's gradients would be made beside these.
            del gradients, loss
    outcome, own = work.reply(run, own, data)
    metrics = {"train_loss": total_loss / max(1, run.steps), **outcome.metrics}
    metrics = {name: value for name, value in metrics.items() if name in work.measures}
    reply = Reply(device, round_index, part, len(data), outcome.tensors, outcome.scalars, metrics)
    return reply, own


def clipped(gradients: dict[str, Tensor], limit: float | None) -> dict[str, Tensor]:
    """The gradients scaled down to this norm, all together, where they are longer."""
    if limit is None:
        return gradients
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
    share = torch.clamp(limit / (norm + TINY), max=1.0)
    return {name: gradient * share for name, gradient in gradients.items()}


@torch.no_grad()
def sgd_step(
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    velocity: dict[str, Tensor],
    settings: LocalSettings,
    corner: Mapping[str, tuple[slice, ...]] | None = None,
) -> None:
    """One step in place. Only trained tensors are here, so decay and momentum cannot move a frozen one.

    Where a tensor has a corner, nothing outside of it moves either.
    """
    for name, whole in params.items():
        parameter, gradient = whole, gradients[name]
        here = corner[name] if corner else ...
        if corner:
            parameter, gradient = whole[here], gradient[here]
        if settings.weight_decay:
            gradient = gradient.add(parameter, alpha=settings.weight_decay)
        if settings.momentum:
            # v <- m v + g
            if name not in velocity:
                velocity[name] = torch.zeros_like(whole)
            speed = velocity[name][here].mul_(settings.momentum).add_(gradient)
            # Nesterov: w <- w - η (g + m v)
            gradient = gradient.add(speed, alpha=settings.momentum) if settings.nesterov else speed
        # w <- w - η g
        parameter.add_(gradient, alpha=-settings.learning_rate)
