"""What a frozen base, or frozen layers, make of devices' samples, which they keep from round to round."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from fedpmt.models.precision import read_tensors
from fedpmt.models.trees import tensors_in
from fedpmt.parts.part import GLOBAL, WHOLE, frozen_prefix

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays

LIMIT = 2**29
"""Bytes that a process of the simulator holds for all devices; a device that is asked again may find its own gone."""


BASE, PREFIX = "base", "prefix"


class KeptOutputs:
    """Outputs by device, within bounds: those that were used least recently make room, and are computed again.

    They are computed in the same way each time, so the bits never depend on what was held.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit, self._size = limit, 0
        self._held: OrderedDict[tuple[int, str], tuple[str, Arrays]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, device: int, compute: Callable[[], Arrays], digest: str = "", kind: str = BASE) -> Arrays:
        """What is held for a device and was made of weights with this digest, or else is computed now."""
        key = device, kind
        with self._lock:
            made_of, outputs = self._held.get(key, ("", None))
            if outputs is not None and made_of == digest:
                self._held.move_to_end(key)
                return outputs
        outputs = compute()
        size = _bytes(outputs)
        with self._lock:
            if size <= self._limit:
                before = self._held.pop(key, None)
                self._size += size - (0 if before is None else _bytes(before[1]))
                self._held[key] = digest, outputs
                while self._size > self._limit:
                    self._size -= _bytes(self._held.popitem(last=False)[1][1])
        return outputs


def outputs_made_of(model: LayeredModel, part: Part) -> tuple[tuple[str, ...], ...]:
    """The tensors that the outputs of a part's frozen layers are made of, by layer; none where they cannot be kept.

    That is where the model cannot be cut there, or where a device does not have these layers whole and as sent.
    """
    structure = model.structure
    cut = frozen_prefix(structure, part)
    if part.model != GLOBAL or part.kept or cut == 0 or not model.can_cut(cut):
        return ()
    names = read_tensors(model, 0, cut)
    if any(part.sent.get(name) != WHOLE or name in part.trained for name in names):
        return ()
    groups = tuple(layer.tensors for layer in structure.layers[:cut])
    # A weight that layers share belongs to one of them, and is read by all.
    shared = set(names).difference(*groups)
    return (*groups, tuple(sorted(shared))) if shared else groups


def _bytes(outputs: Arrays) -> int:
    return sum(one.untyped_storage().nbytes() for one in tensors_in(outputs))
