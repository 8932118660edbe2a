"""A convolutional net for the motion of a phone: windows of signals over time."""

from __future__ import annotations

from torch import nn


def motion_cnn(channels: int = 6, classes: int = 6) -> nn.Sequential:
    """Make a net of three convolutions over time and two linear layers, for windows of 128 steps."""
    return nn.Sequential(
        nn.Conv1d(channels, 32, 9, padding=4),
        nn.ReLU(),
        nn.MaxPool1d(4),
        nn.Conv1d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(4),
        nn.Conv1d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8, 100),
        nn.ReLU(),
        nn.Linear(100, classes),
    )
