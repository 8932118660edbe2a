"""The paper's nets as modules, with weights drawn from a given generator."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import KERNEL, POOL

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from fedpmt.models.nets import Net


def build(net: Net, rng: np.random.Generator) -> LayeredModel:
    """One of the paper's nets, initialised as PyTorch does: U(-1/√fan_in, 1/√fan_in)."""
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    channels, side = net.input_shape[0], net.input_shape[1]
    for number, filters in enumerate(net.filters, start=1):
        modules[f"conv{number}"] = nn.Conv2d(channels, filters, KERNEL, device="meta")
        # Max-pool and ReLU commute exactly; pooling first leaves a quarter of the ReLU.
        modules[f"pool{number}"] = nn.MaxPool2d(POOL)
        modules[f"relu{number}"] = nn.ReLU()
        channels, side = filters, (side - KERNEL + 1) // POOL
    modules["flatten"] = nn.Flatten()
    features = channels * side * side
    for number, units in enumerate(net.hidden, start=1):
        modules[f"fc{number}"] = nn.Linear(features, units, device="meta")
        modules[f"act{number}"] = nn.ReLU()
        features = units
    modules["out"] = nn.Linear(features, net.classes, device="meta")
    module = nn.Sequential(modules)
    initialise(module, rng)
    return layered(module)


class FlatLinear(nn.Linear):
    """A linear layer on features of any shape: the flatten is part of it, and so behind a tap before it."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__(math.prod(shape), outputs)
        self.shape = tuple(shape)  # of one sample's features

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Flatten, then the linear map."""
        return super().forward(inputs.flatten(1))


def initialise(module: nn.Module, rng: np.random.Generator) -> None:
    """Draw the weights of linear and convolutional layers, first layer first."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.modules.conv._ConvNd):
            bound = 1 / math.sqrt(math.prod(child.weight.shape[1:]))
            for name, parameter in list(child.named_parameters(recurse=False)):
                drawn = rng.uniform(-bound, bound, size=tuple(parameter.shape)).astype("float32")
                # A new one, since the net's own may be on no device yet; `to_empty` would load torch's compiler.
                child.register_parameter(name, nn.Parameter(torch.from_numpy(drawn)))
