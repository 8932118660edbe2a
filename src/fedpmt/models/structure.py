"""A model without its numbers: the ordered layers and the channel axes. Loads no torch.

"Layer l" here is "layer l" of the paper: one weighted operation (or one residual block) with the
stateless operations that follow it. `axes` says, for each tensor, which channel group each of its
axes belongs to; cutting by width needs it, cutting by depth does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

Kind = Literal["linear", "conv", "heads", "output"]
HIDDEN: tuple[Kind, ...] = ("linear", "conv", "heads")
TrainedPrecision: TypeAlias = Literal["fp32", "bf16"]
FrozenPrecision: TypeAlias = Literal["fp32", "bf16", "int8"]

FLOAT_BYTES = 4
"""Of a number, where nothing else is known."""


@dataclass(frozen=True)
class Layer:
    """One layer l of the model."""

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()  # float buffers only: counters neither travel nor are averaged
    optional: bool = False  # whether it gives what it takes another value of: without it the model still runs

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Everything of this layer that travels and is averaged."""
        return self.parameters + self.buffers


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor: the channel group it runs over, each channel `repeat` times in a row.

    A flatten between a convolution and a linear layer is a repeat: channel c owns the inputs
    c * repeat to (c + 1) * repeat - 1. Tiles follow one another: queries, keys and values of all heads in
    one weight are three. An axis that is never cut has no group.
    """

    group: str | None = None
    repeat: int = 1
    tiles: int = 1

    def positions(self, channels: np.ndarray, size: int) -> np.ndarray:
        """Where these channels of a group of this size stand along the axis.

        >>> import numpy as np
        >>> Axis("heads", repeat=2, tiles=2).positions(np.array([0, 2]), size=3).tolist()
        [0, 1, 4, 5, 6, 7, 10, 11]
        """
        import numpy as np

        tile = (channels[:, None] * self.repeat + np.arange(self.repeat)).reshape(-1)
        return (np.arange(self.tiles)[:, None] * size * self.repeat + tile).reshape(-1)


@dataclass(frozen=True)
class Group:
    """Channels that are kept or cut together: units, filters or heads of attention. Classes are never cut."""

    name: str
    size: int
    kind: Kind

    @property
    def hidden(self) -> bool:
        """Whether its channels may be cut."""
        return self.kind in HIDDEN


@dataclass(frozen=True)
class Fit:
    """A number that a module keeps and that must fit the tensors: `times` as many as there are channels in a group."""

    module: str  # its path
    attribute: str  # e.g. num_heads, or groups of a depthwise convolution
    group: str
    times: int = 1
    place: int | None = None  # where in the attribute it stands, if that is a tuple


@dataclass(frozen=True)
class Axes:
    """The channel groups of a model and where each tensor's axes belong."""

    groups: Mapping[str, Group]
    tensors: Mapping[str, tuple[Axis, ...]]
    transposed: tuple[str, ...] = ()  # weights stored as inputs x outputs: embeddings, GPT-2's layers
    fits: tuple[Fit, ...] = ()  # what modules must know to run with fewer channels
    stopped: str = ""  # why nothing can be cut, where that is so

    def leaving(self, weight: str) -> int:
        """The axis of a weight that its outputs run over; its inputs run over the other one of the first two."""
        return 1 if weight in self.transposed else 0

    def counts(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """How many channels each group has in tensors of these shapes."""
        return {
            group: shapes[name][place] // (axis.repeat * axis.tiles)
            for group, (name, place, axis) in self._samples.items()
            if name in shapes
        }

    @cached_property
    def _samples(self) -> dict[str, tuple[str, int, Axis]]:
        """One tensor and axis for each group."""
        return {
            axis.group: (name, place, axis)
            for name, axes in self.tensors.items()
            for place, axis in enumerate(axes)
            if axis.group is not None
        }


@dataclass(frozen=True)
class Structure:
    """The layers L of a model with the shapes of its tensors.

    The layers travel in every round. A device downloads the base once: what is `fixed`, but for integer buffers, which
    the module's own code makes.
    """

    layers: tuple[Layer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    channels: Axes | Callable[[], Axes] | None = None  # the axes, or what finds them once somebody asks
    fixed: tuple[str, ...] = ()  # neither trained nor averaged: what the owner froze, and integer buffers
    base_bytes: int = 0
    item_bytes: Mapping[str, int] = field(default_factory=dict)  # of one number of a tensor; FLOAT_BYTES else

    @cached_property
    def axes(self) -> Axes | None:
        """Which channels go together; None where there was nothing to find it out with."""
        if callable(self.channels):
            # What was found is a part of this value from now on, in a checkpoint, too.
            object.__setattr__(self, "channels", self.channels())
        return cast("Axes | None", self.channels)

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

    def bytes_each(self, name: str) -> int:
        """The bytes of one number of a tensor, or of what a method keeps and sends under its name."""
        return self.item_bytes.get(name, FLOAT_BYTES)

    def nbytes(self, names: Sequence[str]) -> int:
        """How many bytes these tensors take."""
        return sum(self.bytes_each(name) * math.prod(self.shapes[name]) for name in names)

    def require_axes(self, why: str) -> Axes:
        """The axes, or a refusal that says what stops the model from being cut by width."""
        if self.axes is None or self.axes.stopped:
            reason = (
                self.axes.stopped if self.axes else "there is no example batch to follow its channels with"
            )
            raise SettingError(
                f"{why}: this model can't be cut by width: {reason}; say which channels go together (axes=...)"
            )
        return self.axes
