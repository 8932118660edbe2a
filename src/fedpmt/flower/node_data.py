"""Data that only a node has: the server tests the model and never sees a training sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.data.base import FederatedData, count_labels
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fedpmt.flower.roster import Roster
    from fedpmt.types import Examples


class NodeData(FederatedData):
    """A test set, and a function that loads the samples of the node it is called on."""

    def __init__(
        self, test: Examples, shard: Callable[[int], Examples], devices: int, classes: int | None
    ) -> None:
        self.name, self.test, self.devices, self.classes = "node", test, devices, classes
        self._load = shard

    def samples(self, device: int) -> int:
        """How many samples the device holds, |D_k|."""
        return len(self.shard(device))

    def shard(self, device: int) -> Examples:
        """The device's samples; only the node itself can ask."""
        return self._load(device)

    def label_counts(self, device: int) -> np.ndarray | None:
        """Samples per class of the device."""
        return count_labels(self.shard(device).targets, self.classes)


class HeardData(FederatedData):
    """What the server knows of the devices' data: what their nodes have told."""

    def __init__(self, data: FederatedData, roster: Roster) -> None:
        self.name, self.test, self.devices, self.classes = data.name, data.test, data.devices, data.classes
        self.public, self.validation = data.public, data.validation
        self._data, self._roster = data, roster

    def samples(self, device: int) -> int:
        """As its node said."""
        return self._roster.of(device).samples

    def label_counts(self, device: int) -> np.ndarray | None:
        """As its node said, where there is one and it was asked."""
        return self._roster.of(device).label_counts if self._roster.knows(device) else None

    def shard(self, device: int) -> Examples:
        """Only where the server has a copy, as with data that it dealt itself."""
        if isinstance(self._data, NodeData):
            raise SettingError("this method needs devices' data on the server, which only the nodes have")
        return self._data.shard(device)
