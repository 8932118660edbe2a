"""How a run's curve is read: where it ends, and when it is at an accuracy.

With two classes per device accuracies jump from one evaluation to the next, so both are read off means: the end is
the mean over the last tenth, and a target is reached where the mean over as many evaluations is there.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from fedpmt.report.tables import Milestone, evaluated, uploaded
from fedpmt.resources import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.records import RunRecord

TAIL = 0.1
"""The share of the rounds, or of the evaluations, that a mean is over."""


def final(run: RunRecord) -> float:
    """The accuracy a run ends with; that of a guess where it diverged."""
    if run.diverged:
        return guess(run)
    every = evaluated(run)
    last = [accuracy for step, accuracy in every if step.round > (1 - TAIL) * len(run.rounds)]
    last = last or [accuracy for _, accuracy in every[-1:]]
    return sum(last) / len(last) if last else 0.0


def guess(run: RunRecord) -> float:
    """What a run that diverged is worth from then on: it predicts nothing."""
    return (run.result.accuracy if run.result else None) or 0.0


def trailing(values: Sequence[float]) -> list[float]:
    """At each value the mean with those before it, over a tenth of all values.

    >>> trailing([0.0, 1.0, 0.0, 1.0])
    [0.0, 1.0, 0.0, 1.0]
    >>> trailing([0.0, 1.0] * 10)[:4]
    [0.0, 0.5, 0.5, 0.5]
    """
    window = max(1, math.floor(TAIL * len(values) + ROUNDING))
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def reaching(run: RunRecord, target: float) -> Milestone | None:
    """Where the trailing mean is first at the target; None where it never is, or where the run diverged."""
    if run.diverged:
        return None
    every = evaluated(run)
    totals = {step.round: total for step, total in zip(run.rounds, uploaded(run), strict=True)}
    for (step, _), mean in zip(every, trailing([accuracy for _, accuracy in every]), strict=True):
        if mean >= target - ROUNDING:
            return Milestone(step.round, step.virtual_seconds, totals[step.round])
    return None
