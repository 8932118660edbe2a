"""Randomness without global state: one generator per (seed, purpose, round, device)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

NONE = 0xFFFF_FFFF
"""Stands for "no round" or "no device" in a key, apart from every real index."""


def generator(
    seed: int, purpose: str, round_index: int | None = None, device: int | None = None
) -> np.random.Generator:
    """The generator that belongs to this key, the same wherever and whenever it is asked for.

    >>> float(generator(1, "order", 3, 7).random()) == float(generator(1, "order", 3, 7).random())
    True
    >>> float(generator(1, "order", 3, 7).random()) == float(generator(1, "order", 7, 3).random())
    False
    """
    return Seeds(seed, round_index, device)(purpose)


@dataclass(frozen=True)
class Seeds:
    """The generators of one run, of one round of it, or of one device in it."""

    seed: int
    round_index: int | None = None
    device: int | None = None
    turn: int = 0  # which draw of the round; only a clock of events has more than one

    def at(self, round_index: int) -> Seeds:
        """The generators of one round."""
        return Seeds(self.seed, round_index)

    def __call__(self, purpose: str, device: int | None = None) -> np.random.Generator:
        """The generator of this purpose and device."""
        import numpy as np

        indices = self.round_index, self.device if device is None else device
        purpose = f"{purpose} {self.turn}" if self.turn else purpose
        key = (
            self.seed,
            zlib.crc32(purpose.encode()),
            *(NONE if index is None else index for index in indices),
        )
        # Words of 32 bits are what a sequence makes of the key; it takes three times as long to find them itself.
        entropy = np.array(key, dtype=np.uint32) if 0 <= self.seed <= NONE else key
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
