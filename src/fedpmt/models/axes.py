"""The channel axes of an `nn.Sequential`, read off its modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fedpmt.models.structure import Axes, Axis, Group, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

ELEMENTWISE = (
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
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def sequential_axes(module: nn.Module, paths: Sequence[str]) -> Axes | None:
    """Follow the channels through a chain of modules; None where one of them mixes channels in its own way."""
    chain = [(path, module.get_submodule(path)) for path in paths]
    if any(not parameter.requires_grad for parameter in module.parameters()):
        return None
    weighted = [path for path, child in chain if isinstance(child, nn.Linear | nn.modules.conv._ConvNd)]
    groups: dict[str, Group] = {}
    tensors: dict[str, tuple[Axis, ...]] = {}
    current = ""
    for path, child in chain:
        if type(child) is nn.Linear:
            inputs, outputs, kernel = child.in_features, child.out_features, 0
        elif isinstance(child, CONVOLUTIONS) and type(child) in CONVOLUTIONS and child.groups == 1:
            inputs, outputs, kernel = child.in_channels, child.out_channels, len(child.kernel_size)
        elif isinstance(child, nn.modules.batchnorm._BatchNorm) and current:
            # After a flatten each channel is normalised at every position: the statistics repeat.
            repeat = child.num_features // groups[current].size
            tensors |= {
                f"{path}.{name}": (Axis(current, repeat),)
                for name in ("weight", "bias", "running_mean", "running_var")
            }
            continue
        elif isinstance(child, ELEMENTWISE):
            continue
        else:
            return None
        if not current:
            current = "input"
            groups[current] = Group(current, inputs, "input")
        source = Axis(current, inputs // groups[current].size)
        kind: Kind = "output" if path == weighted[-1] else ("conv" if kernel else "linear")
        groups[path] = Group(path, outputs, kind)
        tensors[f"{path}.weight"] = (Axis(path), source, *[Axis()] * kernel)
        if child.bias is not None:
            tensors[f"{path}.bias"] = (Axis(path),)
        current = path
    return Axes(groups, tensors)
