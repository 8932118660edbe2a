"""Which depth each device gets, and with it the limit that every other method must keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from fedpmt.devices.fleet import Device
from fedpmt.parts.part import GLOBAL, mask
from fedpmt.pricing.matching import largest
from fedpmt.pricing.meter import Meter, Plan, download_bytes, upload_bytes
from fedpmt.resources import ROUNDING, Resources
from fedpmt.types import SettingError, shown_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fedpmt.devices.fleet import Fleet
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.pricing.meter import Times
    from fedpmt.pricing.price import Price
    from fedpmt.resources import BudgetSetting


Sizes: TypeAlias = "int | np.ndarray"
"""|D_k| of every device of a fleet; one number where all are equal."""

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
    budget: BudgetSetting | None = None  # what a device may spend; None: the operations of its depth
    structures: Mapping[str, Structure] = field(default_factory=dict)  # of all nets in play
    extra: Callable[[Part], Extra] | None = None  # what the method's local work adds to a part's price

    def seconds(self, device: Device, part: Part, samples: int) -> float:
        """T_k of a device that trains this part."""
        down, up = self.traffic(part)
        return self.times.training(device, self.price(part), samples) + self.times.transfer(device, down, up)

    def seconds_of(self, fleet: Fleet, part: Part, samples: Sizes, share: float = 1.0) -> np.ndarray:
        """T_k of every device of a fleet for this part; `share` is the part of their steps that they take."""
        down, up = self.traffic(part)
        unit, cost = Device(0, 1, 1.0), self.price(part)
        reference = _for_each(samples, lambda size: self.times.training(unit, cost, size, share))
        seconds = reference / fleet.speeds
        if fleet.downlinks is not None:
            seconds = seconds + down / fleet.downlinks
        if fleet.uplinks is not None:
            seconds = seconds + up / fleet.uplinks
        return seconds

    def depths_of(self, fleet: Fleet, samples: Sizes) -> np.ndarray:
        """The depth of every device of a fleet, 1 the smallest."""
        if self.assign == "level":
            return fleet.levels
        chosen = np.ones(len(fleet), dtype=np.int64)
        for depth, part in enumerate(self.depths, start=1):
            chosen[self.fits_of(fleet, part, samples)] = depth
        return chosen

    def fits_of(self, fleet: Fleet, part: Part, samples: Sizes) -> np.ndarray:
        """Whether each device of a fleet can train this part in time and in memory."""
        fits: np.ndarray = self.seconds_of(fleet, part, samples) <= self.deadline * (1 + ROUNDING)
        return fits if fleet.memories is None else fits & (self.memory_of(part, samples) <= fleet.memories)

    def memory_of(self, part: Part, samples: Sizes) -> float | np.ndarray:
        """The bytes that every device of a fleet needs to train this part."""
        return _for_each(samples, lambda size: self.price(part, size).memory_bytes)

    def deepest(self, fleet: Fleet, samples: Sizes) -> tuple[Part, float]:
        """Find the deepest part that some device has the memory for, and how long the fastest such device takes."""
        for part in reversed(self.depths):
            seconds = self.seconds_of(fleet, part, samples)
            if fleet.memories is not None:
                seconds = seconds[self.memory_of(part, samples) <= fleet.memories]
            if len(seconds):
                return part, float(seconds.min())
        # Nobody has the memory for anything: as if memory were no matter, the smallest part.
        return self.depths[0], float(self.seconds_of(fleet, self.depths[0], samples).min())

    def tightest_deadline(self, fleet: Fleet, samples: Sizes) -> float:
        """Find the tightest deadline that leaves nobody out and lets the fastest kind of device train everything.

        Devices of one speed then all train the whole model, as with FedAvg. Where they hold unequal numbers of samples,
        it is the fastest device with the usual number that trains everything: one with few samples is not fast.
        """
        slowest = float(self.seconds_of(fleet, self.depths[0], samples).max())
        return max(slowest, self.deepest(fleet, self.price.samples)[1])

    def least_deadline(self, fleet: Fleet, samples: int, share: float = 1.0) -> float | None:
        """Find the smallest deadline that gives every device the time for the smallest part, in a share of its steps.

        None where some device has not the memory for it, so that no deadline keeps everybody in.
        """
        smallest = self.depths[0]
        if fleet.memories is not None and fleet.memories.min() < self.memory_of(smallest, samples):
            return None
        return float(self.seconds_of(fleet, smallest, samples, share).max())

    def explain_refusal(self, fleet: Fleet, samples: int, share: float = 1.0) -> str:
        """Say why no device of a fleet can take part, and what to change."""
        if self.budget is not None and not self.budget.planned:
            return (
                f"budget must allow more {self.budget.resource}: no device can train even the smallest part"
            )
        seconds, memory = [], []
        for level, members in enumerate(fleet.members):
            part = self.depths[level if self.assign == "level" else 0]
            needed = float(self.memory_of(part, samples))
            memory += [needed] if len(members) else []
            able = members if fleet.memories is None else members[fleet.memories[members] >= needed]
            seconds += self.seconds_of(fleet, part, samples, share)[able].tolist()
        if not seconds and fleet.memories is not None:
            most = shown_memory(fleet.memories.max())
            return (
                f"memory_mib must be at least {shown_memory(min(memory))} on some device: no device has the memory for "
                f"the smallest part (the most is {most})"
            )
        return (
            f"deadline must be >= {round_up(min(seconds))}, which the fastest device needs for the smallest part "
            f"(got {self.deadline:g})"
        )

    def uncovered(self, fleet: Fleet, samples: Sizes) -> tuple[str, ...]:
        """Name the layers that no device of a fleet trains in time and in memory."""
        chosen = self.depths_of(fleet, samples)
        names = [layer.name for layer in self.structure.layers]
        for depth, part in reversed(list(enumerate(self.depths, start=1))):
            if (self.fits_of(fleet, part, samples) & (chosen == depth)).any():
                trained = mask(self.structure, part)
                return tuple(name for name, on in zip(names, trained, strict=True) if not on)
        return tuple(names)

    def groups(self, fleet: Fleet, samples: Sizes) -> list[np.ndarray]:
        """Divide a fleet into devices of the same level and depth, slowest level first; those that it fits apart."""
        chosen = self.depths_of(fleet, samples)
        fits = np.zeros(len(fleet), dtype=bool)
        for depth, part in enumerate(self.depths, start=1):
            fits |= (chosen == depth) & self.fits_of(fleet, part, samples)
        kinds = 2 * chosen + fits
        return [
            members[kinds[members] == kind] for members in fleet.members for kind in np.unique(kinds[members])
        ]

    def kinds(self, fleet: Fleet) -> Sequence[tuple[Device, int]]:
        """One device of each kind with how many there are, slowest first.

        Measured speeds may put devices of one kind on two levels; they are told apart where the plan does so.
        """
        leveled = self.assign == "level" or (self.budget is not None and len(self.budget.amounts) > 1)
        if leveled or len(fleet.profiles) > MOST_KINDS:
            return fleet.profiles
        found: dict[Device, tuple[Device, int]] = {}
        for device, count in fleet.profiles:
            kind = replace(device, id=0, level=0)
            first, before = found.get(kind, (device, 0))
            found[kind] = first, before + count
        return list(found.values())

    def untrained(self, layers: Sequence[str], fleet: Fleet, samples: Sizes) -> str:
        """Say that no device trains these layers, and what to change."""
        return (
            f"no device of this fleet trains {list_names(layers)}, so these weights stay as they are at the start; "
            + self._remedy(fleet, samples)
        )

    def _remedy(self, fleet: Fleet, samples: Sizes) -> str:
        whole, (deepest, seconds) = self.depths[-1], self.deepest(fleet, samples)
        if self.budget is not None and not self.budget.planned:
            return "allow more with --budget"
        if deepest is not whole:
            needed = shown_memory(self.price(whole).memory_bytes)
            return f"training all layers takes {needed} of memory, more than any device has"
        if self.assign == "level" and not len(fleet.members[-1]):
            return "no device is on the highest level: change --levels or --devices"
        return f"set --deadline to {round_up(seconds)} or more"

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
        return in_time and self.price(part, samples).memory_bytes <= device.memory

    def meter(self, device: Device, samples: int) -> Meter:
        """What local rounds take on a device."""
        steps = self.times.epochs * -(-samples // self.price.batch)
        return Meter(self.times, self.structures, device, samples, steps, self.extra)

    @cached_property
    def plan(self) -> Callable[[Device, int], Plan]:
        """What a device may spend: no more than FedPMT's depth costs there, or than the user allows.

        Found once for each device and number of samples; devices of one kind share it if they are given without id.
        """
        return lru_cache(MOST_PLANS)(self._plan)

    def _plan(self, device: Device, samples: int) -> Plan:
        # What FedPMT's depth takes is the limit, whatever another method adds to its own parts.
        plain, part = replace(self.meter(device, samples), extra=None), self.depth(device, samples)
        meter = self.meter(device, samples)
        limit = Resources.limit(memory=math.inf if self.assign == "level" else device.memory)
        number = self.depths.index(part) + 1
        if self.budget is None:
            capacity = limit.but("time", self.deadline) if self.assign == "deadline" else None
            return Plan(
                meter, limit.but("operations", plain.usage(part).operations), number, capacity=capacity
            )
        resource = self.budget.resource
        if self.budget.planned:
            most = plain.usage(part).of(resource)
            return Plan(meter, limit.but(resource, most), number, budgeted=True)
        most = self.budget.most(device.level, plain.usage(self.depths[-1]))
        return Plan(meter, limit.but(resource, most), budgeted=True)

    def weakest(self, fleet: Fleet, samples: int) -> Plan:
        """What every device of a fleet can keep to: the smallest share of what the whole model takes."""
        plain = replace(self, extra=None)
        plans = [plain.plan(device, samples) for device in _kinds(fleet)]
        resource = "operations" if self.budget is None else self.budget.resource
        weakest = min(
            plans, key=lambda one: one.limit.of(resource) / one.meter.usage(self.depths[-1]).of(resource)
        )
        memory = min(one.limit.memory for one in plans)
        return replace(weakest, limit=weakest.limit.but("memory", memory))


def _for_each(samples: Sizes, value: Callable[[int], float]) -> float | np.ndarray:
    """A value for each number of samples, found once for equal ones."""
    if not isinstance(samples, np.ndarray):
        return value(samples)
    different, which = np.unique(samples, return_inverse=True)
    return np.array([value(int(size)) for size in different])[which]


def round_up(seconds: float) -> str:
    """Write seconds as a deadline, rounded up so that the number is enough.

    >>> [round_up(value) for value in (24.37, 10, 4.201, 1234.51, 0.025571)]
    ['24.4', '10', '4.21', '1234.6', '0.0256']
    """
    digits = max(1, 2 - math.floor(math.log10(seconds)))
    text = f"{math.ceil(seconds * 10**digits * (1 - ROUNDING)) / 10**digits:.{digits}f}"
    return text.rstrip("0").rstrip(".")


def list_names(names: Sequence[str]) -> str:
    """Names as in a sentence.

    >>> list_names(["fc1", "fc2", "fc3"])
    'fc1, fc2 and fc3'
    """
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _kinds(fleet: Fleet) -> list[Device]:
    """One device of each kind; of very many kinds those that are least in something, on each level."""
    if len(fleet.profiles) <= MOST_KINDS:
        return [device for device, _ in fleet.profiles]
    # Of a device's watts it is what a unit of work takes that counts.
    work = None if fleet.watts is None else fleet.speeds / fleet.watts[:, 0]
    columns = (fleet.speeds, fleet.uplinks, fleet.downlinks, fleet.memories, work)
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
    samples: Sizes,
    budget: BudgetSetting | None = None,
    structures: Mapping[str, Structure] | None = None,
    extra: Callable[[Part], Extra] | None = None,
) -> Planner:
    """Make a planner for this fleet; without a deadline, depths are fitted to `Planner.tightest_deadline`."""
    if assign == "level" and len(fleet.level_speeds) != len(depths):
        raise SettingError(
            f"assign = 'level' needs as many depths as levels: there are {len(depths)} depths and "
            f"{len(fleet.level_speeds)} levels (set --depths or --levels, or use --assign deadline)"
        )
    limit = math.inf if deadline is None else deadline
    nets = structures or {GLOBAL: structure}
    planner = Planner(structure, depths, price, times, assign, limit, budget, nets, extra)
    if deadline is None and assign == "deadline":
        return replace(planner, deadline=planner.tightest_deadline(fleet, samples))
    return planner


Definition = Literal["lemma", "appendix"]


def splitting_constant(
    shares: Sequence[float], definition: Definition = "lemma", cohort: int | None = None
) -> float:
    """ψ = Σ_{i in I} 1 / Σ_{j >= i} p_j, with p_j the share of devices that train depth j, smallest first.

    It is |I| when every device trains the full model, and infinite when nobody does. The appendix
    writes ψ for |I| |S| times as much; `cohort` is its |S|.

    >>> splitting_constant([0, 0, 1.0])
    3.0
    >>> round(splitting_constant([0.5, 0.5]), 3)
    3.0
    >>> splitting_constant([0.5, 0.5], "appendix", cohort=10)
    60.0
    """
    total = 0.0
    for depth in range(len(shares)):
        reach = math.fsum(shares[depth:])
        total += 1 / reach if reach > 0 else math.inf
    if definition == "lemma":
        return total
    if definition != "appendix":
        raise SettingError.unknown("definition", definition, ["lemma", "appendix"])
    if cohort is None:
        raise SettingError(
            "cohort = None is refused: the appendix's ψ holds |S|, so give the devices per round"
        )
    return len(shares) * cohort * total
