"""What is written down of a round: what it cost, who was in it, which layers were covered, how fast devices were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedpmt.parts.part import mask
from fedpmt.records import DeviceRecord, RoundRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.devices.fleet import Watts
    from fedpmt.records import Outcome
    from fedpmt.simulation.cohort import Assignment, Verdict
    from fedpmt.simulation.loop import Federation, Progress


def record_round(
    federation: Federation, progress: Progress, assignments: Sequence[Assignment], verdict: Verdict
) -> RoundRecord:
    """What the round that led to this progress cost, and who was in it."""
    structure = federation.problem.model.structure
    coverage = dict.fromkeys((layer.name for layer in structure.layers), 0)
    devices, operations, wasted = [], 0.0, 0.0
    for one, outcome in zip(assignments, verdict.outcomes, strict=True):
        share = 1.0  # of its work that it does before the round ends
        if outcome == "arrived":
            operations += one.usage.operations + one.base_operations
            for layer, trained in zip(coverage, mask(structure, one.part), strict=True):
                coverage[layer] += trained
        elif one.seconds:
            spent = max(0.0, verdict.round_seconds - one.base_seconds)
            if one.started is not None:
                spent = federation.settings.deadline or one.seconds
            share = min(1.0, spent / one.seconds)
            wasted += one.base_operations + one.usage.operations * share
        device = record_device(federation, one, outcome, progress.rounds - 1)
        if one.device.watts is not None:
            device = device.model_copy(update=spent_joules(one, one.device.watts, share, verdict))
        devices.append(device)
    return RoundRecord(
        round=progress.rounds,
        virtual_seconds=progress.virtual_seconds,
        round_seconds=verdict.round_seconds,
        bytes_up=sum(device.bytes_up for device in devices),
        bytes_down=sum(device.bytes_down for device in devices),
        overhead_bytes=sum(one.part.overhead_bytes for one in assignments),
        operations=operations,
        wasted_operations=wasted,
        joules=None
        if federation.fleet.watts is None
        else sum((device.joules or 0.0) + (device.idle_joules or 0.0) for device in devices),
        learning_rate=federation.rate(progress.rounds - 1),
        layers=coverage,
        devices=tuple(devices),
    )


def record_device(federation: Federation, one: Assignment, outcome: Outcome, version: int) -> DeviceRecord:
    """One device's line: what it did, and where there is a budget, what it spent of what it had.

    A budget is for a round, so that the base, which is downloaded once, doesn't count against it. `version` is that of
    the model that its reply is folded into.
    """
    budget, more = federation.planner.budget, dict[str, Any]()
    if budget is not None:
        used = one.seconds if budget.resource == "time" else one.usage.of(budget.resource)
        if budget.resource == "energy" and one.device.watts is not None:
            used = task_joules(one, one.device.watts)
        more = {"used": used, "budget": one.plan.limit.of(budget.resource)}
    if one.started is not None:
        late = version - one.version if outcome == "arrived" else None
        more |= {"started": one.started, "version": one.version, "turn": one.turn, "staleness": late}
    return DeviceRecord(
        device=one.device.id,
        level=one.device.level,
        speed=one.device.speed,
        part=one.part.label,
        samples=one.samples,
        seconds=one.seconds + one.base_seconds,
        transfer_seconds=one.transfer + one.base_transfer,
        outcome=outcome,
        bytes_up=one.bytes_up if outcome == "arrived" else 0,
        bytes_down=one.bytes_down + one.base_bytes,
        operations=one.usage.operations + one.base_operations,
        memory_bytes=int(one.usage.memory),
        reason=one.reason,
        digest=one.digest,
        **more,
    )


def task_joules(one: Assignment, watts: Watts) -> float:
    """The energy of a device's task, in the seconds it takes: on a real device these are measured."""
    return watts.joules(max(0.0, one.seconds - one.transfer), one.transfer)


def spent_joules(one: Assignment, watts: Watts, share: float, verdict: Verdict) -> dict[str, float]:
    """What a device spent in a round, as fields of its record: on its own work, and on waiting for the others.

    It stops with a `share` of its task when the round ends without it. On a clock of events nobody waits.
    """
    base = watts.joules(one.base_seconds - one.base_transfer, one.base_transfer)
    waiting = max(0.0, verdict.round_seconds - (share * one.seconds + one.base_seconds))
    if one.started is not None or not one.able:
        waiting = 0.0
    return {
        "joules": base + share * task_joules(one, watts),
        "idle_joules": watts.joules(0.0, 0.0, waiting),
    }


def add_holders(progress: Progress, assignments: Sequence[Assignment]) -> dict[int, int] | None:
    """Who has the base after this round: everybody it was ever sent to."""
    sent = {one.device.id: progress.rounds for one in assignments if one.base_bytes or one.base_operations}
    return {**(progress.holders or {}), **sent} if sent else progress.holders


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


def fit_speeds(
    federation: Federation, progress: Progress, assignments: Sequence[Assignment], verdict: Verdict
) -> dict[int, float]:
    """Speeds after this round, from the seconds that devices took; late ones were at least that slow."""
    settings = federation.settings
    speeds = dict(progress.speeds or {})
    for one, outcome in zip(assignments, verdict.outcomes, strict=True):
        if outcome in ("failed", "refused"):
            continue
        # What the same steps would take at speed 1.
        work = (one.usage.seconds - _transfer(one)) * one.device.speed
        late = LATE * (settings.deadline or one.seconds)
        seconds = late if outcome == "late" else one.seconds - one.transfer
        if work > 0 and seconds > 0:
            seconds = clamp_seconds(seconds, late if settings.deadline else None)
            before = speeds.get(one.device.id, float(federation.fleet.speeds[one.device.id]))
            speeds[one.device.id] = fit_speed(before, work / seconds, settings.speed_weight)
    return speeds


def _transfer(one: Assignment) -> float:
    times = one.plan.meter.times
    return times.transfer(one.device, one.usage.download, one.usage.upload)


def arrivals(assignments: Sequence[Assignment], verdict: Verdict) -> list[Assignment]:
    """Those whose replies count, in device order."""
    pairs = zip(assignments, verdict.outcomes, strict=True)
    return [one for one, outcome in pairs if outcome == "arrived"]
