"""What the server and a device tell each other. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fedpmt.pricing.meter import UPDATE

__all__ = ["UPDATE", "Chance", "Client", "Reply", "Task"]

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from fedpmt.parts.part import Part
    from fedpmt.pricing.meter import Plan
    from fedpmt.resources import Resources
    from fedpmt.types import Payload, Scalar, Tensors


@dataclass(frozen=True)
class Client:
    """What a method may know of a device. Level, speed and plan are None where only the device knows them."""

    id: int
    level: int | None  # 1 is the slowest
    speed: float | None  # κ_k
    samples: int  # |D_k|
    steps: int  # τ of a whole local round: E ⌈|D_k| / n^x⌉
    label_counts: np.ndarray | None = None
    plan: Plan | None = None

    @property
    def limit(self) -> Resources | None:
        """What the device may spend on a local round."""
        return None if self.plan is None else self.plan.limit

    def usage(self, part: Part, steps: int | None = None) -> Resources:
        """What a local round of this part takes of the device, all `steps` or fewer."""
        if self.plan is None:
            raise ValueError("the server cannot know what a round takes of this device")
        return self.plan.meter.usage(part, steps)

    def fits(self, part: Part, steps: int | None = None) -> bool:
        """Whether the device can afford a part, with all that this method makes of it, in all steps or in fewer."""
        return self.plan is None or self.usage(part, steps) <= self.plan.limit


class Chance(NamedTuple):
    """One of the pairs that a device's task was drawn from."""

    probability: float
    part: Part
    steps: int  # τ


@dataclass(frozen=True)
class Task:
    """What a device is asked to do. All parts on offer are cut from the same sent tensors."""

    offer: tuple[Part, ...]
    tensors: Payload
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    steps: int | None = None  # τ, where less than all epochs are asked for
    accepted_round: int | None = None  # the last round whose state the server took over from this device
    epochs: int | None = None  # E, where this device is asked for another number of them than all are
    chances: tuple[
        Chance, ...
    ] = ()  # all that could have been drawn, where the task was; devices don't hear of it


@dataclass(frozen=True)
class Reply:
    """What a device sends back: differences to what it was sent, never weights.

    The clock stamps `seconds`; the server stamps `steps` and `chances`, from what it asked for.
    """

    device: int
    round: int
    part: Part
    samples: int
    tensors: Payload  # the group UPDATE holds w_k - w of the trained entries; a method adds its own groups
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 0  # τ_k
    chances: tuple[Chance, ...] = ()
    staleness: int = 0  # server steps since the model that it started from; the clock stamps these three, too
    discount: float = 1.0  # what the run's rule makes of the staleness: the update counts times this
    sent: Tensors | None = None  # the weights that it started from, where the server has taken steps since

    @property
    def update(self) -> Tensors:
        """w_k - w of every trained entry."""
        return self.tensors[UPDATE]
