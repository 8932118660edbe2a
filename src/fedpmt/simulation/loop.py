"""The round loop: sample, assign, train, settle the clock, fold, evaluate, record."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.methods.base import Method, Prototype, Round, Server, Setup
from fedpmt.resources import ROUNDING
from fedpmt.seeds import Seeds
from fedpmt.settings import parse_step_every
from fedpmt.simulation.bookkeeping import add_holders, arrivals, fit_speeds, record_round
from fedpmt.simulation.cohort import assign, draw_cohort, send_base, settle
from fedpmt.simulation.evaluation import classes_by_level, evaluate, find_statistics
from fedpmt.simulation.events import EventClock
from fedpmt.simulation.executors import Unit
from fedpmt.simulation.prefixes import KeptPrefixes, keep_prefixes, reuse_prefixes
from fedpmt.simulation.problem import sizes_of
from fedpmt.training.local import LocalWork, Site, local_settings, schedule_rate
from fedpmt.training.loop import LOSS
from fedpmt.training.optimizers import SGD
from fedpmt.training.privacy import epsilon

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from fedpmt.devices.fleet import Fleet
    from fedpmt.devices.traces import Traces
    from fedpmt.methods.base import Predictor, Step
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.pricing.plan import Planner
    from fedpmt.records import RoundRecord, Stopped
    from fedpmt.settings import Settings
    from fedpmt.simulation.checkpoint import DeviceStore
    from fedpmt.simulation.cohort import Assignment, Verdict
    from fedpmt.simulation.events import Flights
    from fedpmt.simulation.executors import Executor, Pending
    from fedpmt.simulation.problem import Problem
    from fedpmt.training.batches import PlacedData
    from fedpmt.training.local import LocalSettings
    from fedpmt.training.messages import Reply, Task
    from fedpmt.types import Payload


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two rounds: all that a resume needs."""

    state: Any  # the method's
    rounds: int = 0  # finished
    virtual_seconds: float = 0.0
    accepted: dict[int, int] | None = None  # device -> the last round whose reply counted; None without state
    speeds: dict[int, float] | None = None  # κ_k as fitted to measured seconds, of devices that were asked
    holders: dict[int, int] | None = None  # device -> the round in which it got the base; None without one
    prefixes: KeptPrefixes | None = (
        None  # outputs of frozen layers that devices keep; None where they keep none
    )
    flights: Flights | None = None  # who is at work meanwhile, on a clock of events


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same from round to round."""

    settings: Settings
    problem: Problem
    data: PlacedData
    method: Method[Any, Any]
    fleet: Fleet
    planner: Planner
    executor: Executor
    store: DeviceStore
    replays: int = 0  # rounds, at most, that real devices have answered twice
    traces: Traces | None = None  # when devices can be reached and how fast they are, where that was given
    make_clock: Callable[[Federation], EventClock] = EventClock  # makes the clock of events

    def start(self) -> Progress:
        """Before the first round."""
        models = self.problem.models.items()
        known = self.settings.splitting == "server"
        setup = Setup(
            {name: Prototype(model.structure, model.initial()) for name, model in models},
            len(self.fleet),
            self.planner.price,
            self.data.public,
            self.data.validation,
            self.planner.weakest(self.fleet, self.settings.samples) if known else None,
            next(members for members in reversed(self.fleet.members) if len(members)) if known else None,
            self.settings.batch,
            Seeds(self.settings.seed),
        )
        return Progress(self.method.init(setup))

    def play(self, progress: Progress) -> tuple[Progress, RoundRecord]:
        """One round of the federation, or one server step: the clock says who arrives when."""
        progress = progress if self.traces is None else self.wait(progress)
        if self.settings.clock == "events":
            progress, round_, assignments, verdict = self.events.open(progress)
            replies = self.events.train(arrivals(assignments, verdict), progress)
        else:
            round_, assignments = self.open(progress)
            if self.has_base:
                assignments = send_base(self, progress, assignments)
            if self.settings.prefix_tolerance is not None:
                assignments = reuse_prefixes(self, progress, assignments)
            verdict = self.settle(assignments, round_)
            replies = self.train(arrivals(assignments, verdict))
        return self.close(progress, round_, assignments, verdict, replies)

    def wait(self, progress: Progress) -> Progress:
        """Let virtual time pass until somebody can be reached whom the next round may ask; infinity: nobody ever."""
        if self.traces is None or (progress.flights is not None and progress.flights.devices):
            return progress
        now, start = progress.virtual_seconds, math.inf
        if self.chooses_cohort:
            round_ = Round(progress.rounds, self.planner.price, Seeds(self.settings.seed, progress.rounds))
            chosen = self.method.cohort(progress.state, round_)
            start = math.inf if chosen is None else self.traces.next_start(now, chosen)
        # Whom the method wants and nobody will ever reach is not waited for: it hears of an empty round.
        start = self.traces.next_start(now) if math.isinf(start) else start
        return replace(progress, virtual_seconds=start)

    def open(
        self, progress: Progress, reachable: Collection[int] | None = None
    ) -> tuple[Round, list[Assignment]]:
        """Who is asked for what, in device order; `reachable` where not all of the cohort can be."""
        seeds = Seeds(self.settings.seed, progress.rounds)
        round_ = Round(progress.rounds, self.planner.price, seeds, interval=self.interval)
        chosen = self.method.cohort(progress.state, round_) if self.chooses_cohort else None
        fleet = self.fleet
        if self.traces is not None:
            fleet = replace(fleet, reachable=self.traces.reachable(progress.virtual_seconds))
        devices = draw_cohort(self.settings, fleet, round_, chosen)
        if reachable is not None:
            devices = [device for device in devices if device.id in reachable]
        round_ = replace(round_, cohort=tuple(device.id for device in devices), momentum=self.momentum)
        return round_, [assign(self, progress, device, round_) for device in devices]

    def settle(self, assignments: list[Assignment], round_: Round) -> Verdict:
        """What becomes of each device on the clock: known before anybody trains."""
        chance = self.settings.failure
        failed = [
            not one.able
            or one.base_seconds + one.seconds > one.reach * (1 + ROUNDING)
            or (chance > 0 and bool(round_.rng("failure", one.device.id).random() < chance))
            for one in assignments
        ]
        seconds, base = [one.seconds for one in assignments], [one.base_seconds for one in assignments]
        wanted = len(seconds) if self.settings.clock == "events" else min(self.settings.cohort, len(seconds))
        return settle(seconds, failed, self.settings.deadline, wanted, base)

    def train(
        self, arrived: Sequence[Assignment], found: Iterable[tuple[Reply, Any]] | None = None
    ) -> Iterator[Reply]:
        """The local rounds of those whose replies count; others are known not to, and are not computed.

        What was begun before is `found`: its results, in the same order.
        """
        if found is None:
            units = (
                self.unit(
                    one.device.id,
                    one.task,
                    one.part,
                    one.samples,
                    one.version,
                    one.turn,
                    one.usage.operations,
                )
                for one in arrived
            )
            found = self.executor.train(self.work, units)
        for one, (reply, own) in zip(arrived, found, strict=True):
            if self.keeps_state:
                self.store.write(one.device.id, one.version, own)
            yield replace(reply, seconds=one.seconds, steps=one.steps, chances=one.task.chances)

    def begin(self, one: Assignment) -> Pending[tuple[Reply, Any]]:
        """Begin the local round of one device, whose reply is wanted some time."""
        unit = self.unit(
            one.device.id, one.task, one.part, one.samples, one.version, one.turn, one.usage.operations
        )
        return self.executor.submit(self.work, unit)

    def close(
        self,
        progress: Progress,
        round_: Round,
        assignments: list[Assignment],
        verdict: Verdict,
        replies: Iterable[Reply],
    ) -> tuple[Progress, RoundRecord]:
        """Fold what has arrived, in its order, take the server's step, and write down the round."""
        fold, losses = self.method.fold(progress.state, round_), list[float]()
        arrived = arrivals(assignments, verdict)
        for reply in replies:
            losses += [reply.metrics[LOSS]] if LOSS in reply.metrics else []
            fold.add(reply)
        step = fold.finish(self.server(arrived, progress.rounds))
        seconds, accepted, speeds = verdict.round_seconds, progress.accepted, None
        if self.settings.server_speed is not None:
            seconds += self.server_seconds(step.server_operations)
        if self.keeps_state:
            accepted = {**(accepted or {}), **{one.device.id: progress.rounds for one in arrived}}
        if self.settings.speeds != "stated":
            speeds = fit_speeds(self, progress, assignments, verdict)
        holders = add_holders(progress, assignments) if self.has_base else None
        prefixes = None
        if self.settings.prefix_tolerance is not None:
            prefixes = keep_prefixes(self, progress, arrived)
        now = progress.virtual_seconds + seconds
        after = Progress(
            step.state, progress.rounds + 1, now, accepted, speeds, holders, prefixes, progress.flights
        )
        record = record_round(self, after, assignments, verdict)
        return after, record.model_copy(update=self.measure(after, step, losses, seconds))

    def epsilon(self, progress: Progress) -> float:
        """The ε that a device has spent that was in every round and in every replay."""
        releases = min(self.settings.rounds, progress.rounds + self.replays)
        return epsilon(self.settings.dp_noise, releases, self.settings.dp_delta)

    def measure(
        self, progress: Progress, step: Step[Any], losses: list[float], seconds: float
    ) -> dict[str, Any]:
        """What is only known once a round is over, as fields of its record: metrics, and every so often a score."""
        settings = self.settings
        metrics = {**({LOSS: float(np.mean(losses))} if losses else {}), **step.metrics}
        if settings.dp_clip is not None and settings.dp_noise > 0:
            metrics["epsilon"] = self.epsilon(progress)
        fields = {
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
            "server_operations": step.server_operations,
            "round_seconds": seconds,
        }
        return {**fields, **evaluate(self, progress)} if self.is_due(progress) else fields

    def is_due(self, progress: Progress) -> bool:
        """Whether the round that led here is evaluated: every so often, and the last one always."""
        return progress.rounds % self.settings.eval_every == 0 or self.ended(progress) is not None

    def server(self, arrived: list[Assignment], round_index: int) -> Server:
        """What the server has at hand, and how much it may do with it: a multiple of what its devices do."""
        cap = self.settings.server_cap
        budget = np.inf if cap is None else cap * sum(one.usage.operations for one in arrived)
        fast = self.settings.executor == "auto"
        local = self.local(round_index)
        site = Site(self.server_models, self.problem.objective, local, self.data.public, fast)
        return Server(site, self.data.public, self.data.validation, budget)

    @cached_property
    def server_models(self) -> dict[str, LayeredModel]:
        """The server's own copies: it may work while devices do, and a net that runs is changed."""
        return {name: model.clone() for name, model in self.problem.models.items()}

    @cached_property
    def held_by_level(self) -> dict[str, np.ndarray]:
        """How many samples of each class the devices of a level hold."""
        return classes_by_level(self.problem.data, self.fleet)

    def server_seconds(self, operations: float) -> float:
        """Virtual seconds of the server's own work, once all replies are there."""
        if self.settings.server_speed is None:
            return 0.0
        price = self.planner.price
        epoch = price.full.operations * price.samples / price.batch
        return operations / epoch * self.settings.full_seconds / self.settings.server_speed

    def ended(self, progress: Progress) -> Stopped | None:
        """Why there is no further round, whatever the score; None if there is one."""
        budget, start = self.settings.time_budget, progress.virtual_seconds
        if self.traces is not None:
            start = self.wait(progress).virtual_seconds
        if budget is not None and budget <= start < math.inf:
            return "time-budget"
        if progress.rounds >= self.settings.rounds:
            return "rounds"
        return "unreachable" if math.isinf(start) else None

    @cached_property
    def work(self) -> LocalWork[Any]:
        """What a device does with its task."""
        return self.method.local

    @cached_property
    def needs_labels(self) -> bool:
        """Whether the method asks which classes a device holds."""
        return self.method.traits.needs_labels

    @cached_property
    def events(self) -> EventClock:
        """The clock of events."""
        return self.make_clock(self)

    @cached_property
    def interval(self) -> float:
        """Virtual seconds from one server step to the next; infinity where something else says when it steps."""
        if self.settings.step_every is None:
            return math.inf
        seconds, share = parse_step_every(self.settings.step_every)
        if seconds is not None:
            return seconds
        sizes = sizes_of(self.problem, self.settings)
        needed = np.sort(self.planner.seconds_of(self.fleet, self.planner.depths[-1], sizes))
        return float(needed[math.ceil((share or 1.0) * len(needed)) - 1])

    @cached_property
    def chooses_cohort(self) -> bool:
        """Whether the method has a say in which devices are asked."""
        return type(self.method).cohort is not Method.cohort

    @cached_property
    def has_base(self) -> bool:
        """Whether a net has a frozen base, which a device downloads once."""
        return any(structure.base_bytes for structure in self.planner.structures.values())

    @cached_property
    def keeps_state(self) -> bool:
        """Whether devices keep something between rounds."""
        return type(self.work).first is not LocalWork.first

    @cached_property
    def rate(self) -> Callable[[int], float]:
        """The learning rate of each round."""
        return self.problem.rate or schedule_rate(self.settings)

    @cached_property
    def local_settings(self) -> LocalSettings:
        """How devices train, but for the learning rate."""
        problem = self.problem
        local = local_settings(self.settings, 0, problem.optimizer, self.rate, problem.transform)
        return replace(local, keeps_base=self.planner.price.keeps_base)

    @cached_property
    def momentum(self) -> float:
        """That of the devices' SGD; other optimizers have none that adds steps up."""
        optimizer = self.local_settings.optimizer
        return optimizer.momentum if isinstance(optimizer, SGD) else 0.0

    def local(self, round_index: int) -> LocalSettings:
        """How devices train in a round."""
        return replace(self.local_settings, learning_rate=self.rate(round_index))

    def unit(
        self,
        device: int,
        task: Task,
        part: Part,
        samples: int,
        round_index: int,
        turn: int = 0,
        operations: float = 0.0,
    ) -> Unit:
        """One device's work, with what it kept from its last accepted round."""
        seed, own = self.settings.seed, None
        if self.keeps_state:
            own = self.store.read(device, task.accepted_round)
            own = self.work.first(device, Seeds(seed, None, device)) if own is None else own
        local = self.local(round_index)
        if task.epochs is not None:
            local = replace(local, epochs=task.epochs)
        if self.settings.prefix == "streamed" and self.planner.price.streams(part, samples):
            local = replace(local, prefix="streamed")
        seeds = Seeds(seed, round_index, device, turn)
        return Unit(device, round_index, task, part, own, seeds, local, samples, operations)

    def predictor(self, progress: Progress) -> Predictor:
        """What is evaluated, with BatchNorm statistics of devices' data where the method keeps none."""
        predictor = self.method.predictor(progress.state)
        return predictor if predictor.statistics == "stored" else find_statistics(self, predictor)


def payload_bytes(payload: Payload) -> int:
    """The bytes of the tensors that travel."""
    return sum(
        tensor.numel() * tensor.element_size() for tensors in payload.values() for tensor in tensors.values()
    )
