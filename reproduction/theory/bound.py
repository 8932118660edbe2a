"""The bound of Theorem 1, as printed and as its proof gives it, for any mix of depths.

    E[F(w^T) - F(w*)] <= ((λ + 1) Γ_1 / 2 + 2 Δ̃ / μ²) / (T + λ)                     printed
    Δ̃ = (8 (τ - 1)² G² + 2 L (|I| ψ + |S| + ε) Λ + 2 δ² ψ) / ε²

The proof ends with F - F* <= (L / 2) Γ_T, so what it gives is L times as much: the printed line lost the L.
It also needs η_t <= ε / (2 L (|I| ψ + |S|)), which the theorem does not say and which fixes the least λ.
docs/theory.md lists the other slips; none of them is repaired here. `unbiased_bound` is ours: that of a mean which is
normalised by steps and by how likely a device trains a block, for any data and any levels (derived in docs/theory.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.stats import t as student

from fedpmt.pricing.plan import splitting_constant
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.pricing.plan import Definition
    from reproduction.theory.descent import Trace


Form = Literal["printed", "proof"]


@dataclass(frozen=True)
class Constants:
    """What Theorem 1 must know of a problem and a run; measured ones come from `reproduction.theory.descent`."""

    strong_convexity: float  # μ
    smoothness: float  # L
    distance: float  # Γ_1 = ‖w^1 - w*‖²
    gradient_square: float = 0.0  # G²
    noise: float = 0.0  # δ²
    heterogeneity: float = 0.0  # Λ
    epsilon: float = 1.0  # ε of Proposition 1; 1 when every device trains everything

    def __post_init__(self) -> None:
        if not 0 < self.strong_convexity <= self.smoothness:
            raise SettingError(
                f"strong_convexity = {self.strong_convexity:g} is refused: 0 < μ <= L = {self.smoothness:g} is needed"
            )

    @property
    def covered(self) -> bool:
        """Theorem 1 speaks of this run only if ε is positive."""
        return self.epsilon > 0

    @property
    def kept(self) -> float:
        """ε as the theorem takes it, at most 1."""
        return min(self.epsilon, 1.0)


def least_offset(
    constants: Constants, shares: Sequence[float], cohort: int, definition: Definition = "lemma"
) -> float:
    """The least λ for which η_1 = 2 / (μ ε (1 + λ)) <= ε / (2 L (|I| ψ + |S|)); infinite where ε <= 0.

    With L / μ = 2, |I| = 2, everybody at full depth and 10 devices, λ + 1 = 4 * 2 * (2 * 2 + 10):

    >>> least_offset(Constants(1.0, 2.0, 1.0), [0, 1.0], 10)
    111.0
    """
    if not constants.covered:
        return math.inf
    load = len(shares) * splitting_constant(shares, definition, cohort) + cohort  # |I| ψ + |S|
    condition = constants.smoothness / constants.strong_convexity
    return max(1.0, 4 * condition * load / constants.kept**2 - 1)


def spread(
    constants: Constants, shares: Sequence[float], cohort: int, steps: int, definition: Definition = "lemma"
) -> float:
    """Δ = 8 (τ - 1)² G² + 2 L (|I| ψ + |S| + ε) Λ + 2 δ² ψ: what one round adds, over η_t²."""
    psi = splitting_constant(shares, definition, cohort)
    load = len(shares) * psi + cohort + constants.kept
    return (
        8 * (steps - 1) ** 2 * constants.gradient_square
        # Without heterogeneity the term is nothing, even where nobody trains the first layer and ψ is infinite.
        + (2 * constants.smoothness * load * constants.heterogeneity if constants.heterogeneity else 0.0)
        + (2 * constants.noise * psi if constants.noise else 0.0)
    )


def loss_bound(
    constants: Constants,
    shares: Sequence[float],
    *,
    cohort: int,
    rounds: float,
    steps: int = 1,
    offset: float | None = None,
    form: Form = "proof",
    definition: Definition = "lemma",
) -> float:
    """Theorem 1's bound on E[F(w^T) - F*] after `rounds` T with step size 2 / (μ ε (t + λ)).

    `shares` is p, smallest depth first; `cohort` |S|; `steps` τ; `offset` λ, the least allowed if not given.
    Infinite where ε is not positive: then the theorem says nothing.

    >>> constants = Constants(strong_convexity=1.0, smoothness=2.0, distance=4.0, noise=0.5)
    >>> loss_bound(constants, [0, 1.0], cohort=10, rounds=889, form="printed")  # (112 * 4 / 2 + 2 * 2) / 1000
    0.228
    >>> loss_bound(constants, [0, 1.0], cohort=10, rounds=889)
    0.456
    """
    if form not in ("printed", "proof"):
        raise SettingError.unknown("form", form, ["printed", "proof"])
    least = least_offset(constants, shares, cohort, definition)
    if math.isinf(least):
        return math.inf
    if offset is None:
        offset = least
    elif offset < least * (1 - 1e-12):
        raise SettingError(f"offset = {offset:g} is refused: the proof needs a λ of at least {least:g}")
    added = spread(constants, shares, cohort, steps, definition) / constants.kept**2  # Δ̃
    printed = ((offset + 1) * constants.distance / 2 + 2 * added / constants.strong_convexity**2) / (
        rounds + offset
    )
    return printed if form == "printed" else constants.smoothness * printed


def unbiased_bound(
    constants: Constants,
    *,
    chance: float,
    cohort: int,
    rounds: float,
    steps: int,
    mean_steps: float,
    offset: float,
) -> float:
    """Bound E[F(w^T) - F*] of the unbiased mean with step size 2 / (μ (t + λ)): (L / 2) v / (T + λ), where

        v = max((λ + 1) Γ_1, 4 τ̄² D / (μ² (τ̄ - 1))),   D = (χ G² / |S|) + (3/2) (L / μ) χ ((τ - 1) / τ̄)² G²

    Args:
        constants: Of the problem and the run; ε, δ² and Λ don't matter.
        chance: The least q_kl, 1 / χ.
        cohort: |S|.
        rounds: T.
        steps: τ, the most that a device takes.
        mean_steps: τ̄, the mean of E[τ_k] over the devices.
        offset: λ, at least 4 τ̄ L / μ - 1.

    >>> known = Constants(strong_convexity=1.0, smoothness=2.0, distance=1.0, gradient_square=8.0)
    >>> unbiased_bound(known, chance=0.5, cohort=8, rounds=976, steps=3, mean_steps=2.0, offset=24)  # v = 16 (2 + 48)
    0.8
    """
    mu, smooth = constants.strong_convexity, constants.smoothness
    if mean_steps <= 1:
        raise SettingError(f"mean_steps must be > 1 (got {mean_steps:g})")
    least = 4 * mean_steps * smooth / mu - 1
    if offset < least * (1 - 1e-12):
        raise SettingError(f"offset must be >= {least:g} (got {offset:g})")
    drift = 1.5 * smooth / mu * ((steps - 1) / mean_steps) ** 2
    added = constants.gradient_square / chance * (1 / cohort + drift)  # D
    start = (offset + 1) * constants.distance
    return smooth / 2 * max(start, 4 * mean_steps**2 * added / (mu**2 * (mean_steps - 1))) / (rounds + offset)


CONFIDENCE = 0.95
DECADE = 10.0
"""Rates and floors are read off the last factor of ten in t, where the start is forgotten."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the length of its 95 % interval, infinite for one seed."""

    mean: float
    half: float

    def text(self, digits: int = 3) -> str:
        """Both, the mean rounded to this number of significant digits.

        >>> Interval(0.00041234, 0.00001).text(2), Interval(3482.4, 161.0).text(), Interval(2.0, math.inf).text()
        ('0.00041 ± 0.00001', '3482 ± 161', '2.00')
        """
        if not math.isfinite(self.half):
            return significant(self.mean, digits)
        if not 1e-4 <= abs(self.mean) < 1e6:
            return f"{significant(self.mean, digits)} ± {self.half:.1g}"
        return self.fixed(max(0, digits - 1 - math.floor(math.log10(abs(self.mean)))))

    def fixed(self, places: int = 2) -> str:
        """Both, with this number of decimals, and one digit of the half at least.

        >>> Interval(-1.0312, 0.0217).fixed(), Interval(-0.00004, 0.003).fixed(), Interval(2.0, math.inf).fixed()
        ('-1.03 ± 0.02', '0.00 ± 0.003', '2.00')
        """
        mean = f"{round(self.mean, places) + 0.0:.{places}f}"
        if not math.isfinite(self.half):
            return mean
        half = f"{self.half:.{places}f}"
        return f"{mean} ± {half if float(half) else f'{self.half:.1g}'}"


def significant(value: float, digits: int = 3) -> str:
    """A number with this number of significant digits, zeros kept.

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
