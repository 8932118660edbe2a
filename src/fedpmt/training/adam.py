"""Adam as the step of local work, with moments that can be kept from one call to the next.

torch's own optimizers keep their moments in the object and load a compiler when they are first used; here moments are
a value that goes to disk with the state it belongs to. `tests/training/test_adam.py` holds it to torch's numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedpmt.training.local import D, LocalWork, Outcome, Rng, Run, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples

BETAS, EPSILON = (0.9, 0.999), 1e-8
STEPPER = "adam"


@dataclass(frozen=True)
class Adam:
    """How Adam steps."""

    rate: float  # η
    weight_decay: float = 0.0  # added to the gradient
    amsgrad: bool = False  # divides by the largest v̂ so far


@dataclass(frozen=True)
class Moments:
    """What Adam keeps of each tensor between steps; empty before the first."""

    steps: int = 0
    mean: Mapping[str, Tensor] = field(default_factory=dict)  # m
    square: Mapping[str, Tensor] = field(default_factory=dict)  # v
    largest: Mapping[str, Tensor] = field(default_factory=dict)  # max v, with amsgrad


class Stepper:
    """Adam in progress, from a copy of the moments it is given."""

    def __init__(self, adam: Adam, moments: Moments) -> None:
        self._adam, self._steps = adam, moments.steps
        self._mean, self._square, self._largest = (
            {name: tensor.clone() for name, tensor in kept.items()}
            for kept in (moments.mean, moments.square, moments.largest)
        )

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """One step in place, at `scale` times the rate."""
        self._steps += 1
        first, second = (1 - beta**self._steps for beta in BETAS)
        for name, parameter in params.items():
            gradient = gradients[name]
            if name not in self._mean:
                self._mean[name] = torch.zeros_like(parameter)
                self._square[name] = torch.zeros_like(parameter)
            mean, square = self._mean[name], self._square[name]
            if self._adam.weight_decay:
                gradient = gradient.add(parameter, alpha=self._adam.weight_decay)
            # m <- β_1 m + (1 - β_1) g,   v <- β_2 v + (1 - β_2) g²
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            if self._adam.amsgrad:
                square = torch.maximum(self._largest.get(name, square), square)
                self._largest[name] = square
            # w <- w - η m̂ / (√v̂ + ε)
            scaled = square.sqrt().div_(math.sqrt(second)).add_(EPSILON)
            parameter.addcdiv_(mean, scaled, value=-scale * self._adam.rate / first)

    def moments(self) -> Moments:
        """What to keep."""
        return Moments(self._steps, self._mean, self._square, self._largest)


@dataclass(frozen=True)
class SteppedWork(LocalWork[D]):
    """Local work whose steps are Adam's, or SGD's where there is none. To be told where moments are kept."""

    adam: Adam | None

    def ready(self, run: Run, moments: Moments) -> Run:
        """A run that goes on from these moments."""
        if self.adam is not None:
            run.memo[STEPPER] = Stepper(self.adam, moments)
        return run

    def scale(self, run: Run) -> float:
        """The rate of the next step, in units of the rate: always the same."""
        return 1.0

    def step(self, run: Run, gradients: dict[str, Tensor], velocity: dict[str, Tensor]) -> None:
        if self.adam is None:
            super().step(run, gradients, velocity)
        else:
            run.memo[STEPPER].step(run.params, gradients, self.scale(run))

    def moments(self, run: Run) -> Moments:
        """What there is to keep."""
        return Moments() if self.adam is None else run.memo[STEPPER].moments()


@dataclass(frozen=True)
class AdamWork(SteppedWork[Moments]):
    """Work that keeps the moments and nothing else. To be given a loss."""

    def first(self, device: int, rng: Rng) -> Moments:
        return Moments()

    def start(self, site: Site, task: Task, part: Part, own: Moments | None, data: Examples, rng: Rng) -> Run:
        return self.ready(super().start(site, task, part, own, data, rng), own or Moments())

    def reply(self, run: Run, own: Moments | None, data: Examples) -> tuple[Outcome, Moments]:
        outcome, _ = super().reply(run, own, data)
        return outcome, self.moments(run)
