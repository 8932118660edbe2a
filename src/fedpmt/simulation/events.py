"""A clock of events: devices start when free, replies arrive when they are ready, and the server steps by its rule.

In a simulation it is known how long a device takes when it starts, so a server step can be laid out before anybody
trains: who starts from which version of the model, who ends when, and whose replies are folded. What is in the air
between two steps are plain values, which a checkpoint holds together with the versions of the model that those devices
started from. On real devices the network says who ends when (`fedpmt.flower.events`), and `Replay` plays what it said
once more.
"""

from __future__ import annotations

import math
import os
from bisect import insort
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fedpmt.methods.base import Round
from fedpmt.models.trees import weights_sha256
from fedpmt.resources import ROUNDING
from fedpmt.seeds import Seeds
from fedpmt.settings import parse_staleness
from fedpmt.simulation.cohort import Places, Verdict, assign, conclude, draw_cohort, send_base
from fedpmt.types import MODEL, SettingError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.records import DeviceRecord, Outcome, RoundRecord
    from fedpmt.simulation.cohort import Assignment
    from fedpmt.simulation.executors import Pending
    from fedpmt.simulation.loop import Federation, Progress
    from fedpmt.training.messages import Reply

MOST_LOST = 10
"""A step ends when this many times as many replies are lost as devices are at work: it might wait for ever."""

DIGEST_LENGTH = 16
"""Hexadecimal digits of a reply's digest."""

AHEAD = 2
"""Replies per worker that are computed, or wait for it, at a time."""

Key = tuple[int, int, int]
"""The version of the model that a device started from, the draw of that version, and the device."""


@dataclass(frozen=True)
class Flight:
    """One device at work. Flights are kept in the order of their ends, and of their starts where these are equal."""

    ends: float  # when it replies or is given up, in virtual seconds; infinity while nobody knows
    number: int  # devices that had started before it
    device: int
    level: int
    version: int  # of the model that it started from: the server steps before
    turn: int  # which draw of that version it was in
    started: float
    outcome: Outcome
    gets_base: bool  # whether it had to download the model's frozen base

    @property
    def key(self) -> Key:
        """What tells it apart from all others of a run."""
        return self.version, self.turn, self.device


ORDER = attrgetter("ends", "number")
"""Of flights: by what tells two of them apart. Comparing all fields would take much of a small server step."""


@dataclass(frozen=True)
class Flights:
    """What is in the air between two server steps."""

    devices: tuple[Flight, ...] = ()  # in order
    versions: Mapping[int, Progress] = field(default_factory=dict)  # those that they started from
    started: int = 0  # devices so far


@dataclass
class Step:
    """A server step that is being laid out."""

    progress: Progress  # before it
    flights: Flights
    now: float
    due: float  # when the server steps at the latest
    air: list[Flight]  # in order
    ended: list[Flight] = field(default_factory=list)
    arrived: int = 0
    turn: int = 0  # draws so far
    started: int = 0


