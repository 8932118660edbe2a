"""The nets as anyone writes them in PyTorch, for the peers that train PyTorch modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from benchmarks.peers.common import Job

KERNEL, POOL = 5, 2


def build(job: Job, initial: Sequence[np.ndarray]) -> nn.Sequential:
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
    net = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter, array in zip(net.parameters(), initial, strict=True):
            parameter.copy_(torch.from_numpy(array))
    return net


@torch.no_grad()
def accuracy(net: nn.Module, inputs: np.ndarray, labels: np.ndarray, batch: int = 1000) -> float:
    """The share of test samples that a net gets right."""
    net.eval()
    right = 0
    for start in range(0, len(labels), batch):
        outputs: Tensor = net(torch.from_numpy(inputs[start : start + batch]))
        right += int((outputs.argmax(1) == torch.from_numpy(labels[start : start + batch])).sum())
    return right / len(labels)
