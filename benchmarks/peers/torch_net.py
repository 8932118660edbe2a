"""The nets as PyTorch modules, for the peers that train such modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.peers.modules import MODULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from benchmarks.peers.common import Job

KERNEL, POOL = 5, 2


def build(job: Job, initial: Sequence[np.ndarray]) -> nn.Module:
    """Make the job's net with the weights that everybody begins with."""
    net = MODULES[job.module]() if job.module else chain(job, initial)
    with torch.no_grad():
        for tensor, array in zip(net.state_dict().values(), initial, strict=True):
            tensor.copy_(torch.from_numpy(array))
    return net


def chain(job: Job, initial: Sequence[np.ndarray]) -> nn.Sequential:
    """5x5 convolutions with ReLU and 2x2 max-pool, then fully connected layers; logits come out."""
    shapes = iter(weight.shape for weight in initial[::2])
    layers: list[nn.Module] = []
    for _ in job.filters:
        out, channels, *_ = next(shapes)
        layers += [nn.Conv2d(channels, out, KERNEL), nn.ReLU(), nn.MaxPool2d(POOL)]
    layers.append(nn.Flatten())
    for _ in job.hidden:
        out, features = next(shapes)
        layers += [nn.Linear(features, out), nn.ReLU()]
    out, features = next(shapes)
    layers.append(nn.Linear(features, out))
    return nn.Sequential(*layers)


def logits(net: nn.Module, inputs: Tensor) -> Tensor:
    """Run a net, and take the logits out of an output that holds more than these."""
    outputs = net(inputs)
    found: Tensor = getattr(outputs, "logits", outputs)
    return found


@torch.no_grad()
def accuracy(net: nn.Module, inputs: np.ndarray, labels: np.ndarray, batch: int = 1000) -> float:
    """Find the share of test samples that a net gets right."""
    net.eval()
    right = 0
    for start in range(0, len(labels), batch):
        guess = logits(net, torch.from_numpy(inputs[start : start + batch])).argmax(1)
        right += int((guess == torch.from_numpy(labels[start : start + batch])).sum())
    return right / len(labels)