class EventClock:
    """Lays out server steps. It keeps only what it could find out again: a resume begins with a new one."""

    sends_base = True  # whether devices have to download the model's frozen base

    def __init__(self, federation: Federation, transport: float = 0.0) -> None:
        self._federation = federation
        _ = federation.server_models  # copied here, and not while workers copy the same modules
        self._transport = transport  # seconds of an interval that are not training
        self._assignments: dict[Key, Assignment] = {}
        self._running: dict[Key, Pending[tuple[Reply, Any]]] = {}

    def open(self, progress: Progress) -> tuple[Progress, Round, list[Assignment], Verdict]:
        """Let devices start and end until the server steps.

        Returns:
            The progress with what is in the air afterwards; the round; who has ended, in that order; and how.
        """
        flights = progress.flights or Flights()
        now = progress.virtual_seconds
        due = now + self._federation.interval
        step = Step(progress, flights, now, due, self._in_the_air(flights), started=flights.started)
        while self._goes_on(step):
            # With an interval, work is handed out when the server steps.
            if step.turn == 0 or math.isinf(due):
                self._start(step)
            if math.isinf(due) and not step.air:
                break  # nobody can start
            self._end_next(step)
        assignments = [self._assignment(progress, flight) for flight in step.ended]
        for flight in step.ended:
            del self._assignments[flight.key]
        round_ = self._round(progress.rounds, 0, [flight.device for flight in step.ended])
        outcomes = tuple(flight.outcome for flight in step.ended)
        return self._after(step), round_, assignments, Verdict(outcomes, step.now - now)

    def _goes_on(self, step: Step) -> bool:
        """Whether the server does not step yet."""
        settings = self._federation.settings
        if math.isfinite(step.due):
            return step.now < step.due
        lost = len(step.ended) - step.arrived
        return step.arrived != settings.buffer and lost < MOST_LOST * (settings.concurrency or 1)

    def _in_the_air(self, flights: Flights) -> list[Flight]:
        """Who is still at work, in order."""
        return list(flights.devices)

    def _reachable(self, step: Step) -> Fleet:
        """The fleet, with who can be reached now."""
        fleet, traces = self._federation.fleet, self._federation.traces
        return fleet if traces is None else replace(fleet, reachable=traces.reachable(step.now))

    def _start(self, step: Step) -> None:
        """Let as many devices start as there are places free, from the model as it is."""
        settings, index = self._federation.settings, step.progress.rounds
        busy = {flight.device for flight in step.air}
        places = Places((settings.concurrency or 1) - len(step.air), step.started, busy)
        turn, step.turn = step.turn, step.turn + 1
        if places.free <= 0:
            return
        fleet, round_ = self._reachable(step), self._round(index, turn)
        drawn = draw_cohort(settings, fleet, round_, places=places)
        before = replace(step.progress, virtual_seconds=step.now)
        holders, ended = step.progress.holders or {}, {flight.device for flight in step.ended}
        asked = [
            self._ask(before, device, round_, device.id not in holders and device.id not in ended)
            for device in drawn
        ]
        flights = self._send_off(asked, round_, step.started)
        step.started += len(flights)
        for one, flight in zip(asked, flights, strict=True):
            self._assignments[flight.key] = one
            if one.able:
                insort(step.air, flight, key=ORDER)
            else:
                # It says so at once, and its place stays free until the next event.
                step.ended.append(flight)

    def _send_off(self, asked: Sequence[Assignment], round_: Round, before: int) -> list[Flight]:
        """Let these devices begin, after as many as `before`."""
        outcomes = self._federation.settle(list(asked), round_).outcomes
        pairs = enumerate(zip(asked, outcomes, strict=True), before)
        return [make_flight(one, outcome, number, self._end(one)) for number, (one, outcome) in pairs]

    def _end_next(self, step: Step) -> None:
        """Go to the next instant at which somebody ends, and let all that end in it do so, or to the step's end."""
        if not step.air or step.air[0].ends > step.due * (1 + ROUNDING):
            step.now = step.due if math.isfinite(step.due) else step.now
            return
        step.now = max(step.now, step.air[0].ends)
        # Nobody starts anew between two that end together: their replies may make the server step.
        while step.air and step.air[0].ends <= step.now and step.arrived != self._federation.settings.buffer:
            flight = step.air.pop(0)
            step.ended.append(flight)
            step.arrived += flight.outcome == "arrived"

    def _after(self, step: Step) -> Progress:
        """The progress with what is in the air after a step, and the versions of the model that this needs."""
        before = step.progress
        needed = {flight.version for flight in step.air}
        versions = {**step.flights.versions, before.rounds: replace(before, flights=None)}
        kept = {version: one for version, one in versions.items() if version in needed}
        return replace(before, flights=Flights(tuple(step.air), kept, step.started))

    def _round(self, index: int, turn: int, cohort: Sequence[int] = ()) -> Round:
        federation = self._federation
        seeds = Seeds(federation.settings.seed, index, turn=turn)
        price, momentum = federation.planner.price, federation.momentum
        interval = federation.interval - self._transport
        return Round(index, price, seeds, tuple(cohort), momentum, interval)

    def _ask(self, progress: Progress, device: Device, round_: Round, gets_base: bool) -> Assignment:
        """Give a device its task; the clock of `progress` shows when it starts."""
        federation = self._federation
        one = replace(assign(federation, progress, device, round_), started=progress.virtual_seconds)
        if federation.has_base and gets_base:
            before = replace(progress, holders=None)
            (one,) = send_base(federation, before, [one], travels=self.sends_base)
        return one

    def _end(self, one: Assignment) -> float:
        """When a device replies or is given up; one that fails is waited for as if it would still come."""
        deadline = self._federation.settings.deadline
        seconds = one.seconds if deadline is None else min(one.seconds, deadline)
        return (one.started or 0.0) + one.base_seconds + seconds

    def _assignment(self, progress: Progress, flight: Flight) -> Assignment:
        """What a device was asked to do; after a resume it is found again from the model that it started from."""
        if flight.key not in self._assignments:
            federation, flights = self._federation, progress.flights or Flights()
            before = flights.versions.get(flight.version, progress)
            device = federation.fleet.device(flight.device)
            if federation.settings.level_draw == "round":
                device = federation.fleet.at_level(flight.device, flight.level)
            round_ = self._round(flight.version, flight.turn)
            before = replace(before, virtual_seconds=flight.started)
            self._assignments[flight.key] = self._ask(before, device, round_, flight.gets_base)
        return self._assignments[flight.key]

    def train(self, arrived: Sequence[Assignment], progress: Progress) -> Iterator[Reply]:
        """The replies of a step in the order of their arrival, each with how late it is."""
        discount = parse_staleness(self._federation.settings.staleness)
        for one, reply in zip(arrived, self._replies(arrived, progress), strict=True):
            late = progress.rounds - one.version
            sent = one.task.tensors.get(MODEL) if late else None
            yield replace(reply, staleness=late, discount=discount(late), sent=sent)

    def _replies(self, arrived: Sequence[Assignment], progress: Progress) -> Iterator[Reply]:
        """Compute replies.

        Workers go on with those that arrive in later steps: which ones these are is known, and so is what they train.
        """
        federation, running = self._federation, self._running
        begun = set(running)
        missing = [one for one in arrived if key_of(one) not in begun]
        coming = chain(missing, self._next(progress, begun))
        for one in arrived:
            key = key_of(one)
            while key not in running or len(running) < self._ahead:
                other = next(coming, None)
                if other is None:
                    break
                running[key_of(other)] = federation.begin(other)
            yield from federation.train([one], [running.pop(key).result()])

    @cached_property
    def _ahead(self) -> int:
        """How many replies are computed or wait, at most, but for those of a step."""
        settings = self._federation.settings
        workers = 1 if settings.executor == "plain" else settings.workers or os.cpu_count() or 1
        return 1 if workers == 1 else AHEAD * workers

    def _next(self, progress: Progress, begun: Collection[Key]) -> Iterator[Assignment]:
        """Those that arrive in later steps and that nobody has begun to compute."""
        last = progress.rounds + 1 >= self._federation.settings.rounds
        for flight in () if last else (progress.flights or Flights()).devices:
            if flight.outcome == "arrived" and flight.key not in begun:
                yield self._assignment(progress, flight)


