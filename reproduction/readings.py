"""How a run is read: where its curve ends, when it is at an accuracy, and what energy it took.

With two classes per device accuracies jump from one evaluation to the next, so they are read off means: the end is
the mean over the last tenth, and a target is reached where the mean over as many evaluations is there.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from fedpmt.devices.fleet import Watts
from fedpmt.report.tables import Milestone, evaluated, uploaded
from fedpmt.resources import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
