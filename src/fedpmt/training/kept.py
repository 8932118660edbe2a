"""What a frozen base makes of devices' samples, which they keep from round to round."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from fedpmt.models.trees import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.types import Arrays

LIMIT = 2**29
"""Bytes that a process of the simulator holds for all devices; a device that is asked again may find its own gone."""


class KeptOutputs:
    """Outputs by device, within bounds: those that were used least recently make room, and are computed again.

    They are computed in the same way each time, so the bits never depend on what was held.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit, self._size = limit, 0
        self._held: OrderedDict[int, Arrays] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, device: int, compute: Callable[[], Arrays]) -> Arrays:
        """What is held for a device, or else is computed now."""
        with self._lock:
            if device in self._held:
                self._held.move_to_end(device)
                return self._held[device]
        outputs = compute()
        size = _bytes(outputs)
        with self._lock:
            if size <= self._limit and device not in self._held:
                self._held[device] = outputs
                self._size += size
                while self._size > self._limit:
                    self._size -= _bytes(self._held.popitem(last=False)[1])
        return outputs


def _bytes(outputs: Arrays) -> int:
    return sum(one.untyped_storage().nbytes() for one in tensors_in(outputs))
