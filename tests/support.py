"""Small things that several tests build on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedpmt.testing.bench import Bench, FlatPrice, flat_cost, samples, small_net

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

__all__ = [
    "FEW",
    "KINDS",
    "PRESETS",
    "SMALL",
    "STAGES",
    "Bench",
    "FlatPrice",
    "flat_cost",
    "images",
    "kinds_fast",
    "presets_slow",
    "samples",
    "small_net",
    "stored_accuracy",
]

PRESETS = ("embracingfl", "fedolf", "salf", "fedpart", "cocofl", "fedel", "inclusivefl")
"""Other methods with other values: what is long is checked of these by `make test-slow`."""


KINDS = ("fedavg", "fedpmt", "heterofl", "scaffold", "prunefl", "depthfl")
"""One of each kind: all layers, a suffix, channels, state on devices, masks, a net of its own."""


def presets_slow(names: Iterable[str]) -> list[Any]:
    """Methods as parameters of a test that takes a while."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in PRESETS else []) for name in names]


def kinds_fast(names: Iterable[str]) -> list[Any]:
    """The same where it takes long: all but one of each kind are left to `make test-slow`."""
    return [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow]) for name in names]


SMALL: dict[str, Any] = {"devices": 10, "samples": 20, "cohort": 5, "batch": 10, "rounds": 2, "lr": 0.1}
"""Settings of a run that takes a moment."""


def images(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three classes, told apart by which third of the picture is bright."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    inputs = rng.normal(0, 0.3, size=(count, 1, 6, 6)).astype(np.float32)
    for sample, label in enumerate(labels):
        inputs[sample, 0, 2 * label : 2 * label + 2] += 1
    return inputs, labels


FEW: dict[str, Any] = {"devices": 6, "samples": 20, "cohort": 3, "batch": 5, "levels": "1/4,1/2,1"}
"""A fleet for so few images."""


def stored_accuracy(folder: Path, module: nn.Module, test: tuple[np.ndarray, np.ndarray]) -> float:
    """Of the model that a run has stored, loaded into the user's own module."""
    module.load_state_dict(load_file(folder / "model.safetensors"))
    inputs, labels = test
    return float((module.eval()(torch.from_numpy(inputs)).argmax(1).numpy() == labels).mean())


STAGES: dict[str, dict[str, Any]] = {
    "prunefl": {"initial_rounds": 1, "interval": 1, "start_factor": 0.0, "sweeps": 1}
}
"""What brings a method to all its stages within a few rounds: PruneFL first prunes on one device alone."""
