"""Check what can be seen of a masked reply: everything but its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedpmt.flower.answers import reading
from fedpmt.flower.checks import (
    CLAIMS,
    OPEN_CLAIMS,
    read_claims,
    read_part,
    read_seconds,
    require,
    require_bytes,
    require_header,
    require_keys,
)
from fedpmt.flower.wire import MASKED, npy_bytes
from fedpmt.training.messages import Reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flwr.app import Array, RecordDict

    from fedpmt.flower.secure.fixed_point import Words
    from fedpmt.flower.wire import Order


@dataclass(frozen=True)
class MaskedInspector:
    """Checks and decodes replies under masks."""

    sizes: Sequence[int]  # words in each group of the vector
    hidden: bool  # whether the part, and with it the training time, is the device's own secret

    def read(self, records: RecordDict, order: Order, samples: int) -> tuple[Reply, list[Words]]:
        """Decode the reply to an order: the reply without its tensors, and the masked vector.

        Raises:
            RefusedError: Something in the reply is wrong.
        """
        claims = read_claims(records, order, samples)
        require(not records.metric_records, "it says more than it was asked")
        require_keys("what it says", claims, CLAIMS if self.hidden else (*CLAIMS, *OPEN_CLAIMS))
        part = order.task.offer[-1] if self.hidden else read_part(claims, order)
        seconds = 0.0 if self.hidden else read_seconds(claims)
        names = tuple(str(group) for group in range(len(self.sizes)))
        require_keys("groups", records.array_records, (MASKED,))
        arrays = records.array_records[MASKED]
        require_keys(f"tensors of {MASKED}", arrays, names)
        require_bytes(records, sum(npy_bytes((size,), WORD_BYTES) for size in self.sizes))
        words = [_read_words(arrays[name], name, size) for name, size in zip(names, self.sizes, strict=True)]
        return Reply(order.device, order.round, part, samples, {}, seconds=seconds), words


WORD_BYTES = np.dtype(np.uint32).itemsize


def _read_words(array: Array, name: str, length: int) -> Words:
    label = f"{MASKED} '{name}'"
    require_header(label, array, (length,), torch.uint32)
    with reading(MASKED):
        found: Words = array.numpy()
    require(isinstance(found, np.ndarray), f"{MASKED} is not an array")
    right = found.shape == (length,) and found.dtype == np.uint32
    require(right, f"{label} is not what its header says")
    return found
