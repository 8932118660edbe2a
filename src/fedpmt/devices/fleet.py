"""The fleet: each device's speed κ_k, its link, its memory, what it draws and how often it can be reached.

Properties are arrays over the fleet, so that a million devices cost a few megabytes and no objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fedpmt.devices.rows import WATTS, read_devices
from fedpmt.devices.tables import table_name
from fedpmt.seeds import NONE, generator
from fedpmt.settings import parse_number
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.settings import Settings

BYTES_PER_MEGABIT = 1e6 / 8
MIB = 2**20
SLOWEST = 1e-12
QUANTILE_LEVELS = 5
"""Fleets with many different speeds are grouped into this many levels of equal size."""


@dataclass(frozen=True)
class Watts:
    """What a device draws."""

    computing: float
    sending: float  # while its link is busy, down or up
    idle: float  # while it waits for a round to end

    def joules(self, training: float, transfer: float, waiting: float = 0.0) -> float:
        """The energy of these seconds.

        >>> Watts(computing=4, sending=1.5, idle=0.5).joules(training=10, transfer=2, waiting=8)
        47.0
        """
        return self.computing * training + self.sending * transfer + self.idle * waiting


@dataclass(frozen=True)
class Device:
    """One device as the clock and the planner see it."""

    id: int
    level: int  # 1 is the slowest
    speed: float  # κ_k
    uplink: float = math.inf  # bytes per second
    downlink: float = math.inf
    memory: float = math.inf  # bytes
    name: str = ""
    watts: Watts | None = None  # None: its energy is not counted


@dataclass(frozen=True, eq=False)
class Fleet:
    """All devices K."""

    speeds: np.ndarray  # κ
    levels: np.ndarray  # 1 is the slowest
    level_speeds: tuple[float, ...]  # a level's speed, slowest first
    uplinks: np.ndarray | None = None
    downlinks: np.ndarray | None = None
    memories: np.ndarray | None = None
    availabilities: np.ndarray | None = None
    names: tuple[str, ...] = ()
    watts: np.ndarray | None = None  # a row for each device: computing, sending, idle
    reachable: np.ndarray | None = None  # whether each can be asked in this round; None: all

    def __len__(self) -> int:
        return len(self.speeds)

    def device(self, index: int) -> Device:
        """One device, on the level it keeps."""
        uplink, downlink, memory = (
            math.inf if column is None else float(column[index])
            for column in (self.uplinks, self.downlinks, self.memories)
        )
        name = self.names[index] if self.names else ""
        level, speed = int(self.levels[index]), float(self.speeds[index])
        watts = None if self.watts is None else Watts(*self.watts[index].tolist())
        return Device(index, level, speed, uplink, downlink, memory, name, watts)

    def at_level(self, index: int, level: int) -> Device:
        """One device as it would be on another level (levels redrawn each round)."""
        return replace(self.device(index), level=level, speed=self.level_speeds[level - 1])

    def ordered(self, clients: Sequence[str]) -> Fleet:
        """Give each client its own device: device k becomes that of client k, found by its name.

        Names that are shared by devices, such as a kind's, tie nothing: then the fleet stays as it is. Nor do names of
        devices where clients, given as a list, are only numbered.

        Raises:
            SettingError: Some devices are called as clients are, or each has a name of its own, and a client has none.
        """
        own = set(clients)
        numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            numbers.setdefault(name, []).append(number)
        individual = len(numbers) == len(self) and list(clients) != [
            str(number) for number in range(len(clients))
        ]
        if not own or not (own & numbers.keys() or individual):
            return self
        for client in clients:
            found = len(numbers.get(client, ()))
            if found != 1:
                raise SettingError(
                    f"fleet must have one device for each client, and has {found or 'none'} named '{client}'"
                )
        stranger = next((name for name in self.names if name not in own), None)
        if stranger is not None:
            raise SettingError(f"fleet has a device named '{stranger}', and no client is called that")
        order = np.array([numbers[client][0] for client in clients])
        columns = ("speeds", "levels", "uplinks", "downlinks", "memories", "availabilities", "watts")
        given: dict[str, Any] = {name: getattr(self, name) for name in columns}
        given = {name: None if array is None else array[order] for name, array in given.items()}
        return replace(self, **given, names=tuple(clients))

    @cached_property
    def members(self) -> tuple[np.ndarray, ...]:
        """The devices of each level, slowest level first."""
        return tuple(np.flatnonzero(self.levels == level + 1) for level in range(len(self.level_speeds)))

    @cached_property
    def profiles(self) -> Sequence[tuple[Device, int]]:
        """One device of each distinct kind with how many there are, slowest first."""
        columns = [self.speeds, self.levels]
        columns += [array for array in (self.uplinks, self.downlinks, self.memories) if array is not None]
        columns += [] if self.watts is None else list(self.watts.T)
        numbers: dict[str, int] = {}
        # Kinds that are called differently stay apart, though they are equal in all that counts.
        columns += (
            [np.array([numbers.setdefault(name, len(numbers)) for name in self.names])] if self.names else []
        )
        if len(columns) == 2 and all(
            np.ptp(self.speeds[members]) == 0 for members in self.members if len(members)
        ):
            # A fleet by levels: no need to sort a million rows to see its few kinds.
            filled = [members for members in self.members if len(members)]
            return Kinds(
                self,
                np.array([members[0] for members in filled]),
                np.array([len(members) for members in filled]),
            )
        order = np.lexsort(columns[::-1])
        change = np.zeros(len(self) - 1, dtype=bool)
        for column in columns:
            change |= column[order[1:]] != column[order[:-1]]
        starts = np.flatnonzero(np.append(True, change))
        return Kinds(self, order[starts], np.diff(np.append(starts, len(self))))


def drifted(device: Device, drift: tuple[float, float], round_index: int, seed: int) -> Device:
    """A device as it really is in a round: its speed swings slowly around the stated one, each in its own time.

    κ_k(t) = κ_k F^{sin 2π (t / P + φ_k)}
    """
    factor, rounds = drift
    phase = float(generator(seed, "drift", device=device.id).random())
    swing = math.sin(2 * math.pi * (round_index / rounds + phase))
    return replace(device, speed=device.speed * factor**swing)


class Kinds(Sequence[tuple[Device, int]]):
    """Kinds of devices: objects are made when they are looked at, for there may be a million of them."""

    def __init__(self, fleet: Fleet, first: np.ndarray, counts: np.ndarray) -> None:
        self._fleet, self._first, self._counts = fleet, first, counts

    def __len__(self) -> int:
        return len(self._first)

    @overload
    def __getitem__(self, index: int) -> tuple[Device, int]: ...
    @overload
    def __getitem__(self, index: slice) -> Kinds: ...
    def __getitem__(self, index: int | slice) -> tuple[Device, int] | Kinds:
        if isinstance(index, slice):
            return Kinds(self._fleet, self._first[index], self._counts[index])
        return self._fleet.device(int(self._first[index])), int(self._counts[index])


def make_fleet(settings: Settings) -> Fleet:
    """The fleet of a run: by levels, or as measured."""
    if settings.fleet is None:
        return from_levels(settings.levels, settings.devices, settings.partition_seed, settings.availability)
    fleet = read_fleet(settings.fleet, settings.availability, speed_scale(settings))
    if len(fleet) != settings.devices:
        raise SettingError(
            f"{table_name('fleet', settings.fleet)} lists {len(fleet)} devices, but devices = {settings.devices}"
        )
    return fleet


def speed_scale(settings: Settings) -> str:
    """Say what a device of speed 1 does: one epoch of the full model on a device's samples, in `full_seconds`.

    `fedpmt profile` writes it next to a measured speed, so that no plan takes that speed for another model's.
    """
    work = f"{settings.model or settings.task}: {settings.samples} samples in batches of {settings.batch}"
    return f"{work} in {settings.full_seconds:g} s"


def from_levels(spec: str, devices: int, seed: int, availability: float = 1.0) -> Fleet:
    """A fleet from `--levels`.

    >>> fleet = from_levels("1/5,1/2,1", 6, seed=0)
    >>> fleet.level_speeds, fleet.levels.tolist()
    ((0.2, 0.5, 1.0), [1, 2, 3, 1, 2, 3])
    >>> sorted(from_levels("1/4x1,1", 4, seed=0).levels.tolist())
    [1, 2, 2, 2]
    """
    if devices >= NONE:
        raise SettingError(f"devices = {devices} is refused: a fleet holds fewer than {NONE}")
    availabilities = None if availability == 1 else np.full(devices, availability)
    name, separator, numbers = spec.partition(":")
    if separator:
        return _drawn(name, numbers, spec, devices, seed, availabilities)
    entries = [entry.replace(" ", "").lower().partition("x") for entry in spec.split(",")]
    speeds = [parse_number("levels", speed) for speed, _, _ in entries]
    if any(slow >= fast for slow, fast in pairwise(speeds)):
        raise SettingError(f"levels = '{spec}' is refused: speeds must rise, slowest first")
    counts = [int(count) if count.isdecimal() else -1 for _, _, count in entries]
    if any(mark and count < 1 for (_, mark, _), count in zip(entries, counts, strict=True)):
        raise SettingError(f"levels = '{spec}' is refused: a count is a positive whole number, as in 1/4x20")
    if any(count > 0 for count in counts):
        levels = _counted(spec, counts, devices, seed)
    else:
        levels = np.arange(devices) % len(speeds) + 1
    return Fleet(np.array(speeds)[levels - 1], levels, tuple(speeds), availabilities=availabilities)


def _counted(spec: str, counts: list[int], devices: int, seed: int) -> np.ndarray:
    """Levels with given counts; those without one share the rest evenly."""
    rest = devices - sum(count for count in counts if count > 0)
    open_levels = [position for position, count in enumerate(counts) if count < 0]
    if rest < 0 or (rest > 0 and not open_levels):
        raise SettingError(f"levels = '{spec}' is refused: its counts do not add up to devices = {devices}")
    for turn, position in enumerate(open_levels):
        counts[position] = rest // len(open_levels) + (turn < rest % len(open_levels))
    levels = np.repeat(np.arange(1, len(counts) + 1), counts)
    return generator(seed, "fleet").permutation(levels)


def _drawn(
    name: str, numbers: str, spec: str, devices: int, seed: int, availabilities: np.ndarray | None
) -> Fleet:
    """Speeds drawn from a distribution, the fastest scaled to 1."""
    rng = generator(seed, "fleet")
    parameters = [parse_number("levels", number) for number in numbers.split(",")]
    if name == "lognormal" and len(parameters) == 1:
        speeds = rng.lognormal(0.0, parameters[0], devices)
    elif name == "uniform" and len(parameters) == 2 and parameters[0] < parameters[1]:
        speeds = rng.uniform(parameters[0], parameters[1], devices)
    else:
        raise SettingError.unknown("levels", spec, ["lognormal:SIGMA", "uniform:LOW,HIGH"])
    fastest = speeds.max()
    if not math.isfinite(fastest) or speeds.min() / fastest < SLOWEST:
        raise SettingError(f"levels = '{spec}' is refused: it draws speeds too far apart for a clock")
    return grouped(speeds / fastest, availabilities=availabilities)


def grouped(speeds: np.ndarray, **columns: np.ndarray | tuple[str, ...] | None) -> Fleet:
    """Find the levels of measured speeds: the distinct speeds when they are few, else quantiles."""
    distinct = np.unique(speeds)
    if len(distinct) <= 2 * QUANTILE_LEVELS:
        levels = np.searchsorted(distinct, speeds) + 1
        level_speeds = tuple(float(speed) for speed in distinct)
    else:
        ranks = np.empty(len(speeds), dtype=np.int64)
        ranks[np.argsort(speeds, kind="stable")] = np.arange(len(speeds))
        levels = ranks * QUANTILE_LEVELS // len(speeds) + 1
        level_speeds = tuple(
            float(np.median(speeds[levels == level])) for level in range(1, QUANTILE_LEVELS + 1)
        )
    return Fleet(speeds, levels, level_speeds, **columns)  # type: ignore[arg-type]


def read_fleet(source: Any, availability: float = 1.0, scale: str | None = None) -> Fleet:
    """Read a fleet from its rows, in a CSV or in Python.

    Args:
        source: The rows.
        availability: That of devices where none is stated.
        scale: What speed 1 means here; rows whose speed was measured on another scale are refused. None: any scale.
    """
    rows = read_devices(source)
    other = next((row for row in rows if scale and row.scale and row.scale != scale), None)
    if other is not None:
        raise SettingError(
            f"{table_name('fleet', source)}: the speed of '{other.name}' was measured for '{other.scale}', and here "
            f"speed 1 means '{scale}'; profile it with these settings, or plan with those"
        )
    counts = [row.count for row in rows]
    if sum(counts) >= NONE:
        raise SettingError(
            f"{table_name('fleet', source)} lists {sum(counts)} devices: a fleet holds fewer than {NONE}"
        )

    def column(name: str, unit: float, missing: float = math.inf) -> np.ndarray | None:
        stated = [getattr(row, name) for row in rows]
        if all(value is None for value in stated):
            return None
        return np.repeat(np.array([missing if value is None else value * unit for value in stated]), counts)

    availabilities = column("availability", 1.0, missing=1.0)
    if availabilities is None and availability != 1:
        availabilities = np.full(sum(counts), availability)
    watts = [column(name, 1.0, missing=0.0) for name in WATTS]
    drawn = [np.zeros(sum(counts)) if one is None else one for one in watts]
    names = tuple(row.name for row in rows for _ in range(row.count))
    return grouped(
        np.repeat(np.array([row.speed for row in rows]), counts),
        uplinks=column("uplink_mbps", BYTES_PER_MEGABIT),
        downlinks=column("downlink_mbps", BYTES_PER_MEGABIT),
        memories=column("memory_mib", MIB),
        availabilities=availabilities,
        names=names if any(names) else (),
        watts=None if watts[0] is None else np.stack(drawn, axis=1),
    )
