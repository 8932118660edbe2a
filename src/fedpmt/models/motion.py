"""A convolutional net for the motion of a phone: windows of signals over time."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def motion_cnn(channels: int = 6, classes: int = 6) -> nn.Sequential:
    """Make a net of three convolutions over time and two linear layers, for windows of 128 steps."""
    modules: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv1d(channels, 32, 9, padding=4),
        act1=nn.ReLU(),
        pool1=nn.MaxPool1d(4),
        conv2=nn.Conv1d(32, 64, 5, padding=2),
        act2=nn.ReLU(),
        pool2=nn.MaxPool1d(4),
        conv3=nn.Conv1d(64, 64, 3, padding=1),
        act3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc=nn.Linear(64 * 8, 100),
        act4=nn.ReLU(),
        out=nn.Linear(100, classes),
    )
    return nn.Sequential(modules)
