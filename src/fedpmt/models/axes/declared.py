"""Channel axes that need no run of the model: those that a user declares, and those of a chain of plain modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import nn

from fedpmt.models.axes.finding import first_rows, randomise
from fedpmt.models.axes.fitting import Trial, blame, settle
from fedpmt.models.structure import Axes, Axis, Group
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.types import Arrays


Declared: TypeAlias = Mapping[str, Sequence["str | Axis | None"]]
"""For each tensor that is cut, the group of each of its axes: a name, an `Axis`, or None where it stays whole."""

OUTPUT = "output"
"""The name of the group of classes, which are never cut."""


def declared_axes(module: nn.Module, declared: Declared, example: Arrays | None = None) -> Axes:
    """Check the axes that a user declares, and find what the module must know to run with fewer channels.

    Groups are named freely; one called "output" is the classes. A group has as many channels as the shortest of its
    axes is long; a longer one holds each channel several times in a row, as after a flatten. Tensors that are not
    named stay whole.

    Args:
        module: The model.
        declared: For each tensor to be cut, a group's name for each axis, or None where it stays whole.
        example: A batch of inputs, to try the model with half of the channels; None to believe what is declared.

    Raises:
        SettingError: A name is unknown, sizes don't match, or the model can't be run so.

    Examples:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        >>> hidden = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
        >>> declared_axes(net, hidden).groups["h"].size
        6
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    named = {name: _entries(name, entries, tensors) for name, entries in declared.items()}
    sizes = _sizes(named, tensors)
    axes = {name: (Axis(),) * tensor.dim() for name, tensor in tensors.items()}
    for name, entries in named.items():
        shape = tensors[name].shape
        axes[name] = tuple(_axis(name, entry, shape[at], sizes) for at, entry in enumerate(entries))
    convolved = {entries[0].group for name, entries in axes.items() if len(entries) > 2}
    groups = {
        name: Group(name, size, "output" if name == OUTPUT else "conv" if name in convolved else "linear")
        for name, size in sizes.items()
    }
    found = Axes(groups, axes)
    return found if example is None else _tried(module, found, example)


def _entries(
    name: str, entries: Sequence[str | Axis | None], tensors: Mapping[str, Tensor]
) -> tuple[Axis | None, ...]:
    if name not in tensors:
        raise SettingError.unknown("axes", name, tensors)
    if isinstance(entries, str) or len(entries) != tensors[name].dim():
        raise SettingError(
            f"axes['{name}'] must have one entry for each of its {tensors[name].dim()} axes (got {entries!r})"
        )
    if not tensors[name].requires_grad and name not in _buffers(tensors):
        raise SettingError(f"axes: '{name}' is frozen, so it can't be cut")
    # A repeat of 0 is still to be found out.
    return tuple(Axis(entry, 0) if isinstance(entry, str) else entry for entry in entries)


def _buffers(tensors: Mapping[str, Tensor]) -> set[str]:
    return {name for name, tensor in tensors.items() if not isinstance(tensor, torch.nn.Parameter)}


