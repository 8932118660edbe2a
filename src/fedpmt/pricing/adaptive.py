"""Speeds that nobody stated: fitted to the seconds that devices really took."""

from __future__ import annotations

LATE = 2.0
"""Of a device that did not answer in time no more is known; it is taken to have needed twice the deadline."""

SHORTEST, LONGEST = 1e-6, 1e9
"""Seconds of training that are believed; beyond them a speed would be no number to plan with."""


def clamp_seconds(seconds: float, late: float | None) -> float:
    """Seconds as they count: of one that arrived no more than of one that did not.

    >>> clamp_seconds(30.0, late=120.0), clamp_seconds(1e300, late=120.0)
    (30.0, 120.0)
    >>> clamp_seconds(1e300, late=None), clamp_seconds(1e-300, late=None)
    (1000000000.0, 1e-06)
    """
    return max(SHORTEST, min(seconds, LONGEST if late is None else late))


def fit_speed(before: float, observed: float, weight: float) -> float:
    """κ after one more measurement, the newest with this weight, so that drift is followed.

        1 / κ <- (1 - a) / κ + a / κ_observed

    Seconds are averaged and not speeds, since it is seconds that a deadline bounds.

    >>> fit_speed(1.0, 0.5, 1.0), round(fit_speed(1.0, 0.5, 0.5), 4)
    (0.5, 0.6667)
    """
    return 1 / ((1 - weight) / before + weight / observed)
