"""A round before anybody trains: who is asked, for what, what that takes of each device, and who arrives in time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fedpmt.devices.fleet import drifted
from fedpmt.parts.part import GLOBAL
from fedpmt.resources import ROUNDING, Resources
from fedpmt.settings import parse_drift
from fedpmt.training.messages import Client, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.methods.base import Round
    from fedpmt.parts.part import Part
    from fedpmt.pricing.meter import Plan
    from fedpmt.records import Outcome
    from fedpmt.settings import Settings
    from fedpmt.simulation.loop import Federation, Progress

Sampler: TypeAlias = "Callable[[Fleet, int, int, np.random.Generator, Collection[int]], np.ndarray]"
"""Draws a number of devices, given how many were drawn before and which of them are still at work."""

CANDIDATES = 2
"""FedCS polls more devices than it takes; this many times the cohort."""


def stratified(
    fleet: Fleet, count: int, before: int, rng: np.random.Generator, busy: Collection[int] = ()
) -> np.ndarray:
    """The same number from each level, |S_i| = |S| / |I|; remainders go to the levels in turn."""
    levels = len(fleet.members)
    chosen: list[np.ndarray] = []
    for level, members in enumerate(fleet.members):
        turn = (level - before) % levels
        wanted = count // levels + (turn < count % levels)
        if wanted or not busy:
            chosen.append(_available(fleet, members, wanted, rng, busy))
    cohort = np.concatenate(chosen)
    if len(cohort) < count:
        # A level too small for its share: the others make up for it.
        others = np.setdiff1d(np.arange(len(fleet)), cohort)
        cohort = np.concatenate([cohort, _available(fleet, others, count - len(cohort), rng, busy)])
    return np.sort(cohort)


def uniform(
    fleet: Fleet, count: int, before: int, rng: np.random.Generator, busy: Collection[int] = ()
) -> np.ndarray:
    """Devices uniformly at random."""
    return np.sort(_available(fleet, None, count, rng, busy))


def fastest(
    fleet: Fleet, count: int, before: int, rng: np.random.Generator, busy: Collection[int] = ()
) -> np.ndarray:
    """Poll some devices at random and take the fastest of them (FedCS)."""
    polled = _available(fleet, None, min(len(fleet), CANDIDATES * count), rng, busy)
    return np.sort(polled[np.argsort(-fleet.speeds[polled], kind="stable")[:count]])


SAMPLERS: dict[str, Sampler] = {"stratified": stratified, "uniform": uniform, "fastest": fastest}


@dataclass(frozen=True)
class Places:
    """How many more devices are asked while others are at work: on a clock of events."""

    free: int
    before: int  # devices that were asked so far
    busy: Collection[int]  # those at work


def draw_cohort(
    settings: Settings,
    fleet: Fleet,
    round_: Round,
    chosen: Sequence[int] | None = None,
    places: Places | None = None,
) -> list[Device]:
    """Who is asked, in device order, each on its level of this round; `chosen` where the method decides."""
    if chosen is not None:
        there = fleet.reachable
        return [fleet.device(int(device)) for device in sorted(chosen) if there is None or there[device]]
    busy: Collection[int] = ()
    if places is not None:
        wanted, before, busy = places.free, places.before, places.busy
    else:
        wanted = min(len(fleet.speeds), int(np.ceil(settings.cohort * settings.over_select)))
        before = round_.index * wanted
    rng = round_.rng("cohort")
    if settings.level_draw == "fixed":
        ids = SAMPLERS[settings.sampling](fleet, wanted, before, rng, busy)
        return [fleet.device(int(device)) for device in ids]
    ids = uniform(fleet, wanted, before, rng, busy)
    # Levels come in turn where devices start one by one.
    turns = np.arange(len(ids)) + (0 if places is None else before)
    levels = rng.permutation(turns % len(fleet.level_speeds)) + 1
    return [fleet.at_level(int(device), int(level)) for device, level in zip(ids, levels, strict=True)]


def _available(
    fleet: Fleet, members: np.ndarray | None, count: int, rng: np.random.Generator, busy: Collection[int] = ()
) -> np.ndarray:
    """Up to `count` devices that can be reached, without a look at the whole population unless it was traced."""
    if fleet.reachable is not None:
        members = np.flatnonzero(fleet.reachable) if members is None else members[fleet.reachable[members]]
    population = len(fleet) if members is None else len(members)
    key = 0 if fleet.availabilities is None else int(rng.integers(2**63))
    polled = min(population, count)
    while True:
        drawn = rng.choice(population, size=polled, replace=False)
        drawn = drawn if members is None else members[drawn]
        if busy:
            drawn = np.array([device for device in drawn if device not in busy], dtype=drawn.dtype)
        if fleet.availabilities is None:
            if len(drawn) >= count or polled == population:
                return drawn[:count]
            polled = min(population, 2 * polled + 8)
            continue
        # By device, not by poll: who cannot be reached stays so when more are polled.
        chance = [np.random.default_rng((key, int(device))).random() for device in drawn]
        reachable = drawn[chance < fleet.availabilities[drawn]]
        if len(reachable) >= count or polled == population:
            return reachable[:count]
        polled = min(population, 2 * polled + 8)


@dataclass(frozen=True)
class Assignment:
    """A device of the round with its task, and what the clock makes of it."""

    device: Device
    task: Task
    part: Part
    samples: int
    plan: Plan  # what it may spend
    usage: Resources  # what it spends
    seconds: float  # T_k, training and transfer
    transfer: float  # of these seconds, on the link
    bytes_down: int
    bytes_up: int
    steps: int  # τ_k
    able: bool = True  # whether the part fits into the device's memory
    reach: float = math.inf  # seconds from the round's start for which it can be reached
    base_bytes: int = 0  # what it downloads before, once: the model's frozen base
    base_operations: float = 0.0  # what it computes before, once: the base's outputs, where these are kept
    base_seconds: float = 0.0  # of both, which `seconds` don't contain
    base_transfer: float = 0.0  # of these seconds, on the link
    made: int | None = (
        None  # the round of the kept outputs of frozen layers that it trains on; None: this one
    )
    reason: str = ""  # why its reply did not count, where somebody said
    version: int = 0  # t, the round in which it was asked
    turn: int = 0  # which draw of that round it was in
    started: float | None = None  # on a clock of events: when, in virtual seconds
    digest: str = ""  # of a real device's reply on that clock


def assign(federation: Federation, progress: Progress, device: Device, round_: Round) -> Assignment:
    """Give a device its task, and find out what it will take."""
    settings, data = federation.settings, federation.problem.data
    samples = data.samples(device.id)
    speed = (progress.speeds or {}).get(device.id, device.speed)  # as the server knows it
    plan = federation.planner.plan(replace(device, id=0, name="", speed=speed), samples)
    known = settings.splitting == "server"
    client = Client(
        device.id,
        device.level if known else None,
        speed if known else None,
        samples,
        plan.meter.steps,
        data.label_counts(device.id) if federation.needs_labels else None,
        plan if known else None,
    )
    task = federation.method.assign(progress.state, client, round_)
    if plan.meter.extra is not None:
        task = replace(task, offer=tuple(plan.meter.complete(part) for part in task.offer))
    if progress.accepted is not None:
        task = replace(task, accepted_round=progress.accepted.get(device.id))
    drift = parse_drift(settings.drift)
    if drift is not None:
        device = drifted(device, drift, round_.index, settings.partition_seed)
    if federation.traces is not None:
        device, reach = federation.traces.meet(device, progress.virtual_seconds)
    part = task.offer[0] if len(task.offer) == 1 else choose(federation, device, task, samples)
    assignment = account(federation, device, task, part, samples, plan)
    found = replace(assignment, version=round_.index, turn=round_.rng.turn)
    return found if federation.traces is None else replace(found, reach=reach)


def choose(federation: Federation, device: Device, task: Task, samples: int) -> Part:
    """The part that a device takes of several on offer (Option II): the largest it can afford, else the smallest."""
    plan, price = federation.planner.plan(replace(device, id=0, name=""), samples), federation.planner.price
    # Parts on offer are complete: what the method's work adds to them is not to be added again.
    affordable = [part for part in task.offer[: plan.depth] if plan.meter.quote(part).usage <= plan.limit]
    if affordable:
        return max(affordable, key=lambda part: price(part).operations)
    return min(task.offer, key=lambda part: price(part).operations)


def account(
    federation: Federation,
    device: Device,
    task: Task,
    part: Part,
    samples: int,
    plan: Plan,
    *,
    reuses: bool = False,
) -> Assignment:
    """What it will take a device to do its task with this part; `reuses` where it has the frozen layers' outputs."""
    meter = plan.meter if plan.meter.device.speed == device.speed else replace(plan.meter, device=device)
    fewer = task.steps is not None or task.epochs is not None
    steps = steps_asked(federation, task, samples) if fewer else None
    quote = meter.quote(part, steps, reuses=reuses)
    usage, steps = quote.usage, meter.steps if steps is None else steps
    if usage.memory > device.memory:
        # It says so at once: nothing is sent and nobody waits.
        usage = Resources(usage.operations, memory=usage.memory)
        return Assignment(device, task, part, samples, plan, usage, 0.0, 0.0, 0, 0, steps, able=False)
    seconds, down, up = usage.seconds, quote.download, quote.upload
    return Assignment(device, task, part, samples, plan, usage, seconds, quote.transfer, down, up, steps)