def _sizes(named: Mapping[str, Sequence[Axis | None]], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, entries in named.items():
        for entry, full in zip(entries, tensors[name].shape, strict=True):
            if entry is not None and entry.group is not None:
                size = full // (max(1, entry.repeat) * entry.tiles)
                sizes[entry.group] = min(size, sizes.get(entry.group, size))
    return sizes


def _axis(name: str, entry: Axis | None, full: int, sizes: Mapping[str, int]) -> Axis:
    if entry is None or entry.group is None:
        return Axis()
    size = sizes[entry.group]
    axis = replace(entry, repeat=entry.repeat or full // (size * entry.tiles))
    if size * axis.repeat * axis.tiles != full:
        raise SettingError(
            f"axes: an axis of '{name}' has {full} positions, which is no multiple of the {size} channels of "
            f"'{entry.group}'"
        )
    return axis


def _tried(module: nn.Module, axes: Axes, example: Arrays) -> Axes:
    """Run the module with half of the channels, and keep what it must know for that."""
    copied = randomise(module)
    kept = {group.name: np.arange((group.size + 1) // 2) for group in axes.groups.values() if group.hidden}
    state = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
    tensors = {
        name: _cut(state[name], entries, kept, axes)
        for name, entries in axes.tensors.items()
        if any(axis.group in kept for axis in entries)
    }

    def groups(path: str) -> list[str]:
        inside = (
            entries for name, entries in axes.tensors.items() if name.startswith(f"{path}." if path else "")
        )
        return list(dict.fromkeys(axis.group for entries in inside for axis in entries if axis.group in kept))

    trial = Trial(copied, first_rows(example), axes, tensors, groups)
    fits, stop = settle(trial, ())
    if stop is not None:
        raise SettingError(f"axes: {blame(trial, stop)[1]} as declared")
    return replace(axes, fits=fits)


def _cut(tensor: Tensor, entries: Sequence[Axis], kept: Mapping[str, np.ndarray], axes: Axes) -> Tensor:
    found = tensor.detach()
    for place, axis in enumerate(entries):
        if axis.group is not None and axis.group in kept:
            positions = axis.positions(kept[axis.group], axes.groups[axis.group].size)
            found = found.index_select(place, torch.from_numpy(positions).to(tensor.device))
    return found


# What works on each channel alone, or makes each channel a run of inputs.
CHANNELWISE = (
    *(
        nn.ReLU,
        nn.LeakyReLU,
        nn.ELU,
        nn.GELU,
        nn.SiLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.Dropout,
        nn.Identity,
        nn.Flatten,
    ),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def chain_axes(module: nn.Module, paths: Sequence[str]) -> Axes | None:
    """Follow the channels through modules that run in a row; None where one of them must be run to know more.

    A convolution or a linear layer opens a group of its own, BatchNorm goes with the group before it.
    """
    if _is_frozen_or_tied(module):
        return None
    groups: dict[str, Group] = {}
    tensors: dict[str, tuple[Axis, ...]] = {}
    current: Group | None = None
    for path in paths:
        child = module.get_submodule(path)
        if isinstance(child, CHANNELWISE):
            continue
        if f"{path}.weight" in tensors:
            return None  # it runs twice
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            if current is None:
                return None
            names = ("weight", "bias", "running_mean", "running_var")
            # After a flatten each channel is normalised at every position.
            axis = Axis(current.name, child.num_features // current.size)
            tensors |= {f"{path}.{name}": (axis,) for name in names}
            continue
        sizes = _sizes_of(child)
        if sizes is None or (current is not None and sizes[0] % current.size):
            return None
        before, after, kernel = sizes
        entering = Axis() if current is None else Axis(current.name, before // current.size)
        current = groups[path] = Group(path, after, "conv" if kernel else "linear")
        tensors[f"{path}.weight"] = (Axis(path), entering, *[Axis()] * kernel)
        if child.bias is not None:
            tensors[f"{path}.bias"] = (Axis(path),)
    if current is None:
        return None
    groups[current.name] = replace(current, kind="output")
    return Axes(groups, tensors)


def _sizes_of(child: nn.Module) -> tuple[int, int, int] | None:
    """Inputs, outputs and axes of the kernel of a weighted module; None if it is of another kind."""
    if type(child) is nn.Linear:
        return child.in_features, child.out_features, 0
    if isinstance(child, CONVOLUTIONS) and type(child) in CONVOLUTIONS and child.groups == 1:
        return child.in_channels, child.out_channels, len(child.kernel_size)
    return None


def _is_frozen_or_tied(module: nn.Module) -> bool:
    """Whether some weights do not go their own way."""
    every = list(module.named_parameters(remove_duplicate=False))
    return len(every) > len(list(module.parameters())) or not all(one.requires_grad for _, one in every)
