"""The round loop: sample, assign, train, settle the clock, fold, evaluate, record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.methods.base import Prototype, Round, Server, Setup
from fedpmt.records import RoundRecord
from fedpmt.seeds import Seeds
from fedpmt.simulation.assignment import assign
from fedpmt.simulation.bookkeeping import (
    accept,
    arrivals,
    finite,
    fit_speeds,
    mean_metric,
    record_round,
)
from fedpmt.simulation.clock import settle
from fedpmt.simulation.evaluation import classes_by_level, evaluate, find_statistics
from fedpmt.simulation.executors import Unit
from fedpmt.simulation.sampling import cohort
from fedpmt.simulation.schedule import local_settings
from fedpmt.training.local import LocalWork, Site
from fedpmt.training.loop import LOSS
from fedpmt.training.privacy import epsilon

if TYPE_CHECKING:
    from fedpmt.devices.fleet import Fleet
    from fedpmt.methods.base import Method, Predictor, Step
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.pricing.plan import Planner
    from fedpmt.settings import Settings
    from fedpmt.simulation.assignment import Assignment
    from fedpmt.simulation.checkpoint import DeviceStore
    from fedpmt.simulation.clock import Verdict
    from fedpmt.simulation.executors import Executor
    from fedpmt.simulation.placement import PlacedData
    from fedpmt.simulation.problem import Problem
    from fedpmt.training.local import LocalSettings
    from fedpmt.training.messages import Reply, Task
    from fedpmt.types import Payload

OnRound = Callable[[RoundRecord], None]


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two rounds: all that a resume needs."""

    state: Any  # the method's
    rounds: int = 0  # finished
    virtual_seconds: float = 0.0
    accepted: dict[int, int] | None = None  # device -> the last round whose reply counted; None without state
    speeds: dict[int, float] | None = None  # κ_k as fitted to measured seconds, of devices that were asked


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
        """One round of the federation."""
        round_, assignments = self.open(progress)
        verdict = self.settle(assignments, round_)
        replies = self.train(arrivals(assignments, verdict), progress)
        return self.close(progress, round_, assignments, verdict, replies)

    def open(
        self, progress: Progress, reachable: Collection[int] | None = None
    ) -> tuple[Round, list[Assignment]]:
        """Who is asked for what, in device order; `reachable` where not all of the cohort can be."""
        round_ = Round(progress.rounds, self.planner.price, Seeds(self.settings.seed, progress.rounds))
        devices = cohort(self.settings, self.fleet, round_, self.method.cohort(progress.state, round_))
        if reachable is not None:
            devices = [device for device in devices if device.id in reachable]
        round_ = replace(round_, cohort=tuple(device.id for device in devices))
        return round_, [assign(self, progress, device, round_) for device in devices]

    def settle(self, assignments: list[Assignment], round_: Round) -> Verdict:
        """What becomes of each device on the clock: known before anybody trains."""
        failed = [
            not one.able or bool(round_.rng("failure", one.device.id).random() < self.settings.failure)
            for one in assignments
        ]
        seconds = [one.seconds for one in assignments]
        return settle(seconds, failed, self.settings.deadline, min(self.settings.cohort, len(seconds)))

    def train(self, arrived: list[Assignment], progress: Progress) -> Iterator[Reply]:
        """The local rounds of those whose replies count; others are known not to, and are not computed."""
        work, index = self.method.local, progress.rounds
        units = (self.unit(one.device.id, one.task, one.part, one.samples, index) for one in arrived)
        for one, (reply, own) in zip(arrived, self.executor.train(work, units), strict=True):
            if self.keeps_state:
                self.store.write(one.device.id, index, own)
            yield replace(reply, seconds=one.seconds)

    def close(
        self,
        progress: Progress,
        round_: Round,
        assignments: list[Assignment],
        verdict: Verdict,
        replies: Iterable[Reply],
    ) -> tuple[Progress, RoundRecord]:
        """Fold what has arrived, in device order, take the server's step, and write down the round."""
        fold, losses = self.method.fold(progress.state, round_), list[float]()
        for reply in replies:
            losses += [reply.metrics[LOSS]] if LOSS in reply.metrics else []
            fold.add(reply)
        step = fold.finish(self.server(arrivals(assignments, verdict), progress.rounds))
        seconds = verdict.round_seconds + self.server_seconds(step.server_operations)
        after = Progress(
            step.state,
            progress.rounds + 1,
            progress.virtual_seconds + seconds,
            accept(progress, self.keeps_state, assignments, verdict),
            fit_speeds(self, progress, assignments, verdict),
        )
        record = record_round(self, after, assignments, verdict)
        return after, record.model_copy(update=self.measure(after, step, losses, seconds))

    def measure(
        self, progress: Progress, step: Step[Any], losses: list[float], seconds: float
    ) -> dict[str, Any]:
        """What is only known once a round is over, as fields of its record: metrics, and every so often a score."""
        settings = self.settings
        metrics = {**mean_metric(LOSS, losses), **finite(step.metrics), **self.privacy(progress)}
        fields = {
            "metrics": metrics,
            "server_operations": step.server_operations,
            "round_seconds": seconds,
        }
        last = progress.rounds == settings.rounds or self.out_of_time(progress)
        due = progress.rounds % settings.eval_every == 0 or last
        return {**fields, **evaluate(self, progress)} if due else fields

    def privacy(self, progress: Progress) -> dict[str, float]:
        """ε so far, of a device that was in every round and in every replay; none where nothing is promised."""
        settings = self.settings
        if settings.dp_clip is None or settings.dp_noise == 0:
            return {}
        releases = min(settings.rounds, progress.rounds + self.replays)
        return {"epsilon": epsilon(settings.dp_noise, releases, settings.dp_delta)}

    def server(self, arrived: list[Assignment], round_index: int) -> Server:
        """What the server has at hand, and how much it may do with it: so many times what its devices do."""
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

    def out_of_time(self, progress: Progress) -> bool:
        """Whether the virtual clock has passed the user's budget."""
        return self.settings.time_budget is not None and progress.virtual_seconds >= self.settings.time_budget

    @cached_property
    def needs_labels(self) -> bool:
        """Whether the method asks which classes a device holds."""
        return self.method.traits.needs_labels

    @cached_property
    def keeps_state(self) -> bool:
        """Whether devices keep something between rounds."""
        return type(self.method.local).first is not LocalWork.first

    def local(self, round_index: int) -> LocalSettings:
        """How devices train in a round."""
        return local_settings(self.settings, round_index, self.problem.optimizer, self.problem.rate)

    def unit(self, device: int, task: Task, part: Part, samples: int, round_index: int) -> Unit:
        """One device's work, with what it kept from its last accepted round."""
        seeds = Seeds(self.settings.seed, round_index)
        own, work = None, self.method.local
        if self.keeps_state:
            own = self.store.read(device, task.accepted_round)
            own = work.first(device, partial(_for_device, Seeds(seeds.seed), device)) if own is None else own
        local = self.local(round_index)
        if task.epochs is not None:
            local = replace(local, epochs=task.epochs)
        rng = partial(_for_device, seeds, device)
        return Unit(device, round_index, task, part, own, rng, local, samples)

    def predictor(self, progress: Progress) -> Predictor:
        """What is evaluated, with BatchNorm statistics of devices' data where the method keeps none."""
        predictor = self.method.predictor(progress.state)
        return predictor if predictor.statistics == "stored" else find_statistics(self, predictor)


def _for_device(seeds: Seeds, device: int, purpose: str) -> np.random.Generator:
    return seeds(purpose, device)


def payload_bytes(payload: Payload) -> int:
    """The bytes of the tensors that travel."""
    return sum(
        tensor.numel() * tensor.element_size() for tensors in payload.values() for tensor in tensors.values()
    )