def conclude(federation: Federation, one: Assignment, part: Part, seconds: float) -> Assignment:
    """The assignment of a real device with the part that it has trained, and the seconds that it took."""
    reuses = one.made is not None
    done = account(federation, one.device, one.task, part, one.samples, one.plan, reuses=reuses)
    return replace(
        one,
        part=part,
        usage=done.usage,
        seconds=seconds,
        transfer=0.0,
        bytes_down=done.bytes_down,
        bytes_up=done.bytes_up,
        steps=done.steps,
        able=done.able,
    )


def send_base(
    federation: Federation, progress: Progress, assignments: Sequence[Assignment], *, travels: bool = True
) -> list[Assignment]:
    """Let devices that are asked for the first time download the base of their model, and run it where that is kept.

    Without `travels` they have it already, and only the operations count.
    """
    planner, holders = federation.planner, progress.holders or {}
    prepared = []
    for one in assignments:
        if not one.able or one.device.id in holders:
            prepared.append(one)
            continue
        size = planner.structures[one.part.model].base_bytes if travels else 0
        work = planner.price.base_operations(one.samples) if one.part.model == GLOBAL else 0.0
        transfer = size / one.device.downlink
        running = planner.times.preparing(one.device, one.samples) if work and travels else 0.0
        prepared.append(
            replace(
                one,
                base_bytes=size,
                base_operations=work,
                base_seconds=transfer + running,
                base_transfer=transfer,
            )
        )
    return prepared


