"""How a run is read: where its curve ends, when it is at an accuracy, and what energy it took.

With two classes per device accuracies jump from one evaluation to the next, so they are read off means: the end is
the mean over the last tenth, and a target is reached where the mean over as many evaluations is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fedpmt.devices.fleet import Watts
from fedpmt.report.tables import Milestone, evaluated, uploaded
from fedpmt.resources import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fedpmt.records import DeviceRecord, RunRecord

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


@dataclass(frozen=True)
class Arrival:
    """When a run is at an accuracy; where it never is, its last round."""

    round: int
    seconds: float
    reached: bool

    @classmethod
    def of(cls, run: RunRecord, target: float, curve: Sequence[tuple[int, float]]) -> Arrival:
        """Find the first point of a run's curve, of rounds and accuracies, that is at the target."""
        first = next((place for place, height in curve if height >= target - ROUNDING), None)
        place = first or run.rounds[-1].round
        return cls(place, run.rounds[place - 1].virtual_seconds, first is not None)


def smooth(run: RunRecord, window: int) -> list[tuple[int, float]]:
    """Rounds and the accuracy's mean over a number of evaluations around each; nothing where the run diverged."""
    found = [] if run.diverged else [(step.round, accuracy) for step, accuracy in evaluated(run)]
    half, means = window // 2, []
    for place in range(half, len(found) - half):
        around = found[place - half : place + half + 1]
        means.append((found[place][0], fmean(accuracy for _, accuracy in around)))
    return means


def log_ratios(
    ours: Mapping[int, Arrival], theirs: Mapping[int, Arrival], of: Callable[[Arrival], float]
) -> list[float]:
    """How many times as long they need as we do, as logarithms, on equal seeds.

    A run that never gets there is given its last round. That is too early, so such a pair may lower the lead of the
    other run but not turn it round. Pairs in which neither gets there are left out.

    >>> early, late, never = Arrival(10, 10.0, True), Arrival(20, 40.0, True), Arrival(99, 30.0, False)
    >>> found = log_ratios({0: early, 1: never}, {0: late, 1: late}, lambda one: one.seconds)
    >>> [round(math.exp(one), 2) for one in found]
    [4.0, 1.0]
    """
    found = []
    for seed in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[seed], theirs[seed]
        if not (mine.reached or other.reached):
            continue
        value = math.log(of(other) / of(mine))
        found.append(
            value if mine.reached and other.reached else max(0.0, value) if mine.reached else min(0.0, value)
        )
    return found


def fluctuation(run: RunRecord) -> float | None:
    """The standard deviation of the steps between consecutive evaluations, over the second half of a run."""
    accuracies = [accuracy for _, accuracy in evaluated(run)]
    steps = [after - before for before, after in pairwise(accuracies[len(accuracies) // 2 :])]
    return None if run.diverged or len(steps) < 2 else stdev(steps)


def accuracy_at(run: RunRecord, seconds: float) -> float:
    """The trailing mean at the last evaluation up to a virtual time; 0 before the first one."""
    if run.diverged:
        return guess(run)
    every = evaluated(run)
    means = trailing([accuracy for _, accuracy in every])
    until = seconds * (1 + ROUNDING)
    there = [mean for (step, _), mean in zip(every, means, strict=True) if step.virtual_seconds <= until]
    return there[-1] if there else 0.0


WATTS = Watts(computing=3.0, sending=1.2, idle=0.4)
"""What every device draws, for energy on pages: the phone of docs/fleets.md."""


def joules(run: RunRecord, rounds: int | None = None) -> float:
    """The energy of the devices, in the first rounds or in all, as the simulator counts it where a fleet states watts.

    Records without watts have all that it takes: how long each device trained, sent and waited.
    """
    steps = run.rounds if rounds is None else [step for step in run.rounds if step.round <= rounds]
    deadline = run.settings.get("deadline")
    return sum(_joules(device, step.round_seconds, deadline) for step in steps for device in step.devices)


def _joules(device: DeviceRecord, round_seconds: float, deadline: float | None) -> float:
    waits = device.started is None  # on a clock of events nobody does
    share = 1.0  # of its work that a device does before it is given up
    if device.outcome != "arrived" and device.seconds:
        share = min(1.0, (round_seconds if waits else deadline or device.seconds) / device.seconds)
    training = max(0.0, device.seconds - device.transfer_seconds)
    waiting = max(0.0, round_seconds - share * device.seconds) if waits else 0.0
    return share * WATTS.joules(training, device.transfer_seconds) + WATTS.joules(0.0, 0.0, waiting)
