"""How claims are judged. The rules stand in docs/results/README.md; only this module applies them.

A claim of the paper is checked in one or more cases. A case compares numbers of equal seeds, in pairs, and is tested
against the boundary that the claim draws: zero for "above", a margin for "alike". All cases of a page are one family,
corrected by Holm's rule (`settle`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import t as student

from fedpmt.resources import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

CONFIDENCE = 0.95
"""Of all intervals."""

LIKELY = 0.05
"""A case is decided where its corrected p-value is below this."""

HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "fails", "undecided", "not run yet"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval; `reached` of `runs` got there at all."""

    mean: float
    half: float  # half the interval's length; infinite for one seed
    reached: int
    runs: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Estimate | None:
        """Of those that reached the target; None where nobody did.

        >>> Estimate.of([39.0, 41.0, None]).reached
        2
        """
        there = [value for value in values if value is not None]
        if not there:
            return None
        half = math.inf
        if len(there) > 1:
            half = _quantile(len(there)) * float(np.std(there, ddof=1)) / math.sqrt(len(there))
        return cls(float(np.mean(there)), half, len(there), len(values))

    def text(self, digits: int = 0) -> str:
        """As a cell."""
        shown = f"{self.mean:,.{digits}f}"
        if math.isfinite(self.half):
            shown += f" ± {self.half:,.{digits}f}"
        return shown if self.reached == self.runs else f"{shown} ({self.reached} of {self.runs})"


def _quantile(seeds: int) -> float:
    return float(student.ppf((1 + CONFIDENCE) / 2, seeds - 1))