def steps_asked(federation: Federation, task: Task, samples: int) -> int:
    """The steps of a local round that a task asks for."""
    local = federation.local_settings
    if task.epochs is not None:
        local = replace(local, epochs=task.epochs)
    return local.steps(samples, task.steps)


@dataclass(frozen=True)
class Verdict:
    """What becomes of a round's devices, in the order they were given."""

    outcomes: tuple[Outcome, ...]
    round_seconds: float


def settle(
    seconds: Sequence[float],
    failed: Sequence[bool],
    deadline: float | None,
    wanted: int,
    base: Sequence[float] | None = None,
) -> Verdict:
    """Decide a round before anybody trains, from the seconds each device needs.

    Without a deadline the round lasts as long as its slowest device; with one, later replies are dropped
    and the round ends there, or sooner when all have arrived. Of an over-selected cohort the first
    `wanted` replies count. A device that fails is waited for as if it would still come.

    `base` are the seconds in which each device downloads the base before it begins, and runs it if it keeps what comes
    out. A deadline counts from then on: else a slow link would keep a device out for good.

    >>> settle([23.0, 26.4, 10.0], [False] * 3, deadline=26.5, wanted=3)
    Verdict(outcomes=('arrived', 'arrived', 'arrived'), round_seconds=26.4)
    >>> settle([50.0, 20.0, 10.0], [False] * 3, deadline=26.5, wanted=3)
    Verdict(outcomes=('late', 'arrived', 'arrived'), round_seconds=26.5)
    >>> settle([50.0, 20.0, 10.0], [False] * 3, deadline=26.5, wanted=3, base=[0.0, 0.0, 60.0])
    Verdict(outcomes=('late', 'arrived', 'arrived'), round_seconds=70.0)
    """
    before = [0.0] * len(seconds) if base is None else base
    ends = [time + wait for time, wait in zip(seconds, before, strict=True)]
    limit = math.inf if deadline is None else deadline * (1 + ROUNDING)
    outcomes: list[Outcome] = [
        "failed" if lost else "late" if time > limit else "arrived"
        for time, lost in zip(seconds, failed, strict=True)
    ]
    order = sorted((time, position) for position, time in enumerate(ends) if outcomes[position] == "arrived")
    for _, position in order[wanted:]:
        outcomes[position] = "surplus"
    if len(order) >= wanted:
        # Enough replies: nobody else is waited for.
        return Verdict(tuple(outcomes), order[wanted - 1][0] if wanted else 0.0)
    if deadline is not None:
        ends = [min(time, deadline) + wait for time, wait in zip(seconds, before, strict=True)]
    return Verdict(tuple(outcomes), max(ends, default=0.0))
