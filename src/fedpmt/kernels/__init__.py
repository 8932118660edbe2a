"""Compiled code behind one seam: what is exported here is all that the rest of the package uses of it.

    train           a device's whole local round
    forward         a model's outputs, for evaluation
    differentiable  a model's forward pass as one node of autograd's graph
    faster          a context in which some of PyTorch's functions are compiled ones
    fold, add_at    the server's sums of replies
    step            the weights after a server step of one reply
    available       whether there is compiled code on this machine
    knows           whether it can run and train a model
    StepRule        what a step of local training does

Nobody needs to know what compiled code can do: a function answers None (or False) where it cannot do what is asked, and
the caller goes on with torch. Names are loaded when they are first used, so that `StepRule` needs no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor

    from fedpmt.kernels.calls import add_at as add_at
    from fedpmt.kernels.calls import available as available
    from fedpmt.kernels.calls import fold as fold
    from fedpmt.kernels.calls import forward as forward
    from fedpmt.kernels.calls import knows as knows
    from fedpmt.kernels.calls import step as step
    from fedpmt.kernels.calls import train as train
    from fedpmt.kernels.graph import differentiable as differentiable
    from fedpmt.kernels.operations import faster as faster

_HOMES = {
    "add_at": "calls",
    "available": "calls",
    "differentiable": "graph",
    "faster": "operations",
    "fold": "calls",
    "forward": "calls",
    "knows": "calls",
    "step": "calls",
    "train": "calls",
}

__all__ = [
    "StepRule",
    "add_at",
    "available",
    "differentiable",
    "faster",
    "fold",
    "forward",
    "knows",
    "step",
    "train",
]


@dataclass(frozen=True)
class StepRule:
    """What a step does with the gradient g(y) of a batch's mean cross-entropy at the weights y.

    With w the weights as received, λ the weight decay and m the momentum:

        d = g(y) + constant + μ (y - w) + λ y
        v <- m v + d,   y <- y - η v              with Nesterov's form   y <- y - η (d + m v)

    The velocity v is zero when a local round begins. Where the forward pass multiplies a tensor by a factor s, g is
    the gradient with respect to the tensor itself, not to s times it.
    """

    learning_rate: float  # η
    momentum: float = 0.0  # m
    nesterov: bool = False
    weight_decay: float = 0.0  # λ
    factors: Mapping[str, float] = field(default_factory=dict)
    """What the forward pass multiplies some tensors by."""
    absent: np.ndarray | None = None
    """Classes that the loss leaves out, as booleans: their logits are set to zero."""
    constant: Mapping[str, Tensor] = field(default_factory=dict)
    """What is added to every gradient, in the shapes that the device works with."""
    strength: float = 0.0
    """μ of a spring to the received weights."""
    draws: np.ndarray | None = None
    """For each step, which of the part's inner parts it trains; their number stands for the part itself. Without draws
    every step trains the part itself."""


if not TYPE_CHECKING:  # else mypy would believe in any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'fedpmt.kernels' has no attribute '{name}'")
        found = getattr(importlib.import_module(f"fedpmt.kernels.{_HOMES[name]}"), name)
        globals()[name] = found  # asked for once
        return found
