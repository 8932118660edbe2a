"""A model without its numbers: the ordered layers and the channel axes. Loads no torch.

"Layer l" here is "layer l" of the paper: one weighted operation (or one residual block) with the
stateless operations that follow it. `axes` says, for each tensor, which channel group each of its
axes belongs to; cutting by width needs it, cutting by depth does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["input", "linear", "conv", "output"]


@dataclass(frozen=True)
class Layer:
    """One layer l of the model."""

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()  # float buffers only: counters neither travel nor are averaged

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Everything of this layer that travels and is averaged."""
        return self.parameters + self.buffers


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor: the channel group it runs over, each channel `repeat` times in a row.

    A flatten between a convolution and a linear layer is a repeat: channel c owns the inputs
    c * repeat to (c + 1) * repeat - 1. An axis that is never cut has no group.
    """

    group: str | None = None
    repeat: int = 1


@dataclass(frozen=True)
class Group:
    """Channels that are kept or cut together. Inputs and classes are never cut."""

    name: str
    size: int
    kind: Kind

    @property
    def hidden(self) -> bool:
        """Whether its channels may be cut."""
        return self.kind in ("linear", "conv")


@dataclass(frozen=True)
class Axes:
    """The channel groups of a model and where each tensor's axes belong."""

    groups: Mapping[str, Group]
    tensors: Mapping[str, tuple[Axis, ...]]


@dataclass(frozen=True)
class Structure:
    """The layers L of a model with the shapes of its tensors.

    The layers travel in every round. A device downloads the base once: what is `fixed`, but for integer buffers, which
    the module's own code makes.
    """

    layers: tuple[Layer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    axes: Axes | None = None
    fixed: tuple[str, ...] = ()  # neither trained nor averaged: what the owner froze, and integer buffers
    base_bytes: int = 0

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """All parameter names, first layer first."""
        return tuple(name for layer in self.layers for name in layer.parameters)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """All buffers, in order of the layers."""
        return tuple(name for layer in self.layers for name in layer.buffers)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that travel, first layer first."""
        return tuple(name for layer in self.layers for name in layer.tensors)

    @cached_property
    def memo(self) -> dict[object, Any]:
        """What is made of this structure again and again, such as its suffixes; by whatever key its maker chooses."""
        return {}

    def size(self, names: Sequence[str]) -> int:
        """How many numbers these tensors hold."""
        return sum(math.prod(self.shapes[name]) for name in names)

    def require_axes(self, why: str) -> Axes:
        """The axes, or a plain refusal where the model does not declare them."""
        if self.axes is None:
            raise SettingError(
                f"{why} needs channel axes, which this model does not declare: it can be cut by depth only"
            )
        return self.axes
