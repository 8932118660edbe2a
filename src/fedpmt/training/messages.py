"""What the server and a device say to each other, and what each knows of the other. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from fedpmt.parts.part import Part
    from fedpmt.pricing.budget import Budget
    from fedpmt.types import Payload, Scalar


@dataclass(frozen=True)
class Client:
    """What the server knows of a device it asks."""

    id: int  # k
    level: int | None  # None with Option II: the server knows no levels
    speed: float | None  # κ_k
    budget: Budget | None
    samples: int  # |D_k|
    steps: int  # τ of a whole local round: E ⌈|D_k| / n^x⌉
    label_counts: np.ndarray | None = None


@dataclass(frozen=True)
class Capacity:
    """What a device knows of itself when it chooses its part (Option II)."""

    id: int
    speed: float
    budget: Budget
    samples: int


@dataclass(frozen=True)
class Task:
    """What a device is asked to do. All parts on offer are cut from the same sent tensors."""

    offer: tuple[Part, ...]
    tensors: Payload
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    steps: int | None = None  # τ, where less than all epochs are asked for
    accepted_round: int | None = None  # the last round whose state the server took over from this device
    epochs: int | None = None  # E, where this device is asked for another number of them than all are


@dataclass(frozen=True)
class Reply:
    """What a device sends back; `seconds` is stamped by the clock."""

    device: int
    round: int
    part: Part
    samples: int
    tensors: Payload
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
