"""How a device takes its steps: SGD, Adam, AdamW, or any optimizer of torch's. Values; they load no torch until used.

torch's own optimizers keep their moments in the object and load a compiler when they are first used; here moments are
a value that can be kept from one local round to the next. Tests hold the numbers to those of torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.types import Tensors

Corner = Mapping[str, tuple[slice, ...]]


@dataclass(frozen=True)
class Moments:
    """What an optimizer keeps of each tensor between steps; empty before the first."""

    steps: int = 0
    mean: Mapping[str, Tensor] = field(default_factory=dict)  # m, or the velocity v of SGD
    square: Mapping[str, Tensor] = field(default_factory=dict)  # v of Adam
    largest: Mapping[str, Tensor] = field(default_factory=dict)  # max v, with amsgrad


class Stepper(ABC):
    """An optimizer at work on one device."""

    @abstractmethod
    def step(
        self, params: Mapping[str, Tensor], gradients: Tensors, rate: float, corner: Corner | None = None
    ) -> None:
        """Move the parameters in place; where a tensor has a corner, nothing outside of it moves."""

    def moments(self) -> Moments:
        """What to keep for the next local round."""
        return Moments()


class Optimizer(ABC):
    """How steps are taken. A frozen value; `start` gives the one that takes them."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Numbers held for each trained parameter; memory is priced by it."""

    @abstractmethod
    def start(self, moments: Moments | None = None) -> Stepper:
        """Begin, from a copy of these moments."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """v <- m v + g,  w <- w - η v;  with Nesterov's momentum  w <- w - η (g + m v)."""

    momentum: float = 0.0  # m
    nesterov: bool = False
    weight_decay: float = 0.0  # added to the gradient

    @property
    def held(self) -> int:
        return 1 if self.momentum else 0

    def start(self, moments: Moments | None = None) -> Stepper:
        return _Descent(self)


class _Descent(Stepper):
    """Only trained tensors come here, so decay and momentum cannot move a frozen one."""

    def __init__(self, how: SGD) -> None:
        self._how, self._velocity = how, dict[str, Any]()

    def step(
        self, params: Mapping[str, Tensor], gradients: Tensors, rate: float, corner: Corner | None = None
    ) -> None:
        import torch

        how = self._how
        with torch.no_grad():
            for name, whole in params.items():
                if name not in gradients:
                    continue
                parameter, gradient = whole, gradients[name]
                here = corner[name] if corner else ...
                if corner:
                    parameter, gradient = whole[here], gradient[here]
                if how.weight_decay:
                    gradient = gradient.add(parameter, alpha=how.weight_decay)
                if how.momentum:
                    if name not in self._velocity:
                        self._velocity[name] = torch.zeros_like(whole)
                    # v <- m v + g
                    velocity = self._velocity[name][here].mul_(how.momentum).add_(gradient)
                    gradient = gradient.add(velocity, alpha=how.momentum) if how.nesterov else velocity
                # w <- w - η g
                parameter.add_(gradient, alpha=-rate)


@dataclass(frozen=True)
class Adam(Optimizer):
    """m <- β_1 m + (1 - β_1) g,  v <- β_2 v + (1 - β_2) g²,  w <- w - η m̂ / (√v̂ + ε)."""

    weight_decay: float = 0.0  # added to the gradient; with `decoupled` taken off the weight instead
    betas: tuple[float, float] = (0.9, 0.999)  # β_1, β_2
    epsilon: float = 1e-8  # ε
    amsgrad: bool = False  # divides by the largest v̂ so far
    decoupled: bool = False  # AdamW: w <- (1 - η λ) w before the step

    @property
    def held(self) -> int:
        return 3 if self.amsgrad else 2

    def start(self, moments: Moments | None = None) -> Stepper:
        return _Adaptive(self, moments or Moments())


class _Adaptive(Stepper):
    def __init__(self, how: Adam, moments: Moments) -> None:
        self._how, self._steps = how, moments.steps
        self._mean, self._square, self._largest = (
            {name: tensor.clone() for name, tensor in kept.items()}
            for kept in (moments.mean, moments.square, moments.largest)
        )

    def step(
        self, params: Mapping[str, Tensor], gradients: Tensors, rate: float, corner: Corner | None = None
    ) -> None:
        import torch

        how = self._how
        self._steps += 1
        first, second = (1 - beta**self._steps for beta in how.betas)
        with torch.no_grad():
            for name, whole in params.items():
                if name not in gradients:
                    continue
                if name not in self._mean:
                    self._mean[name], self._square[name] = torch.zeros_like(whole), torch.zeros_like(whole)
                here = corner[name] if corner else ...
                parameter, gradient = (
                    (whole[here], gradients[name][here]) if corner else (whole, gradients[name])
                )
                mean, square = self._mean[name][here], self._square[name][here]
                if how.weight_decay and how.decoupled:
                    parameter.mul_(1 - rate * how.weight_decay)
                elif how.weight_decay:
                    gradient = gradient.add(parameter, alpha=how.weight_decay)
                # m <- β_1 m + (1 - β_1) g,   v <- β_2 v + (1 - β_2) g²
                mean.lerp_(gradient, 1 - how.betas[0])
                square.mul_(how.betas[1]).addcmul_(gradient, gradient, value=1 - how.betas[1])
                if how.amsgrad:
                    if name not in self._largest:
                        self._largest[name] = torch.zeros_like(whole)
                    largest = self._largest[name][here]
                    torch.maximum(largest, square, out=largest)
                    square = largest
                # w <- w - η m̂ / (√v̂ + ε)
                scaled = square.sqrt().div_(math.sqrt(second)).add_(how.epsilon)
                parameter.addcdiv_(mean, scaled, value=-rate / first)

    def moments(self) -> Moments:
        return Moments(self._steps, self._mean, self._square, self._largest)


@dataclass(frozen=True)
class Custom(Optimizer):
    """Any function `params -> torch.optim.Optimizer`; its rate is set to that of the round."""

    make: Callable[[list[Tensor]], Any]
    numbers: int = 2  # held for each trained parameter, for pricing; nobody can ask the function

    @property
    def held(self) -> int:
        return self.numbers

    def start(self, moments: Moments | None = None) -> Stepper:
        return _Foreign(self.make)


class _Foreign(Stepper):
    def __init__(self, make: Callable[[list[Tensor]], Any]) -> None:
        self._make, self._optimizer = make, None

    def step(
        self, params: Mapping[str, Tensor], gradients: Tensors, rate: float, corner: Corner | None = None
    ) -> None:
        if corner:
            raise ValueError("an optimizer of one's own cannot step a part of a tensor")
        if self._optimizer is None:
            self._optimizer = self._make(list(params.values()))
        optimizer: Any = self._optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in params.items():
            parameter.grad = gradients.get(name)
        optimizer.step()
        for parameter in params.values():
            parameter.grad = None


def clip(gradients: dict[str, Tensor], limit: float | None) -> dict[str, Tensor]:
    """Scale gradients down to this norm, all together, where they are longer."""
    import torch

    if limit is None or not gradients:
        return gradients
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
    share = torch.clamp(limit / (norm + TINY), max=1.0)
    return {name: gradient * share for name, gradient in gradients.items()}


TINY = 1e-6
"""Added to a norm that is divided by."""
