"""Traces: when each device can be reached and how fast it is, by virtual time.

    availability   client,start,end    reachable from `start` until before `end`, and not outside of its intervals
    speed          client,time,speed   this fast from `time` on, until the next row

Times are virtual seconds. A client is named as in the data, or by the name or the number of its device; the name of a
kind of devices stands for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.devices.tables import Row, read_table, table_name, write_table
from fedpmt.settings import parse_number
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.settings import Settings

AVAILABILITY, SPEED = "availability-trace", "speed-trace"
COLUMNS = {AVAILABILITY: ("client", "start", "end"), SPEED: ("client", "time", "speed")}

MOST_COMPARED = 10_000
"""In a larger fleet the nearest of all names is not looked for."""

Series = dict[str, list[tuple[float, float]]]
"""For each client the times at which its number changes, ascending from 0, and what it changes to."""


def read_availability(source: Any) -> Series:
    """Read intervals: 1 from an interval's start on, 0 from its end on.

    >>> read_availability("client,start,end\\nann,5,10\\nann,10,20\\n")
    {'ann': [(0.0, 0.0), (5.0, 1.0), (20.0, 0.0)]}

    Raises:
        SettingError: The intervals of a client overlap or are not in order, or one is empty.
    """
    series: Series = {}
    for place, cells in _rows(AVAILABILITY, source):
        start, end = _seconds(place, "start", cells), _seconds(place, "end", cells)
        if end <= start:
            raise SettingError(f"{place}: end must be > start (got {start:g} to {end:g})")
        steps = series.setdefault(_client(place, cells), [(0.0, 0.0)])
        last = steps[-1][0]
        if start < last:
            raise SettingError(
                f"{place}: start must be >= {last:g}, where the interval before ends (got {start:g})"
            )
        if start == last:
            steps.pop()  # at 0, or where one interval goes on in the next
        if not steps or steps[-1][1] == 0:
            steps.append((start, 1.0))
        steps.append((end, 0.0))
    return series


def read_speeds(source: Any) -> Series:
    """Read the speeds of clients over time.

    >>> read_speeds("client,time,speed\\nann,0,1/2\\nann,60,1\\n")
    {'ann': [(0.0, 0.5), (60.0, 1.0)]}

    Raises:
        SettingError: The times of a client do not rise or do not begin at 0, or a speed is not positive.
    """
    series: Series = {}
    for place, cells in _rows(SPEED, source):
        time = _seconds(place, "time", cells)
        try:
            speed = parse_number("speed", cells.get("speed", ""))
        except SettingError as error:
            raise SettingError(f"{place}: {error}") from None
        client = _client(place, cells)
        steps = series.setdefault(client, [])
        if not steps and time > 0:
            raise SettingError(f"{place}: the first time of '{client}' must be 0 (got {time:g})")
        if steps and time <= steps[-1][0]:
            raise SettingError(f"{place}: time must be > {steps[-1][0]:g}, the one before (got {time:g})")
        steps.append((time, speed))
    return series


def write_trace(setting: str, source: Any) -> str:
    """Write a trace as the text of a CSV, whatever it is given as."""
    key = setting.replace("_", "-")
    columns = COLUMNS[key]
    return write_table(columns, ([cells.get(one) for one in columns] for _, cells in _rows(key, source)))


def _rows(key: str, source: Any) -> list[Row]:
    rows = read_table(key, source, COLUMNS[key], COLUMNS[key])
    if not rows:
        raise SettingError(f"{table_name(key, source)} has no rows")
    return rows


def _client(place: str, cells: Mapping[str, str]) -> str:
    if "client" not in cells:
        raise SettingError(f"{place}: client is empty")
    return cells["client"]


def _seconds(place: str, column: str, cells: Mapping[str, str]) -> float:
    text = cells.get(column, "")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise SettingError(f"{place}: {column} must be a finite number >= 0 (got '{text}')")
    return value


@dataclass(frozen=True, eq=False)
class Steps:
    """A number for each device that changes at certain times and stays as it is in between."""

    series: np.ndarray  # which of the series below each device follows
    firsts: np.ndarray  # where each series begins
    times: np.ndarray  # when it changes; in each series ascending from 0
    values: np.ndarray  # to what

    def at(self, now: float) -> np.ndarray:
        """The number of every device."""
        past = np.add.reduceat(self.times <= now, self.firsts, dtype=np.int64)
        values: np.ndarray = self.values[self.firsts + past - 1][self.series]
        return values

    def of(self, device: int, now: float) -> tuple[float, float]:
        """The number of one device, and when it changes next; infinity: never."""
        series = int(self.series[device])
        first, end = np.append(self.firsts, len(self.times))[series : series + 2]
        after = int(first + np.searchsorted(self.times[first:end], now, side="right"))
        return float(self.values[after - 1]), float(self.times[after]) if after < end else math.inf


@dataclass(frozen=True)
class Traces:
    """What is known of the devices of a run at any virtual time."""

    availability: Steps | None = None  # 1 while a device can be reached, else 0
    speed: Steps | None = None

    def reachable(self, now: float) -> np.ndarray | None:
        """Whether each device can be reached; None: all of them, always."""
        return None if self.availability is None else self.availability.at(now) > 0

    def next_start(self, now: float, devices: Iterable[int] | None = None) -> float:
        """Find the first moment from now on at which one of these devices, or of all, can be reached.

        Infinity: none of them ever will be.
        """
        if self.availability is None:
            return now
        if devices is not None:
            states = [self.availability.of(device, now) for device in devices]
            return min((now if value > 0 else change for value, change in states), default=math.inf)
        if (self.availability.at(now) > 0).any():
            return now
        times, values = self.availability.times, self.availability.values
        return float(times[(times > now) & (values > 0)].min(initial=math.inf))

    def meet(self, device: Device, now: float) -> tuple[Device, float]:
        """Find out how fast a device really is now, and for how many seconds it can be reached."""
        reach = math.inf
        if self.speed is not None:
            device = replace(device, speed=self.speed.of(device.id, now)[0])
        if self.availability is not None:
            reach = self.availability.of(device.id, now)[1] - now
        return device, reach


def check_traces(settings: Settings) -> None:
    """Refuse traces that cannot be right for any fleet."""
    if settings.availability_trace is not None:
        read_availability(settings.availability_trace)
    if settings.speed_trace is not None:
        read_speeds(settings.speed_trace)


def make_traces(settings: Settings, fleet: Fleet, clients: Sequence[str] = ()) -> Traces | None:
    """Tie the traces of a run to its fleet; None where it has none.

    Args:
        settings: Those of the run.
        fleet: In the order of the clients, where devices are theirs.
        clients: The clients' names, by device; none where they have no names.

    Raises:
        SettingError: A trace names a client that does not exist, or leaves one out.
    """
    availability, speed = settings.availability_trace, settings.speed_trace
    if availability is None and speed is None:
        return None
    if availability is not None and fleet.availabilities is not None:
        raise SettingError(
            f"{AVAILABILITY} cannot be combined with availability, which the fleet states in a column"
        )
    return Traces(
        None if availability is None else _tie(AVAILABILITY, availability, read_availability, fleet, clients),
        None if speed is None else _tie(SPEED, speed, read_speeds, fleet, clients),
    )


def _tie(key: str, source: Any, read: Callable[[Any], Series], fleet: Fleet, clients: Sequence[str]) -> Steps:
    """Find the devices that each series is of."""
    name, found = table_name(key, source), read(source)
    owners = _owners(fleet, clients)
    follows = np.full(len(fleet), -1)
    for number, client in enumerate(found):
        devices = owners.get(client)
        if devices is None and client.isdecimal() and int(client) < len(fleet):
            devices = [int(client)]
        if devices is None:
            raise _unknown(f"{name}: client", client, owners, len(fleet))
        if (follows[devices] >= 0).any():
            raise SettingError(f"{name}: client = '{client}' has rows under another name, too")
        follows[devices] = number
    if (follows < 0).any():
        device = int(np.argmax(follows < 0))
        shown = f"client '{clients[device]}'" if clients else f"device {device}"
        raise SettingError(f"{name} has no row for {shown}")
    lengths = [len(steps) for steps in found.values()]
    times, values = np.array([step for steps in found.values() for step in steps]).T
    return Steps(follows, np.cumsum([0, *lengths[:-1]]), times, values)


def _owners(fleet: Fleet, clients: Sequence[str]) -> dict[str, list[int]]:
    """The devices that each name stands for; a client's name goes before a device's."""
    owners: dict[str, list[int]] = {}
    for device, name in enumerate(fleet.names):
        if name:
            owners.setdefault(name, []).append(device)
    return {**owners, **{client: [device] for device, client in enumerate(clients)}}


def _unknown(key: str, client: str, owners: Mapping[str, Any], devices: int) -> SettingError:
    if 0 < len(owners) <= MOST_COMPARED:
        return SettingError.unknown(key, client, owners)
    return SettingError(f"{key} = '{client}' is unknown (allowed: numbers of devices, 0 to {devices - 1})")
