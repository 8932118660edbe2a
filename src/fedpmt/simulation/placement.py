"""Where tensors live: the compute device, and the one copy of the data that is moved there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedpmt.training.batches import channels_last, placed, take_rows
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.data.federated import FederatedData
    from fedpmt.types import Examples


def compute_device(name: str) -> torch.device:
    """The device of this name; `auto` takes an accelerator where there is one."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, here in present.items() if here))
    if not present[name]:
        there = ", ".join(kind for kind, here in present.items() if here)
        raise SettingError(f"device = '{name}' is refused: this machine has none (it has: {there})")
    return torch.device(name)


class PlacedData:
    """A federation's data on the compute device: rows are moved once, and a shard is a gather of rows."""

    def __init__(self, data: FederatedData, device: torch.device, *, images_last: bool = False) -> None:
        self._data, self._device, self._images_last = data, device, images_last
        everything = data.training_set()
        self._train = None if everything is None else self._place(everything)
        self.test = self._place(data.test)
        self.public = None if data.public is None else self._place(data.public)
        self.validation = None if data.validation is None else self._place(data.validation)

    def shard(self, device: int) -> Examples:
        """The samples of one device of the fleet."""
        rows = self._data.rows(device)
        if self._train is None or rows is None:
            return self._place(self._data.shard(device))
        return take_rows(self._train, rows)

    def _place(self, examples: Examples) -> Examples:
        examples = placed(examples, self._device)
        if self._images_last and isinstance(examples.inputs, torch.Tensor):
            return replace(examples, inputs=channels_last(examples.inputs))
        return examples
