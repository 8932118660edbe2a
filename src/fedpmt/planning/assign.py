"""Which width each device gets, and with it the budget that every other method must keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedpmt.complexity.budget import ROUNDING, Budget, largest
from fedpmt.complexity.cost import FLOAT_BYTES
from fedpmt.devices.fleet import Device
from fedpmt.submodel.part import size
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.complexity.price import Price
    from fedpmt.devices.fleet import Fleet
    from fedpmt.models.structure import Structure
    from fedpmt.planning.times import Times
    from fedpmt.submodel.part import Part


@dataclass(frozen=True)
class Planner:
    """Assigns FedPMT's widths by level or by deadline."""

    structure: Structure
    widths: tuple[Part, ...]  # Ξ_1 to Ξ_|I|, smallest first
    price: Price
    times: Times
    assign: Literal["level", "deadline"]
    deadline: float  # what widths are fitted to

    def seconds(self, device: Device, part: Part, samples: int) -> float:
        """T_k of a device that trains this part."""
        down, up = self.traffic(part)
        return self.times.training(device, self.price(part), samples) + self.times.transfer(device, down, up)

    def seconds_of(self, fleet: Fleet, part: Part, samples: int) -> np.ndarray:
        """T_k of every device of a fleet for this part."""
        down, up = self.traffic(part)
        reference = self.times.training(Device(0, 1, 1.0), self.price(part), samples)
        seconds = reference / fleet.speeds
        if fleet.downlinks is not None:
            seconds = seconds + down / fleet.downlinks
        if fleet.uplinks is not None:
            seconds = seconds + up / fleet.uplinks
        return seconds

    def widths_of(self, fleet: Fleet, samples: int) -> np.ndarray:
        """The width of every device of a fleet, 1 the smallest."""
        if self.assign == "level":
            return fleet.levels
        chosen = np.ones(len(fleet), dtype=np.int64)
        for width, part in enumerate(self.widths, start=1):
            fits = self.seconds_of(fleet, part, samples) <= self.deadline * (1 + ROUNDING)
            if fleet.memories is not None:
                fits &= self.price(part).memory_bytes <= fleet.memories
            chosen[fits] = width
        return chosen

    def traffic(self, part: Part) -> tuple[int, int]:
        """Bytes down and up of a part."""
        shapes = self.structure.shapes
        down, up = (
            FLOAT_BYTES * sum(size(s, shapes[n]) for n, s in half.items())
            for half in (part.sent, part.trained)
        )
        return down, up

    def width(self, device: Device, samples: int) -> Part:
        """The mask of a device: its level's, or the largest that fits its deadline and memory."""
        if self.assign == "level":
            return self.widths[device.level - 1]
        return largest(self.widths, lambda part: self.fits(device, part, samples))

    def fits(self, device: Device, part: Part, samples: int) -> bool:
        """Whether a device can train this part in time and in memory."""
        in_time = self.seconds(device, part, samples) <= self.deadline * (1 + ROUNDING)
        return in_time and self.price(part).memory_bytes <= device.memory

    def budget(self, device: Device, samples: int) -> Budget:
        """What FedPMT's width costs on this device: no method may cost more there."""
        memory = math.inf if self.assign == "level" else device.memory
        return Budget(self.price(self.width(device, samples)).sustained, memory)

    def weakest(self, fleet: Fleet, samples: int) -> Budget:
        """The budget that every device of a fleet can keep to."""
        width = int(self.widths_of(fleet, samples).min())
        memory = math.inf if self.assign == "level" or fleet.memories is None else float(fleet.memories.min())
        return Budget(self.price(self.widths[width - 1]).sustained, memory)


def make_planner(
    structure: Structure,
    widths: tuple[Part, ...],
    price: Price,
    times: Times,
    fleet: Fleet,
    *,
    assign: Literal["level", "deadline"],
    deadline: float | None,
    samples: int,
) -> Planner:
    """A planner for this fleet. Without a deadline, widths are fitted to the tightest that leaves nobody out."""
    if assign == "level" and len(fleet.level_speeds) != len(widths):
        raise SettingError(
            f"assign = 'level' needs as many widths as levels: there are {len(widths)} widths and "
            f"{len(fleet.level_speeds)} levels (set --widths or --levels, or use --assign deadline)"
        )
    planner = Planner(structure, widths, price, times, assign, math.inf if deadline is None else deadline)
    if deadline is None and assign == "deadline":
        return replace(planner, deadline=float(planner.seconds_of(fleet, widths[0], samples).max()))
    return planner
