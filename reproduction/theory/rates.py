"""Numbers with their intervals: how fast an error falls, what it falls to, how far two arms are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import t as student

if TYPE_CHECKING:
    from reproduction.theory.descent import Trace

CONFIDENCE = 0.95
DECADE = 10.0
"""Rates and floors are read off the last factor of ten in t, where the start is forgotten."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the length of its 95 % interval, infinite for one seed."""

    mean: float
    half: float

    def text(self, digits: int = 3) -> str:
        """Both, the mean rounded to so many significant digits.

        >>> Interval(0.00041234, 0.00001).text(2), Interval(3482.4, 161.0).text(), Interval(2.0, math.inf).text()
        ('0.00041 ± 0.00001', '3482 ± 161', '2.00')
        """
        if not math.isfinite(self.half):
            return significant(self.mean, digits)
        if not 1e-4 <= abs(self.mean) < 1e6:
            return f"{significant(self.mean, digits)} ± {self.half:.1g}"
        return self.fixed(max(0, digits - 1 - math.floor(math.log10(abs(self.mean)))))

    def fixed(self, places: int = 2) -> str:
        """Both, with so many decimals, and one digit of the half at least.

        >>> Interval(-1.0312, 0.0217).fixed(), Interval(-0.00004, 0.003).fixed(), Interval(2.0, math.inf).fixed()
        ('-1.03 ± 0.02', '0.00 ± 0.003', '2.00')
        """
        mean = f"{round(self.mean, places) + 0.0:.{places}f}"
        if not math.isfinite(self.half):
            return mean
        half = f"{self.half:.{places}f}"
        return f"{mean} ± {half if float(half) else f'{self.half:.1g}'}"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, zeros kept.

    >>> significant(1234.5), significant(0.5), significant(0.0000123), significant(0.0)
    ('1234', '0.500', '1.23e-05', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def interval(values: np.ndarray) -> Interval:
    """Student's interval over one value per seed.

    >>> interval(np.array([1.0, 2.0, 3.0])).text()
    '2.00 ± 2.48'
    """
    if len(values) < 2:
        return Interval(float(values.mean()), math.inf)
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return Interval(float(values.mean()), quantile * float(values.std(ddof=1)) / math.sqrt(len(values)))


def _late(trace: Trace) -> np.ndarray:
    return np.asarray(trace.rounds >= trace.rounds[-1] / DECADE)


def slope(trace: Trace) -> Interval:
    """The slope of log(F(w^t) - F*) against log(t + λ), fitted seed by seed; -1 is the rate of Theorem 1."""
    late = _late(trace)
    # Rounding may leave an error of zero, whose logarithm would be a warning.
    heights = np.log(np.maximum(trace.errors[:, late], np.finfo(np.float64).tiny))
    return interval(np.polyfit(np.log(trace.times[late]), heights.T, 1)[0])


def level(trace: Trace) -> Interval:
    """F - F* at the end: the mean over the last quarter of the recorded rounds' last decade."""
    late = np.flatnonzero(_late(trace))
    return interval(trace.errors[:, late[-max(1, len(late) // 4) :]].mean(axis=1))


def ratio(trace: Trace, other: Trace) -> Interval:
    """How many times as large an arm's error is as another's, over the last decade, seed by seed."""
    late = _late(trace)
    ours, theirs = ((arm.errors[:, late] * arm.times[late]).mean(axis=1) for arm in (trace, other))
    return interval(ours / theirs)
