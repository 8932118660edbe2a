"""Numbers as a person reads them: a mean with its spread, and units that fit the size."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.records import ACCURACY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MISSING = "-"


@dataclass(frozen=True)
class Spread:
    """One number over runs that differ only in their seed.

    >>> Spread.of([1.0, 3.0])
    Spread(mean=2.0, deviation=1.4142135623730951, low=1.0, high=3.0, count=2)
    """

    mean: float
    deviation: float  # of the sample (n - 1); 0 for one run
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of those values that are there; None where none is."""
        there = [value for value in values if value is not None and math.isfinite(value)]
        if not there:
            return None
        deviation = statistics.stdev(there) if len(there) > 1 else 0.0
        return cls(statistics.fmean(there), deviation, min(there), max(there), len(there))


@dataclass(frozen=True)
class Unit:
    """What one of the shown numbers stands for."""

    size: float
    name: str

    def label(self, quantity: str) -> str:
        """The title of an axis or a column."""
        return f"{quantity} ({self.name})" if self.name else quantity


TIMES = (Unit(1, "s"), Unit(60, "min"), Unit(3600, "h"), Unit(86400, "d"))
BYTES = tuple(Unit(1000.0**power, name) for power, name in enumerate(("B", "kB", "MB", "GB", "TB", "PB")))
COUNTS = tuple(Unit(1000.0**power, name) for power, name in enumerate(("", "k", "M", "G", "T", "P", "E")))
JOULES = tuple(Unit(1000.0**power, name) for power, name in enumerate(("J", "kJ", "MJ", "GJ", "TJ")))
PERCENT = Unit(0.01, "%")


def time_unit(seconds: float) -> Unit:
    """Seconds up to two minutes, minutes up to two hours, hours up to two days.

    >>> time_unit(100).name, time_unit(843).name, time_unit(1e6).name
    ('s', 'min', 'd')
    """
    return next((unit for unit, after in itertools.pairwise(TIMES) if seconds < 2 * after.size), TIMES[-1])


def bytes_unit(count: float) -> Unit:
    """Decimal units, as link rates have them."""
    return _thousands(count, BYTES)


def count_unit(count: float) -> Unit:
    """Thousands, millions, billions (G) and on."""
    return _thousands(count, COUNTS)


def joules_unit(joules: float) -> Unit:
    """Joules, thousands of them and on."""
    return _thousands(joules, JOULES)


def percent_unit(_: float) -> Unit:
    """Shares are always shown in percent."""
    return PERCENT


def plain_unit(_: float) -> Unit:
    """No unit: rounds, losses."""
    return COUNTS[0]


def score_unit(name: str) -> Callable[[float], Unit]:
    """Percent for an accuracy; other scores are plain numbers."""
    return percent_unit if name == ACCURACY else plain_unit


def score_title(name: str) -> str:
    """The title of a score's column or row, unlike that of any other.

    >>> score_title("accuracy"), score_title("loss")
    ('accuracy', 'score (loss)')
    """
    return name if name == ACCURACY else f"score ({name})"


def _thousands(count: float, units: tuple[Unit, ...]) -> Unit:
    return next((unit for unit in reversed(units) if abs(count) >= unit.size), units[0])


def show(value: Spread | float | None, unit_for: Callable[[float], Unit] = plain_unit) -> str:
    """A number with its unit, and its deviation where there are several runs.

    >>> show(843.0, time_unit), show(Spread.of([0.91, 0.93]), percent_unit), show(None)
    ('14.1 min', '92.0 ± 1.4 %', '-')
    """
    mean, deviation, unit = split(value, unit_for)
    return " ".join(part for part in (mean, deviation, unit) if part)


def split(
    value: Spread | float | None, unit_for: Callable[[float], Unit] = plain_unit
) -> tuple[str, str, str]:
    """The mean, the deviation and the unit apart, for cells that set them in different type.

    >>> split(Spread.of([7.0, 8.0])), split(Spread.of([7.0, 7.0]))
    (('7.5', '± 0.7', ''), ('7', '', ''))
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING, "", ""
    mean, deviation = (value.mean, value.deviation) if isinstance(value, Spread) else (float(value), 0.0)
    unit = unit_for(mean)
    decimals = 1 if unit is PERCENT else _decimals(mean / unit.size, deviation / unit.size)
    spread = f"± {deviation / unit.size:.{decimals}f}" if deviation else ""
    return f"{mean / unit.size:.{decimals}f}", spread, unit.name


def _decimals(shown: float, deviation: float) -> int:
    """Three figures that count, fewer where they are lost in the deviation; none for whole numbers."""
    if shown == 0 or (float(shown).is_integer() and abs(shown) >= 1 and not deviation):
        return 0
    decimals = max(0, 2 - math.floor(math.log10(abs(shown))))
    if deviation:
        first = -math.floor(math.log10(deviation))
        # One figure of the deviation, two where it starts with a 1; one more than three of the mean at most.
        decimals = min(decimals + (decimals == 0), first + (deviation * 10**first < 2))
    return max(0, min(6, decimals))
