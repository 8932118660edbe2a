"""Parts by width: some channels of every layer, cut consistently through the model's axes.

A rule says which channels of a group stay: the leading ones, a window that rolls, a random set, the most
important ones, or one piece of a deal without overlap. `narrow` turns the channels of all groups into a Part.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.models.structure import HIDDEN
from fedpmt.parts.part import GLOBAL, WHOLE, Indices, Part, Selection, local_shape, take
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from fedpmt.models.structure import Axes, Group, Kind, Structure

INDEX_BYTES = 4


def kept_count(size: int, rate: float) -> int:
    """How many of `size` channels a rate keeps: rounded up, at least one.

    >>> kept_count(400, 0.54), kept_count(128, 0.1), kept_count(10, 0.3)
    (216, 13, 3)
    """
    return max(1, math.ceil(round(rate * size, 9)))


def first_channels(size: int, count: int) -> np.ndarray:
    """The leading channels; also what to price by, since prices do not depend on which ones are kept."""
    return np.arange(count)


def rolling_channels(size: int, count: int, start: int) -> np.ndarray:
    """The window of `count` channels from `start` on, around the end, in order.

    >>> rolling_channels(5, 3, 4).tolist(), rolling_channels(5, 3, 9).tolist()
    ([0, 1, 4], [0, 1, 4])
    """
    return np.sort((start + np.arange(count)) % size)


def random_channels(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """An exact-count random subset, in order."""
    return np.sort(rng.choice(size, size=count, replace=False))


def important_channels(scores: np.ndarray, count: int) -> np.ndarray:
    """The channels of the highest scores, in order; of equal ones the first.

    >>> important_channels(np.array([1.0, 3.0, 2.0, 3.0]), 2).tolist()
    [1, 3]
    """
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def disjoint_channels(size: int, pieces: int, rng: np.random.Generator) -> list[np.ndarray]:
    """All channels dealt into random pieces, as equal as can be and without overlap, each in the order dealt.

    In that order any first part of a piece is a random draw of it. A piece has at least one channel, so where there
    are more pieces than channels some share one.

    >>> deal = disjoint_channels(7, 3, np.random.default_rng(0))
    >>> [len(piece) for piece in deal], sorted(np.concatenate(deal).tolist())
    ([3, 2, 2], [0, 1, 2, 3, 4, 5, 6])
    """
    order = rng.permutation(size)
    if pieces > size:
        return [order[piece % size : piece % size + 1] for piece in range(pieces)]
    return np.array_split(order, pieces)


def channel_norms(structure: Structure, tensors: Mapping[str, Tensor], group: Group) -> np.ndarray:
    """How much weight comes into each channel of a group: Σ |w| over its filters or rows."""
    axes = structure.require_axes("a channel's norm")
    total = np.zeros(group.size)
    for name in structure.parameters:
        if len(axes.tensors[name]) < 2:
            continue
        place = axes.leaving(name)
        axis = axes.tensors[name][place]
        if axis.group == group.name:
            weight = tensors[name].detach().abs().movedim(place, 0).flatten(1).sum(dim=1).cpu().double()
            total += weight.reshape(axis.tiles, group.size, axis.repeat).sum(dim=(0, 2)).numpy()
    return total


def hidden_groups(axes: Axes, kinds: Sequence[Kind] = HIDDEN) -> list[Group]:
    """The groups that may be cut, of these kinds; inputs and classes are never cut."""
    return [group for group in axes.groups.values() if group.kind in kinds and group.hidden]


def thinned(
    structure: Structure,
    axes: Axes,
    keep: float,
    kinds: Sequence[Kind] = HIDDEN,
    pick: Callable[[int, int], np.ndarray] = first_channels,
    *,
    derivable: bool = False,
) -> Part:
    """The sub-model that keeps this share of every hidden group of these kinds; `pick` says which channels."""
    kept = {
        group.name: pick(group.size, kept_count(group.size, keep)) for group in hidden_groups(axes, kinds)
    }
    return narrow(structure, axes, kept, f"keep {keep:.2f}", derivable=derivable)


def narrow(
    structure: Structure, axes: Axes, kept: Mapping[str, np.ndarray], label: str, *, derivable: bool = False
) -> Part:
    """The sub-model with only these channels of each named group; other groups stay whole.

    Each list travels with the part, unless both sides can derive it, from a rate and the round say. What keeps all
    channels is whole, and needs no list.
    """
    selections = {name: _selection(axes, name, structure.shapes[name], kept) for name in structure.tensors}
    lists = [channels for name, channels in kept.items() if len(channels) < axes.groups[name].size]
    overhead = 0 if derivable else INDEX_BYTES * sum(map(len, lists))
    return Part(GLOBAL, selections, selections, label, overhead)


def of_classes(structure: Structure, part: Part, held: np.ndarray) -> Part:
    """The same part with only these classes' rows of the classifier trained; all rows are still sent."""
    axes = structure.require_axes("training some classes")
    classes = next((group for group in axes.groups.values() if group.kind == "output"), None)
    if classes is None:
        raise SettingError("training some classes needs axes= with a group 'output': the classes")
    if len(held) == classes.size:
        return part
    trained = dict(part.trained)
    for name, selection in part.trained.items():
        if all(axis.group != classes.name for axis in axes.tensors[name]):
            continue
        lists: list[np.ndarray | None] = [None] * len(axes.tensors[name])
        if isinstance(selection, Indices):
            lists = list(selection.axes)
        for place, axis in enumerate(axes.tensors[name]):
            if axis.group == classes.name:
                lists[place] = axis.positions(held, classes.size)
        trained[name] = Indices(tuple(lists))
    return replace(part, trained=trained)


def without_buffers(structure: Structure, part: Part) -> Part:
    """The same part with no BatchNorm statistics among what comes back; they are sent, for their shape."""
    parameters = set(structure.parameters)
    if parameters.issuperset(part.trained):
        return part
    return replace(part, trained={name: kept for name, kept in part.trained.items() if name in parameters})


def corners(structure: Structure, part: Part) -> dict[str, tuple[slice, ...]]:
    """Where the tensors of a part of leading channels stand in those of a wider one."""
    return {
        name: tuple(slice(0, size) for size in local_shape(selection, structure.shapes[name]))
        for name, selection in part.sent.items()
    }


def narrow_start(structure: Structure, tensors: Mapping[str, Tensor], part: Part) -> dict[str, Tensor]:
    """Where a narrower net starts: the first channels of the whole net's start, at the scale that its width asks for.

    Weights are drawn with a deviation of 1 / √(inputs of a unit), so with fewer inputs they must be larger.
    """
    found = {}
    for name, selection in part.sent.items():
        shape = structure.shapes[name]
        cut = take(tensors[name], selection)
        inputs, left = (math.prod(sizes[1:]) for sizes in (shape, local_shape(selection, shape)))
        found[name] = cut if inputs == left else cut * math.sqrt(inputs / left)
    return found


def _selection(axes: Axes, name: str, shape: tuple[int, ...], kept: Mapping[str, np.ndarray]) -> Selection:
    lists = tuple(
        axis.positions(kept[axis.group], axes.groups[axis.group].size)
        if axis.group is not None and axis.group in kept
        else None
        for axis in axes.tensors[name]
    )
    if all(positions is None or len(positions) == full for positions, full in zip(lists, shape, strict=True)):
        return WHOLE
    return Indices(lists)
