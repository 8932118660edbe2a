"""Speeds that nobody stated: fitted to the seconds that devices really took."""

from __future__ import annotations

LATE = 2.0
"""Of a device that did not answer in time no more is known; it is taken to have needed twice the deadline."""


def fitted(before: float, observed: float, weight: float) -> float:
    """κ after one more measurement, the newest with this weight, so that drift is followed.

        1 / κ <- (1 - a) / κ + a / κ_observed

    Seconds are averaged and not speeds, since it is seconds that a deadline bounds.

    >>> fitted(1.0, 0.5, 1.0), round(fitted(1.0, 0.5, 0.5), 4)
    (0.5, 0.6667)
    """
    return 1 / ((1 - weight) / before + weight / observed)
