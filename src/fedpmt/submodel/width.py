"""Parts by width: some channels of every layer, cut consistently through the model's axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.submodel.part import GLOBAL, WHOLE, Indices, Part, Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fedpmt.models.structure import Axes, Kind, Structure

INDEX_BYTES = 4


def kept_count(size: int, rate: float) -> int:
    """How many of `size` channels a rate keeps: rounded up, at least one.

    >>> kept_count(400, 0.54), kept_count(128, 0.1), kept_count(10, 0.3)
    (216, 13, 3)
    """
    return max(1, math.ceil(round(rate * size, 9)))


def random_channels(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """An exact-count random subset, in order."""
    return np.sort(rng.choice(size, size=count, replace=False))


def first_channels(size: int, count: int) -> np.ndarray:
    """The leading channels; also what to price by, since prices do not depend on which ones are kept."""
    return np.arange(count)


def thinned(
    structure: Structure,
    axes: Axes,
    keep: float,
    kinds: Sequence[Kind],
    pick: Callable[[int, int], np.ndarray] = first_channels,
) -> Part:
    """The sub-model that keeps this share of every hidden group of these kinds; `pick` says which channels."""
    groups = [group for group in axes.groups.values() if group.kind in kinds and group.hidden]
    kept = {group.name: pick(group.size, kept_count(group.size, keep)) for group in groups}
    return narrow(structure, axes, kept, f"keep {keep:.2f}")


def narrow(structure: Structure, axes: Axes, kept: Mapping[str, np.ndarray], label: str) -> Part:
    """The sub-model with only these channels of each named group; other groups stay whole.

    The server draws the channels, so each list travels with the part.
    """
    selections = {name: _selection(axes, name, structure.shapes[name], kept) for name in structure.tensors}
    overhead = INDEX_BYTES * sum(len(channels) for channels in kept.values())
    return Part(GLOBAL, selections, selections, label, overhead)


def _selection(axes: Axes, name: str, shape: tuple[int, ...], kept: Mapping[str, np.ndarray]) -> Selection:
    lists = tuple(
        _expand(kept[axis.group], axis.repeat) if axis.group is not None and axis.group in kept else None
        for axis in axes.tensors[name]
    )
    if all(positions is None or len(positions) == full for positions, full in zip(lists, shape, strict=True)):
        return WHOLE
    return Indices(lists)


def _expand(channels: np.ndarray, repeat: int) -> np.ndarray:
    """Positions of the channels along an axis that holds each of them `repeat` times in a row."""
    return (channels[:, None] * repeat + np.arange(repeat)).reshape(-1)
