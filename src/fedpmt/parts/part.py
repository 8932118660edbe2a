"""What one device gets and trains. Loads no torch until a tensor is cut.

Aggregation reads its coverage from the Part that was trained, so the two can never disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.types import Tensors

GLOBAL = "global"
"""The name of the one prototype that most methods have."""


@dataclass(frozen=True)
class Whole:
    """All of a tensor."""


@dataclass(frozen=True, eq=False)
class Indices:
    """The grid of these positions, one sorted list per axis; None keeps an axis whole."""

    axes: tuple[np.ndarray | None, ...]


@dataclass(frozen=True, eq=False)
class Mask:
    """The entries where a bit is set; they travel as one flat vector."""

    bits: np.ndarray


Selection: TypeAlias = Whole | Indices | Mask
Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"
WHOLE = Whole()


@dataclass(frozen=True)
class Extra:
    """What a local round takes in addition to training its part by plain SGD: more passes, memory, bytes."""

    step: float = 0.0  # operations in every step
    once: float = 0.0  # operations per batch of the device's data and round
    memory_bytes: int = 0  # held during the whole local round
    task_bytes: int = 0  # tensors of the task other than the model's
    answers: Mapping[str, Shapes] = field(default_factory=dict)  # groups of the reply other than the update
    metrics: tuple[str, ...] = ()  # numbers in the reply other than the training loss
    kept_bytes: int = 0  # what the device keeps between rounds


NOTHING = Extra()


@dataclass(frozen=True)
class Part:
    """A part of a model: which tensors are sent to a device, and which of them it trains."""

    model: str  # the prototype it is cut from
    sent: Mapping[str, Selection]
    trained: Mapping[str, Selection]
    label: str  # what a person reads in records and tables
    overhead_bytes: int = 0  # what it takes to tell the other side which part this is
    inner: tuple[Part, ...] = ()  # narrower parts inside this one that are trained with it, smallest first
    reported: Mapping[str, Selection] = field(default_factory=dict)  # entries the reply says more of, e.g. g²
    kept: Mapping[str, Selection] = field(
        default_factory=dict
    )  # the device's own, trained there: never travels
    extra: Extra = NOTHING

    def resident(self) -> Part:
        """As the device works with it: what it keeps it trains as if it had been sent."""
        if not self.kept:
            return self
        return replace(self, sent={**self.sent, **self.kept}, trained={**self.trained, **self.kept}, kept={})


def mask(structure: Structure, part: Part) -> tuple[int, ...]:
    """The vector f_k over the layers: 1 where a layer is trained."""
    return tuple(int(any(name in part.trained for name in layer.tensors)) for layer in structure.layers)


def frozen_prefix(structure: Structure, part: Part) -> int:
    """How many layers stand before the first trained one."""
    trained = mask(structure, part)
    return trained.index(1) if 1 in trained else len(trained)


def left_out(structure: Structure, part: Part) -> tuple[int, ...]:
    """The optional layers of which nothing is sent: the device runs the model without them."""
    return tuple(
        place
        for place, layer in enumerate(structure.layers)
        if layer.optional and not any(name in part.sent or name in part.kept for name in layer.tensors)
    )


def size(selection: Selection, shape: tuple[int, ...]) -> int:
    """How many entries of a tensor of this shape are selected.

    >>> size(Indices((np.array([0, 2]), None)), (4, 3))
    6
    """
    if isinstance(selection, Mask):
        return int(selection.bits.sum())
    return math.prod(local_shape(selection, shape))


def local_shape(selection: Selection, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor as a device works with it; a masked tensor keeps its shape."""
    if isinstance(selection, Indices):
        return tuple(
            full if kept is None else len(kept) for full, kept in zip(shape, selection.axes, strict=True)
        )
    return shape


def travelling_shapes(selections: Mapping[str, Selection], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of selected tensors as they travel; a masked one is a flat vector.

    >>> travelling_shapes({"w": Indices((np.array([0, 2]), None))}, {"w": (4, 3)})
    {'w': (2, 3)}
    """
    return {
        name: (size(selection, shapes[name]),)
        if isinstance(selection, Mask)
        else local_shape(selection, shapes[name])
        for name, selection in selections.items()
    }


def take(tensor: Tensor, selection: Selection) -> Tensor:
    """Cut the selected entries out, as they travel. What is whole is not copied."""
    if isinstance(selection, Whole):
        return tensor
    if isinstance(selection, Mask):
        return tensor[_bits(selection).to(tensor.device)]
    for axis, kept in enumerate(selection.axes):
        if kept is not None:
            tensor = tensor.index_select(axis, _index(kept).to(tensor.device))
    return tensor


def within(selection: Selection, sent: Selection) -> Selection:
    """Where the selected entries stand in the tensor that a device works with.

    >>> inner = within(Indices((np.array([4, 7]), None)), Indices((np.array([1, 4, 7]), np.array([0, 2]))))
    >>> inner.axes[0].tolist(), inner.axes[1]
    ([1, 2], None)
    """
    if selection is sent and not isinstance(selection, Mask):
        return WHOLE
    if not isinstance(selection, Indices) or not isinstance(sent, Indices):
        return selection
    pairs = zip(selection.axes, sent.axes, strict=True)
    return Indices(
        tuple(
            None if own is given else own if own is None or given is None else np.searchsorted(given, own)
            for own, given in pairs
        )
    )


def place(values: Tensor, selection: Selection, shape: tuple[int, ...]) -> Tensor:
    """The tensor a device works with, from what travelled: masked-out entries are zero."""
    if not isinstance(selection, Mask):
        return values
    local = values.new_zeros(shape)
    local[_bits(selection).to(local.device)] = values
    return local


def add_at(target: Tensor, selection: Selection, values: Tensor | float) -> None:
    """Add to the selected entries of a full tensor, in place."""
    if isinstance(selection, Whole):
        target += values
    elif isinstance(selection, Mask):
        target[_bits(selection).to(target.device)] += values
    else:
        target[tuple(index.to(target.device) for index in grid(selection, tuple(target.shape)))] += values


def embedded(cut: Tensors, selections: Mapping[str, Selection], shapes: Shapes) -> dict[str, Tensor]:
    """Tensors in the full shapes: cut ones in their places, zeros everywhere else."""
    full = {}
    for name, values in cut.items():
        full[name] = values.new_zeros(shapes[name])
        add_at(full[name], selections[name], values)
    return full


def grid(selection: Indices, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Index tensors that broadcast to the selected grid."""
    kept = [
        np.arange(full) if axis is None else axis for full, axis in zip(shape, selection.axes, strict=True)
    ]
    return tuple(_index(index) for index in np.ix_(*kept))


def _index(kept: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(kept, dtype=np.int64))


def _bits(selection: Mask) -> Tensor:
    import torch

    return torch.from_numpy(selection.bits)
