"""The rows of a fleet as users write them: a CSV, `fedpmt.Device` values, dicts, a data frame or a list of speeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

from fedpmt.devices.tables import is_file, is_frame, read_table, table_name, write_table
from fedpmt.records import write_atomically
from fedpmt.settings import parse_number
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of device, or one device, of a fleet that is given to `fedpmt.run`, `compare` or `plan`.

    Args:
        speed: How fast it trains, relative to a device that trains one epoch of the full model in `full_seconds`.
            Also a fraction as text, "1/5".
        name: What it is called; the name of a client if it is that client's own device.
        count: How many of them there are.
        uplink_mbps: Megabits per second that it sends; None: sending takes no time.
        downlink_mbps: Megabits per second that it receives.
        memory_mib: Memory for training; None: enough.
        availability: Chance that it can be asked in a round; None: the run's own `availability`, or 1 if other devices
            of the fleet state theirs.
        watts_computing: Watts that it draws while it trains; None: its energy is not counted. All devices of a fleet
            state it, or none.
        watts_sending: Watts while its link is busy, down or up; None: 0.
        watts_idle: Watts while it waits for the round to end; None: 0.
        scale: What a device of speed 1 does, as `fedpmt profile` states it. A plan or run in which speed 1 means
            something else refuses the row; "" is not checked.

    Raises:
        SettingError: A value cannot be used.

    Examples:
        >>> Device(name="pi", speed="1/5", count=20, uplink_mbps=10).speed
        0.2
    """

    speed: float
    name: str = ""
    count: int = 1
    uplink_mbps: float | None = None
    downlink_mbps: float | None = None
    memory_mib: float | None = None
    availability: float | None = None
    watts_computing: float | None = None
    watts_sending: float | None = None
    watts_idle: float | None = None
    scale: str = ""

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the value is frozen, but for what is read here
        set_field(self, "name", str(self.name).strip())
        set_field(self, "scale", str(self.scale).strip())
        set_field(self, "count", _read_count(self.count))
        for column in NUMBERS:
            value = getattr(self, column)
            if value is not None or column == "speed":
                set_field(self, column, parse_number(column, str(value), zero=column in MAY_BE_ZERO))
        if self.availability is not None and self.availability > 1:
            raise SettingError(f"availability is a chance, at most 1 (got {self.availability:g})")


WATTS = ("watts_computing", "watts_sending", "watts_idle")
NUMBERS = ("speed", "uplink_mbps", "downlink_mbps", "memory_mib", "availability", *WATTS)
MAY_BE_ZERO = ("watts_sending", "watts_idle")
COLUMNS = tuple(field.name for field in fields(Device))


def read_devices(source: Any) -> list[Device]:
    """Read the rows of a fleet, whatever they are written in.

    >>> read_devices([1, "1/2"]) == read_devices("speed\\n1\\n0.5\\n") == [Device(speed=1), Device(speed=0.5)]
    True

    Raises:
        SettingError: The message names the file and line, or the row.
    """
    if hasattr(source, "tolist"):  # an array
        source = source.tolist()
    values = isinstance(source, Iterable) and not isinstance(source, str | Mapping)
    if values and not is_file(source) and not is_frame(source):
        source = [_cells(item) for item in source]
    rows = read_table("fleet", source, COLUMNS, needed=("speed",))
    if not rows:
        raise SettingError(f"{table_name('fleet', source)} lists no device")
    devices = []
    for place, cells in rows:
        try:
            devices.append(Device(**{"speed": "", **cells}))  # type: ignore[arg-type]
        except SettingError as error:
            raise SettingError(f"{place}: {error}") from None
    _refuse_same_names([place for place, _ in rows], devices)
    if any(getattr(one, column) is not None for one in devices for column in WATTS):
        for (place, _), one in zip(rows, devices, strict=True):
            if one.watts_computing is None:
                raise SettingError(
                    f"{place}: watts_computing must be stated for all devices, or no watts for any"
                )
    return devices


def _refuse_same_names(places: Sequence[str], devices: Sequence[Device]) -> None:
    first: dict[str, str] = {}
    for place, one in zip(places, devices, strict=True):
        if one.name and one.name in first:
            raise SettingError(
                f"{place}: name must differ from that of {first[one.name].rpartition(', ')[2]} (got '{one.name}'); "
                "several devices of a kind are one row with a count"
            )
        first[one.name] = place


def write_devices(devices: Iterable[Device]) -> str:
    """Write rows as the text of a CSV, which reads as the same rows; columns that say nothing are left out."""
    devices = list(devices)
    usual = Device(speed=1)
    columns = [
        column
        for column in COLUMNS
        if column == "speed" or any(getattr(one, column) != getattr(usual, column) for one in devices)
    ]
    return write_table(columns, ([getattr(one, column) for column in columns] for one in devices))


def check_new_name(path: Path, name: str) -> None:
    """Refuse to add a device to a fleet's CSV that has one of that name; a file that does not exist has none."""
    if path.exists() and any(one.name == name for one in read_devices(path)):
        raise SettingError(f"name must not be in '{path}' yet (got '{name}'); choose another with --name")


def add_device(path: Path, device: Device) -> None:
    """Add a row to a fleet's CSV, which is written anew, or begin one."""
    check_new_name(path, device.name)
    text = write_devices([*(read_devices(path) if path.exists() else ()), device])
    read_devices(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise SettingError(f"out = '{path}' cannot be written: {error.strerror or error}") from error


def _cells(item: Any) -> Any:
    """A device as a dict of columns; a bare number is a speed."""
    if isinstance(item, Device):
        return {column: getattr(item, column) for column in COLUMNS}
    return {"speed": item} if isinstance(item, Real | str) else item


def _read_count(value: Any) -> int:
    text = str(value).strip()
    try:
        # A data frame with an empty cell in it has counts such as 20.0.
        count = int(text) if text.isdecimal() else int(float(text))
        whole = count >= 1 and (text.isdecimal() or count == float(text))
    except (ValueError, OverflowError):
        count, whole = 0, False
    if not whole:
        raise SettingError(f"count = '{text}' is not a positive whole number")
    return count
