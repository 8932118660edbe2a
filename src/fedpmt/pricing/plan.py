"""Which depth each device gets, and with it the limit that every other method must keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedpmt.devices.fleet import Device
from fedpmt.parts.part import GLOBAL
from fedpmt.pricing.matching import largest
from fedpmt.pricing.meter import Meter, Plan, download_bytes, upload_bytes
from fedpmt.resources import ROUNDING, Resources
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.devices.fleet import Fleet
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.pricing.price import Price
    from fedpmt.pricing.times import Times
    from fedpmt.resources import Budget

MOST_KINDS = 1000
"""Fleets of more kinds of devices are not looked at one by one."""

MOST_PLANS = 10_000
"""Plans that are remembered; in a fleet of drawn or measured speeds every device is a kind of its own."""


@dataclass(frozen=True)
class Planner:
    """Assigns FedPMT's depths by level or by deadline."""

    structure: Structure
    depths: tuple[Part, ...]  # Ξ_1 to Ξ_|I|, smallest first
    price: Price
    times: Times
    assign: Literal["level", "deadline"]
    deadline: float  # what depths are fitted to
    budget: Budget | None = None  # what a device may spend; None: the operations of its depth
    structures: Mapping[str, Structure] = field(default_factory=dict)  # of all nets in play
    _plans: dict[tuple[Device, int], Plan] = field(init=False, default_factory=dict)  # by kind of device

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

    def depths_of(self, fleet: Fleet, samples: int) -> np.ndarray:
        """The depth of every device of a fleet, 1 the smallest."""
        if self.assign == "level":
            return fleet.levels
        chosen = np.ones(len(fleet), dtype=np.int64)
        for depth, part in enumerate(self.depths, start=1):
            fits = self.seconds_of(fleet, part, samples) <= self.deadline * (1 + ROUNDING)
            if fleet.memories is not None:
                fits &= self.price(part).memory_bytes <= fleet.memories
            chosen[fits] = depth
        return chosen

    def traffic(self, part: Part) -> tuple[int, int]:
        """Bytes down and up of a part."""
        down = download_bytes(part, self.structure) + part.overhead_bytes
        return down, upload_bytes(part, self.structure)

    def depth(self, device: Device, samples: int) -> Part:
        """The mask of a device: its level's, or the largest that fits its deadline and memory."""
        if self.assign == "level":
            return self.depths[device.level - 1]
        return largest(self.depths, lambda part: self.fits(device, part, samples))

    def fits(self, device: Device, part: Part, samples: int) -> bool:
        """Whether a device can train this part in time and in memory."""
        in_time = self.seconds(device, part, samples) <= self.deadline * (1 + ROUNDING)
        return in_time and self.price(part).memory_bytes <= device.memory

    def meter(self, device: Device, samples: int) -> Meter:
        """What local rounds take on a device."""
        steps = self.times.epochs * -(-samples // self.price.batch)
        return Meter(self.times, self.structures, device, samples, steps)

    def plan(self, device: Device, samples: int) -> Plan:
        """What a device may spend: no more than FedPMT's depth costs there, or than the user allows.

        Found once for each kind of device: its speed, links, memory and number of samples.
        """
        kind = replace(device, id=0, name=""), samples
        if kind not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[kind] = self._plan(device, samples)
        return self._plans[kind]

    def _plan(self, device: Device, samples: int) -> Plan:
        meter, part = self.meter(device, samples), self.depth(device, samples)
        limit = Resources.limit(memory=math.inf if self.assign == "level" else device.memory)
        number = self.depths.index(part) + 1
        if self.budget is None:
            return Plan(meter, limit.but("operations", meter.usage(part).operations), number)
        resource = self.budget.resource
        if self.budget.planned:
            return Plan(meter, limit.but(resource, meter.usage(part).of(resource)), number)
        most = self.budget.most(device.level, meter.usage(self.depths[-1]))
        return Plan(meter, limit.but(resource, most))

    def weakest(self, fleet: Fleet, samples: int) -> Plan:
        """What every device of a fleet can keep to: the smallest share of what the whole model takes."""
        plans = [self.plan(device, samples) for device in _kinds(fleet)]
        resource = "operations" if self.budget is None else self.budget.resource
        weakest = min(
            plans, key=lambda one: one.limit.of(resource) / one.meter.usage(self.depths[-1]).of(resource)
        )
        memory = min(one.limit.memory for one in plans)
        return replace(weakest, limit=weakest.limit.but("memory", memory))


def _kinds(fleet: Fleet) -> list[Device]:
    """One device of each kind; of very many kinds those that are least in something, on each level."""
    if len(fleet.profiles) <= MOST_KINDS:
        return [device for device, _ in fleet.profiles]
    columns = (fleet.speeds, fleet.uplinks, fleet.downlinks, fleet.memories)
    return [
        fleet.device(int(members[np.argmin(column[members])]))
        for members in fleet.members
        for column in columns
        if column is not None and len(members)
    ]


def make_planner(
    structure: Structure,
    depths: tuple[Part, ...],
    price: Price,
    times: Times,
    fleet: Fleet,
    *,
    assign: Literal["level", "deadline"],
    deadline: float | None,
    samples: int,
    budget: Budget | None = None,
    structures: Mapping[str, Structure] | None = None,
) -> Planner:
    """A planner for this fleet. Without a deadline, depths are fitted to the tightest that leaves nobody out."""
    if assign == "level" and len(fleet.level_speeds) != len(depths):
        raise SettingError(
            f"assign = 'level' needs as many depths as levels: there are {len(depths)} depths and "
            f"{len(fleet.level_speeds)} levels (set --depths or --levels, or use --assign deadline)"
        )
    limit = math.inf if deadline is None else deadline
    planner = Planner(
        structure, depths, price, times, assign, limit, budget, structures or {GLOBAL: structure}
    )
    if deadline is None and assign == "deadline":
        return replace(planner, deadline=float(planner.seconds_of(fleet, depths[0], samples).max()))
    return planner
