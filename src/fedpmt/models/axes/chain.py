"""The channel axes of a chain of plain modules, read off them without running it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from fedpmt.models.structure import Axes, Axis, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        sizes = _sizes(child)
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


def _sizes(child: nn.Module) -> tuple[int, int, int] | None:
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
