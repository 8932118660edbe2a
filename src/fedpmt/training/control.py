"""Local work under control variates: c of the server, c_i of the device (SCAFFOLD)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.training.local import LocalWork, Outcome, Pull, Reach, Rng, Run, Site
from fedpmt.types import MODEL, Examples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part, Shapes
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.messages import Task

CONTROL = "control"
"""What travels beside the weights: c down, Δc_i up, for parameters and not for buffers."""

GRADIENT = "gradient"
Option = Literal["I", "II", "none"]


@dataclass(frozen=True)
class Control:
    """What a device keeps: c_i. A tensor that is not in it is zero."""

    variate: Mapping[str, Tensor]


@dataclass(frozen=True)
class ControlledWork(LocalWork[Control]):
    """SGD along g - c_i + c, and a new c_i after it. Every device trains the whole model."""

    option: Option

    def first(self, device: int, rng: Rng) -> Control:
        return Control({})

    @property
    def fast(self) -> bool:
        return self.option != "I"

    def pulled(self, site: Site, task: Task, part: Part, own: Control | None) -> Pull:
        mine, control = variate(own), task.tensors[CONTROL]
        # c - c_i first: where they are equal it is zero, and the step that of plain SGD to the bit.
        return Pull({name: one - mine[name] if name in mine else one for name, one in control.items()})

    def start(self, site: Site, task: Task, part: Part, own: Control | None, data: Examples, rng: Rng) -> Run:
        run = super().start(site, task, part, own, data, rng)
        if self.option == "I":
            run.memo[GRADIENT] = self.full_gradient(run, rng)
        return run

    def reply(self, run: Run, own: Control | None, data: Examples) -> tuple[Outcome, Control]:
        outcome, kept = super().reply(run, own, data)
        if self.option == "I":
            # Δc_i with c_i⁺ = ∇F_i(x)
            gradient, mine = run.memo[GRADIENT], variate(own)
            change = {name: new - mine[name] if name in mine else new for name, new in gradient.items()}
            return self.with_change(outcome, own, change)
        return outcome, kept or Control({})

    def concluded(
        self, outcome: Outcome, site: Site, task: Task, own: Control | None, steps: int
    ) -> tuple[Outcome, Control]:
        """Δc_i = c_i⁺ - c_i, sent beside the weights, and the new c_i."""
        if self.option == "I":
            return outcome, own or Control({})  # its gradient is in the run: see `reply`
        settings, received, control = site.settings, task.tensors[MODEL], task.tensors[CONTROL]
        distance = effective_steps(steps, settings.momentum) * settings.learning_rate
        if self.option == "none" or distance == 0:
            change = {name: torch.zeros_like(one) for name, one in control.items()}
        else:
            trained = outcome.tensors[MODEL]
            # c_i⁺ = c_i - c + (x - y) / (K η)
            change = {
                name: (received[name] - trained[name]) / distance - one for name, one in control.items()
            }
        return self.with_change(outcome, own, change)

    def with_change(
        self, outcome: Outcome, own: Control | None, change: dict[str, Tensor]
    ) -> tuple[Outcome, Control]:
        """c_i <- c_i + Δc_i, by the very numbers that the server adds to c."""
        mine = variate(own)
        kept = {name: mine[name] + tensor if name in mine else tensor for name, tensor in change.items()}
        return replace(outcome, tensors={**outcome.tensors, CONTROL: change}), Control(kept)

    def full_gradient(self, run: Run, rng: Rng) -> dict[str, Tensor]:
        """∇F_i(x), over all samples, batch by batch."""
        batch, total = run.site.settings.batch, len(run.data)
        # On copies of the buffers: this pass is to leave no trace in running statistics.
        probe = replace(run, fixed={name: tensor.clone() for name, tensor in run.fixed.items()})
        summed = {name: torch.zeros_like(parameter) for name, parameter in run.params.items()}
        for start in range(0, total, batch):
            examples = run.data.take(slice(start, start + batch))
            gradients = torch.autograd.grad(self.loss(probe, examples, rng), list(run.params.values()))
            for own, gradient in zip(summed.values(), gradients, strict=True):
                own.add_(gradient, alpha=len(examples) / total)
        return summed

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        """One more operation per trained parameter and step; c, c_i and c - c_i are held; Option I has a pass more."""
        cost = price(part)
        variates = cost.memory.gradients
        if self.option == "I":
            # Forward, backward, and gradients added up in the place of the update.
            return cost.plus(step=cost.update, once=cost.operations, memory_bytes=4 * variates)
        return cost.plus(step=cost.update, memory_bytes=3 * variates)

    def download_bytes(self, part: Part, structure: Structure) -> int:
        return super().download_bytes(part, structure) + FLOAT_BYTES * structure.size(structure.parameters)

    def upload(self, part: Part, structure: Structure) -> dict[str, Shapes]:
        variates = {name: structure.shapes[name] for name in structure.parameters}
        return {**super().upload(part, structure), CONTROL: variates}

    def bounds(self, task: Task, reach: Reach) -> Mapping[str, float]:
        """Of Δc_i: that of (x - y) / (K η) - c, or of the two gradients that Option I takes from each other."""
        if self.option == "I":
            return {CONTROL: 2 * reach.gradient}
        distance = effective_steps(reach.steps, reach.settings.momentum) * reach.settings.learning_rate
        if self.option == "none" or distance == 0:
            return {CONTROL: 0.0}
        before = math.sqrt(sum(float(one.double().square().sum()) for one in task.tensors[CONTROL].values()))
        return {CONTROL: reach.moved / distance + before}


def variate(own: Control | None) -> Mapping[str, Tensor]:
    """c_i by name; empty before a device's first accepted round."""
    return {} if own is None else own.variate


def effective_steps(steps: int, momentum: float) -> float:
    """How often the K gradients of a local round stand in x - y, all together, in units of η.

    K without momentum. With it each gradient comes back in later steps, and dividing by K alone would take the
    gradient for up to 1 / (1 - m) times what it is.

    >>> effective_steps(3, 0.0), effective_steps(3, 0.5)  # 1 + 1.5 + 1.75
    (3.0, 4.25)
    """
    total, weight = 0.0, 0.0
    for _ in range(steps):
        weight = 1 + momentum * weight
        total += weight
    return total
