"""What a simulation sees of data: a test set, and a shard for each device when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from fedpmt.types import Examples


@dataclass(frozen=True)
class OwnTest:
    """Samples that devices keep for their own test."""

    examples: Examples
    owners: np.ndarray  # the device of each sample


class FederatedData(ABC):
    """Data spread over a fleet. Only `shard` and `label_counts` cost something, and only for their device."""

    name: str
    classes: int | None  # None: targets are not one class per sample
    devices: int  # |K|
    test: Examples
    public: Examples | None = None  # unlabelled, no device's own; every target is NO_LABEL
    validation: Examples | None = None  # labelled, the server's own
    is_read: bool = False  # whether samples are read from a data set batch by batch, and not held
    own_test: OwnTest | None = None  # None: devices keep none
    names: tuple[str, ...] = ()  # of the devices, where their data has owners with names

    @property
    def input_shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """The shape of one input; a dict of shapes where an input is a dict."""
        if isinstance(self.test.inputs, Mapping):
            return {name: tuple(array.shape[1:]) for name, array in self.test.inputs.items()}
        return tuple(self.test.inputs.shape[1:])

    @abstractmethod
    def samples(self, device: int) -> int:
        """How many samples the device holds, |D_k|."""

    @property
    def sizes(self) -> int | np.ndarray | None:
        """|D_k| of every device; one number where all are equal, None where only a device knows its own."""
        return None

    @abstractmethod
    def shard(self, device: int) -> Examples:
        """The device's samples; `ids` tell samples of the whole training set apart."""

    def training_set(self) -> Examples | None:
        """All samples there are; None where each shard is drawn when it is asked for."""
        return None

    def rows(self, device: int) -> np.ndarray | None:
        """Which rows of `training_set` the device holds; None where there is no such set."""
        return None

    @abstractmethod
    def label_counts(self, device: int) -> np.ndarray | None:
        """Samples per class of the device; None where targets are not one class per sample."""


def count_labels(targets: object, classes: int | None) -> np.ndarray | None:
    """Samples per class; None where targets are not one class per sample."""
    import numpy as np

    if classes is None or not isinstance(targets, np.ndarray) or targets.ndim != 1:
        return None
    return np.bincount(targets[targets >= 0], minlength=classes)
