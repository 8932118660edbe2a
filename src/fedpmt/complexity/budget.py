"""What a device can afford in one round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.complexity.cost import Cost

ROUNDING = 1e-9

Item = TypeVar("Item")


@dataclass(frozen=True)
class Budget:
    """Upper limits; a cost fits when it is within all of them."""

    operations: float = math.inf  # per batch, on average over a local round
    memory_bytes: float = math.inf

    def allows(self, cost: Cost) -> bool:
        """Whether a part of this cost can be trained."""
        return cost.sustained <= self.operations * (1 + ROUNDING) and cost.memory_bytes <= self.memory_bytes


def largest(parts: Sequence[Item], fits: Callable[[Item], bool]) -> Item:
    """The last of the parts, smallest first, that fits; where none does, the smallest.

    >>> largest([1, 2, 3], lambda part: part < 3), largest([1, 2, 3], lambda part: False)
    (2, 1)
    """
    return next((part for part in reversed(parts) if fits(part)), parts[0])
