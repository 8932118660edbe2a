"""The clock of events on real devices: the simulator's own steps, with the network to say who ends when.

Nobody waits for a round. Each free node gets a task, answers are collected as they come, and the server steps by the
simulator's rule. Virtual seconds are real ones here. What is in the air when the server is killed is dropped: a resumed
run hands out new work from its last step on.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from logging import INFO
from typing import TYPE_CHECKING

from flwr.common.logger import log

from fedpmt.flower.answers import Post
from fedpmt.flower.exchange import NO_ROOM
from fedpmt.flower.strategy import NO_DEADLINE, TRAIN_SECONDS
from fedpmt.simulation.events import ORDER, EventClock, Flights, key_of, make_flight, reply_digest
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flwr.app import Message
    from flwr.serverapp import Grid

    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.flower.answers import Missing
    from fedpmt.flower.deployment import Deployment
    from fedpmt.flower.exchange import Exchange
    from fedpmt.methods.base import Round
    from fedpmt.simulation.cohort import Assignment, Verdict
    from fedpmt.simulation.events import Flight, Key, Step
    from fedpmt.simulation.loop import Federation, Progress
    from fedpmt.simulation.runner import Journal
    from fedpmt.training.messages import Reply

POLL_SECONDS = 1.0
"""How often the SuperLink is asked for answers; nodes themselves look for messages every three seconds."""


@dataclass(frozen=True)
class Network:
    """Where tasks go and answers come from."""

    grid: Grid
    exchange: Exchange
    deployment: Deployment
    fleet: Fleet  # as the settings have it


def play_steps(journal: Journal) -> None:
    """Play all server steps that are missing."""
    while journal.stopped is None:
        journal.add(*journal.federation.play(journal.progress))


class GridClock(EventClock):
    """Steps when real devices have answered."""

    sends_base = False  # nodes make it themselves

    def __init__(self, federation: Federation, network: Network) -> None:
        transport = network.deployment.transport_seconds
        if transport >= federation.interval:
            raise SettingError(
                f"step-every = {federation.interval:g} is refused: transport-seconds = {transport:g} leaves "
                "nothing of it"
            )
        super().__init__(federation, transport)
        self._network, self._roster = network, network.exchange.roster
        self._post: Post[Key] = Post()
        self._seconds = federation.settings.deadline or NO_DEADLINE  # that a task is waited for
        self._origin: float | None = None  # of virtual seconds, on this process's clock
        self._offered: set[int] = set()  # who was online when devices were drawn last
        self._landed: dict[Key, Reply] = {}

    def open(self, progress: Progress) -> tuple[Progress, Round, list[Assignment], Verdict]:
        """Hand out work and collect answers until the server steps."""
        if self._origin is None:
            self._origin = time.monotonic() - progress.virtual_seconds
            dropped = sorted(flight.device for flight in (progress.flights or Flights()).devices)
            if dropped:
                log(
                    INFO, "the server was stopped while devices %s were at work; they are asked anew", dropped
                )
        opened = super().open(progress)
        outcomes = opened[-1].outcomes
        log(INFO, "server step %s: %s replies", progress.rounds + 1, outcomes.count("arrived"))
        return opened

    def _in_the_air(self, flights: Flights) -> list[Flight]:
        """Who is still at work; not those whom another process has asked, since their answers go nowhere."""
        return [flight for flight in flights.devices if flight.key in self._assignments]

    def _reachable(self, step: Step) -> Fleet:
        """The fleet as nodes describe themselves, with those that are online; the first of them is waited for."""
        network = self._network
        if step.air:
            self._roster.poll(network.grid)
        else:
            self._roster.wait(network.grid, 1, network.deployment.wait_seconds)
        self._offered = set(self._roster.online())
        self._tick(step)
        by_level = self._federation.settings.assign == "level"
        return self._roster.fleet(network.fleet, keep_levels=by_level)

    def _ask(self, progress: Progress, device: Device, round_: Round, gets_base: bool) -> Assignment:
        one = super()._ask(progress, device, round_, gets_base)
        return one if one.able else replace(one, reason=NO_ROOM)

    def _send_off(self, asked: Sequence[Assignment], round_: Round, before: int) -> list[Flight]:
        """Send these devices their tasks."""
        flights = []
        for number, one in enumerate(asked, before):
            flight = make_flight(one, "arrived" if one.able else "failed", number, math.inf)
            flights.append(flight)
            if one.able:
                message = self._network.exchange.write(one, max(TRAIN_SECONDS, self._seconds))
                self._post.send(self._network.grid, flight.key, message, self._seconds)
        return flights

    def _end_next(self, step: Step) -> None:
        """Wait until somebody ends, the step is due, or somebody has come for whom there is a place."""
        while True:
            self._tick(step)
            for key, answer in self._post.collect(self._network.grid):
                self._land(step, key, answer)
            if step.now >= step.due or (step.air and step.air[0].ends <= step.now):
                super()._end_next(step)
                return
            if self._finds_newcomers(step):
                return
            time.sleep(max(0.0, min(POLL_SECONDS, step.due - step.now)))

    def _tick(self, step: Step) -> None:
        """Let the step's clock show the time."""
        assert self._origin is not None
        step.now = max(step.now, time.monotonic() - self._origin)

    def _land(self, step: Step, key: Key, answer: Message | Missing) -> None:
        """Let a device end with its answer, or without one."""
        exchange, one = self._network.exchange, self._assignments[key]
        judgement = outcome, _, reply = exchange.judge(one, answer)
        if outcome in ("failed", "refused"):
            self._roster.doubt(one.device.id)
        one = exchange.account(one, judgement, step.now - (one.started or 0.0))
        if reply is not None:
            self._landed[key] = reply
            one = replace(one, digest=reply_digest(reply))
        self._assignments[key] = one
        step.air = [
            replace(flight, ends=step.now, outcome=outcome) if flight.key == key else flight
            for flight in step.air
        ]
        step.air.sort(key=ORDER)

    def _replies(self, arrived: Sequence[Assignment], progress: Progress) -> Iterator[Reply]:
        """What devices have sent."""
        return (self._landed.pop(key_of(one)) for one in arrived)

    def _finds_newcomers(self, step: Step) -> bool:
        """Whether a place is free for a device that was not online when devices were drawn last."""
        concurrency = self._federation.settings.concurrency or 1
        if math.isfinite(step.due) or len(step.air) >= concurrency:
            return False
        self._roster.poll(self._network.grid)
        online = set(self._roster.online())
        self._offered &= online  # whoever leaves may come back
        return bool(online - self._offered - {flight.device for flight in step.air})

    def _after(self, step: Step) -> Progress:
        """The progress with who is in the air; a resumed run does not need what they started from."""
        progress = super()._after(step)
        flights = progress.flights or Flights()
        return replace(progress, flights=replace(flights, versions={}))