def make_flight(one: Assignment, outcome: Outcome, number: int, ends: float) -> Flight:
    """Make the flight of a device that starts, after `number` others."""
    gets_base, device = bool(one.base_bytes or one.base_operations), one.device
    return Flight(
        ends, number, device.id, device.level, one.version, one.turn, one.started or 0.0, outcome, gets_base
    )


def reply_digest(reply: Reply) -> str:
    """A few digits that tell a reply from others, by the bits of its update."""
    return weights_sha256(reply.update)[:DIGEST_LENGTH]


class Replay(EventClock):
    """Plays the arrivals of a deployment in their recorded order: the same tasks, the same replies, the same steps."""

    sends_base = False

    def __init__(self, federation: Federation, steps: Sequence[RoundRecord], transport: float = 0.0) -> None:
        super().__init__(federation, transport)
        self._steps = steps
        # The last step in which somebody ends who started from a version.
        self._last = {one.version: number for number, step in enumerate(steps) for one in step.devices}

    def open(self, progress: Progress) -> tuple[Progress, Round, list[Assignment], Verdict]:
        """Let those end who ended in the recorded step, in that order."""
        number, before = progress.rounds, progress.flights or Flights()
        step = self._steps[number]
        versions = {**before.versions, number: replace(progress, flights=None)}
        assignments = [self._find(versions, one) for one in step.devices]
        kept = {version: one for version, one in versions.items() if self._last.get(version, -1) > number}
        flights = Flights((), kept, before.started + len(assignments))
        round_ = self._round(number, 0, [one.device for one in step.devices])
        outcomes = tuple(one.outcome for one in step.devices)
        return replace(progress, flights=flights), round_, assignments, Verdict(outcomes, step.round_seconds)

    def _find(self, versions: Mapping[int, Progress], one: DeviceRecord) -> Assignment:
        """What a device was asked to do, and what it did of it."""
        version, started = one.version or 0, one.started or 0.0
        before = replace(versions[version], virtual_seconds=started)
        device = replace(self._federation.fleet.device(one.device), speed=one.speed, level=one.level)
        gets_base = one.device not in (before.holders or {})
        asked = self._ask(before, device, self._round(version, one.turn), gets_base)
        part = next((part for part in asked.task.offer if part.label == one.part), None)
        if part is None or asked.samples != one.samples:
            offer = ", ".join(part.label for part in asked.task.offer)
            raise SettingError(
                f"device {one.device} was asked for {one.part} with {one.samples} samples, and would be asked here for "
                f"{offer} with {asked.samples}"
            )
        done = conclude(self._federation, asked, part, one.seconds)
        return replace(done, able=asked.able, reason=one.reason, digest=one.digest)

    def train(self, arrived: Sequence[Assignment], progress: Progress) -> Iterator[Reply]:
        """The replies of a step; one that is not the recorded one, to the bit, is an error."""
        for one, reply in zip(arrived, super().train(arrived, progress), strict=True):
            if one.digest and one.digest != reply_digest(reply):
                raise SettingError(
                    f"device {one.device.id} does not reply what it replied in server step {progress.rounds + 1}: "
                    "replies have the same bits on the same kind of machine, with the same versions"
                )
            yield reply


def key_of(one: Assignment) -> Key:
    """What tells a device's work apart from all other of a run."""
    return one.version, one.turn, one.device.id
