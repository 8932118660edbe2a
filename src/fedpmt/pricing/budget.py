"""What a device can afford in one round, and what a part takes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fedpmt.resources import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from fedpmt.pricing.cost import Cost
    from fedpmt.resources import Resource

Item = TypeVar("Item")

LIMITS: dict[Resource, str] = {
    "operations": "operations",
    "time": "seconds",
    "bytes": "traffic_bytes",
    "upload": "upload_bytes",
    "memory": "memory_bytes",
}
"""The limit of a budget that stands for each resource."""


@dataclass(frozen=True)
class Usage:
    """What a whole local round takes of a device."""

    cost: Cost
    bytes_down: int = 0  # with what it takes to say which part it is: index lists, masks
    bytes_up: int = 0


@dataclass(frozen=True)
class Pace:
    """How long a device takes for what it does."""

    operation: float = 0.0  # seconds of a whole local round for each operation per batch
    byte_down: float = 0.0
    byte_up: float = 0.0

    def training(self, usage: Usage) -> float:
        """Seconds of local training."""
        return self.operation * usage.cost.sustained

    def transfer(self, usage: Usage) -> float:
        """Seconds on the link."""
        return self.byte_down * usage.bytes_down + self.byte_up * usage.bytes_up


@dataclass(frozen=True)
class Budget:
    """Upper limits; a usage fits when it is within all of them."""

    operations: float = math.inf  # per batch, on average over a local round
    memory_bytes: float = math.inf
    traffic_bytes: float = math.inf  # down and up
    upload_bytes: float = math.inf
    seconds: float = math.inf
    pace: Pace = Pace()  # frozen
    depth: int | None = None  # the FedPMT depth that it was made of, where it was made of one

    def allows(self, usage: Usage) -> bool:
        """Whether a device can afford this."""
        slack = 1 + ROUNDING
        return (
            usage.cost.sustained <= self.operations * slack
            and usage.cost.memory_bytes <= self.memory_bytes * slack
            and usage.bytes_down + usage.bytes_up <= self.traffic_bytes * slack
            and usage.bytes_up <= self.upload_bytes * slack
            and self.pace.training(usage) + self.pace.transfer(usage) <= self.seconds * slack
        )

    def share(self, usage: Usage) -> float:
        """How much of a local round operations and time pay for; fewer steps save no bytes and no memory."""
        slack = 1 + ROUNDING
        by_operations = self.operations * slack / usage.cost.sustained
        training, left = self.pace.training(usage), self.seconds * slack - self.pace.transfer(usage)
        by_time = left / training if training else math.inf
        return max(0.0, min(1.0, by_operations, by_time))

    def spent(self, resource: Resource, usage: Usage) -> float:
        """How much of a resource this takes, in the unit of its limit."""
        return {
            "operations": usage.cost.sustained,
            "time": self.pace.training(usage) + self.pace.transfer(usage),
            "bytes": float(usage.bytes_down + usage.bytes_up),
            "upload": float(usage.bytes_up),
            "memory": float(usage.cost.memory_bytes),
        }[resource]

    def limit(self, resource: Resource) -> float:
        """How much of a resource there is."""
        found: float = getattr(self, LIMITS[resource])
        return found

    def limited(self, resource: Resource, most: float) -> Self:
        """With no more of a resource than this."""
        limits: dict[str, Any] = {LIMITS[resource]: min(most, self.limit(resource))}
        return replace(self, **limits)


def largest(parts: Sequence[Item], fits: Callable[[Item], bool]) -> Item:
    """The last of the parts, smallest first, that fits; where none does, the smallest.

    >>> largest([1, 2, 3], lambda part: part < 3), largest([1, 2, 3], lambda part: False)
    (2, 1)
    """
    return next((part for part in reversed(parts) if fits(part)), parts[0])
