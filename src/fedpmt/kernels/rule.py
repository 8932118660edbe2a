"""What one step of SGD does, as plain values. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor


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