def holm(chances: Mapping[Any, float]) -> dict[Any, float]:
    """Correct p-values for how many there are: the smallest times all of them, the next times one less, and so on.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected, least = {}, 0.0
    for rank, (key, chance) in enumerate(sorted(chances.items(), key=lambda one: one[1])):
        least = max(least, min(1.0, (len(chances) - rank) * chance))
        corrected[key] = least
    return corrected


def pair(of: Callable[..., float], *samples: Mapping[int, float]) -> list[float]:
    """Combine numbers of equal seeds; a seed that is missing from one sample is left out.

    >>> pair(lambda ours, theirs: ours - theirs, {0: 3.0, 1: 5.0}, {1: 4.0, 2: 1.0})
    [1.0]
    """
    seeds = sorted(set[int].intersection(*(set(sample) for sample in samples)))
    return [of(*(sample[seed] for sample in samples)) for seed in seeds]


@dataclass(frozen=True)
class Case:
    """One place where a claim was checked.

    >>> Case("Table I", "19 rows", agrees=True).verdict, Case("one seed", "+1", agrees=True, seeds=1).verdict
    ('holds', 'undecided')
    """

    where: str
    shown: str  # our number, with its interval
    agrees: bool | None  # whether it is on the claim's side; None where no run exists
    seeds: int = 0  # 0: exact, without seeds
    p: float | None = None  # None: exact, or of one seed
    corrected: float | None = None  # the same as one of the page's family

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.agrees is None:
            return NOT_RUN
        if self.seeds and not (self.corrected is not None and self.corrected < LIKELY):
            return UNDECIDED
        return HOLDS if self.agrees else FAILS

    @property
    def chance(self) -> str:
        """The corrected p-value as a cell."""
        if not self.seeds:
            return "-" if self.agrees is None else "exact"
        return chance_text(self.corrected)


def chance_text(value: float | None) -> str:
    """A p-value as a cell.

    >>> chance_text(0.0123), chance_text(0.00002), chance_text(None)
    ('0.012', '< 0.001', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def points(found: Estimate) -> str:
    """Show a difference of accuracies, in percentage points.

    >>> points(Estimate(0.0123, 0.004, 3, 3)), points(Estimate(-0.05, math.inf, 1, 1))
    ('+1.23 ± 0.40 points', '-5.00 points')
    """
    spread = f" ± {100 * found.half:.2f}" if math.isfinite(found.half) else ""
    return f"{100 * found.mean:+.2f}{spread} points"


def percent(found: Estimate) -> str:
    """Show an accuracy.

    >>> percent(Estimate(0.882, 0.014, 10, 10))
    '88.2 ± 1.4 %'
    """
    spread = f" ± {100 * found.half:.1f}" if math.isfinite(found.half) else ""
    return f"{100 * found.mean:.1f}{spread} %"


def times(found: Estimate) -> str:
    """Show a mean of logarithms as a ratio, with the interval's ends.

    >>> times(Estimate(math.log(1.5), math.log(1.2), 3, 3)), times(Estimate(math.log(1.5), math.inf, 1, 1))
    ('1.50 x (1.25 to 1.80)', '1.50 x')
    """
    shown = f"{math.exp(found.mean):.2f} x"
    if not math.isfinite(found.half):
        return shown
    low, high = (math.exp(found.mean + sign * found.half) for sign in (-1, 1))
    return f"{shown} ({low:.2f} to {high:.2f})"


def above(
    where: str, found: Estimate | None, boundary: float = 0.0, show: Callable[[Estimate], str] = points
) -> Case:
    """Test whether the mean is above a boundary.

    >>> case = above("here", Estimate.of([0.02, 0.03, 0.025]))
    >>> case.agrees, case.seeds, round(case.p, 3)
    (True, 3, 0.013)
    """
    return not_run(where) if found is None else _test(where, show(found), found, found.mean - boundary)


def below(
    where: str, found: Estimate | None, boundary: float = 0.0, show: Callable[[Estimate], str] = points
) -> Case:
    """Test whether the mean is below a boundary."""
    return not_run(where) if found is None else _test(where, show(found), found, boundary - found.mean)


def near(where: str, found: Estimate | None, margin: float, show: Callable[[Estimate], str] = points) -> Case:
    """Test whether the mean is no further than a margin from zero.

    Without a correction: it holds where the 95 % interval lies inside the margin, and fails where it lies outside.

    >>> inside, across = Estimate(0.001, 0.002, 10, 10), Estimate(0.019, 0.002, 10, 10)
    >>> [(one.agrees, one.p < LIKELY) for one in (near("a", inside, 0.02), near("b", across, 0.02))]
    [(True, True), (True, False)]
    """
    return not_run(where) if found is None else _test(where, show(found), found, margin - abs(found.mean))


def exact(where: str, holds: bool, shown: str) -> Case:
    """State what needs no seeds: a number that comes out as printed, or does not."""
    return Case(where, shown, holds)


def undecided(where: str, shown: str) -> Case:
    """State that the runs are there and say nothing."""
    return Case(where, shown, agrees=False, seeds=1)


def not_run(where: str) -> Case:
    """State that the runs are missing."""
    return Case(where, NOT_RUN, None)


def _test(where: str, shown: str, found: Estimate, distance: float) -> Case:
    """Student's test, two-sided, of how far the mean is on the claim's side of its boundary."""
    seeds = found.reached
    if not math.isfinite(found.half):
        return Case(where, shown, distance > 0, seeds)
    if found.half < ROUNDING:
        # Numbers that are read off a grid can all be equal: then seeds are counted (the sign test).
        chance = 2 * 0.5**seeds if abs(distance) > ROUNDING else 1.0
    else:
        chance = 2 * float(student.sf(abs(distance) * _quantile(seeds) / found.half, seeds - 1))
    return Case(where, shown, distance > 0, seeds, min(1.0, chance))


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, in our words.

    >>> cases = [exact("i.i.d.", True, "1.9 x"), exact("2 classes", False, "0.9 x"), not_run("Dirichlet")]
    >>> Claim("faster", "FedPMT is faster", "IV-C", cases).verdict
    'holds in 1, fails in 1, not run yet in 1 of 3 cases'
    """

    name: str  # of its place on the page
    text: str
    place: str  # in the paper
    cases: Sequence[Case]
    measure: str = "ours"  # what the numbers are
    note: str = ""  # how they are read, or what was varied
    remark: str = ""  # that belongs to the verdict

    @property
    def verdict(self) -> str:
        """In a word, or counted where there are several cases."""
        found = [case.verdict for case in self.cases]
        counts = {word: found.count(word) for word in (HOLDS, FAILS, UNDECIDED, NOT_RUN) if word in found}
        if not counts or list(counts) == [NOT_RUN]:
            return NOT_RUN
        if len(counts) == 1:
            return found[0] if len(found) == 1 else f"{found[0]} in all {len(found)} cases"
        return ", ".join(f"{word} in {count}" for word, count in counts.items()) + f" of {len(found)} cases"

    def count(self, verdict: str) -> int:
        """How many cases have this verdict."""
        return sum(case.verdict == verdict for case in self.cases)

    def values(self) -> dict[str, Any]:
        """For programs."""
        cases = [{**asdict(case), "verdict": case.verdict} for case in self.cases]
        return {**asdict(self), "cases": cases, "verdict": self.verdict}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Claim:
        """Read what `values` has written."""
        cases = [
            Case(**{key: value for key, value in case.items() if key != "verdict"})
            for case in values["cases"]
        ]
        return cls(**{key: value for key, value in values.items() if key != "verdict"} | {"cases": cases})


def settle(claims: Sequence[Claim]) -> list[Claim]:
    """Correct all cases of these claims as one family.

    >>> one, two = (Case("here", "", agrees=True, seeds=3, p=p) for p in (0.02, 0.03))
    >>> [case.corrected for case in settle([Claim("a", "", "", [one, two])])[0].cases]
    [0.04, 0.04]
    """
    chances: dict[Hashable, float] = {
        (number, place): case.p
        for number, claim in enumerate(claims)
        for place, case in enumerate(claim.cases)
        if case.p is not None
    }
    adjusted = holm(chances)
    return [
        replace(
            claim,
            cases=[
                replace(case, corrected=adjusted.get((number, place)))
                for place, case in enumerate(claim.cases)
            ],
        )
        for number, claim in enumerate(claims)
    ]
