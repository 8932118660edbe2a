"""The round loop: sample, assign, train, settle the clock, aggregate, evaluate, record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedpmt.devices.fleet import drifted
from fedpmt.methods.base import Prototype, Round, Server, Setup
from fedpmt.parts.depth import mask
from fedpmt.parts.part import GLOBAL
from fedpmt.pricing.adaptive import LATE, believed, fitted
from fedpmt.records import DeviceRecord, RoundRecord
from fedpmt.seeds import Seeds
from fedpmt.settings import parse_drift
from fedpmt.simulation.clock import settle
from fedpmt.simulation.evaluation import evaluate_global, evaluate_personal, with_statistics
from fedpmt.simulation.executors import Unit
from fedpmt.simulation.sampling import SAMPLERS
from fedpmt.simulation.schedule import local_settings
from fedpmt.training.local import Site
from fedpmt.training.messages import Capacity, Client, Reply, Task
from fedpmt.types import DivergedError

if TYPE_CHECKING:
    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.methods.base import Method, Predictor
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.pricing.budget import Budget
    from fedpmt.pricing.cost import Cost
    from fedpmt.pricing.plan import Planner
    from fedpmt.records import Outcome
    from fedpmt.settings import Settings
    from fedpmt.simulation.checkpoint import DeviceStore
    from fedpmt.simulation.clock import Verdict
    from fedpmt.simulation.executors import Executor
    from fedpmt.simulation.placement import PlacedData
    from fedpmt.simulation.problem import Problem
    from fedpmt.training.local import LocalSettings, LocalWork
    from fedpmt.types import Examples, Payload

PERSONAL_DEVICES = 100
"""Personal models are evaluated on at most this many of the devices that took part."""


STATISTICS_DEVICES = 100
"""BatchNorm statistics that are found anew are of at most this many devices' data."""

LEVEL_DEVICES = 50
"""A level's mix of classes is taken from at most this many of its devices."""


@dataclass(frozen=True)
class Asked:
    """A device that was asked in this round, with what the clock makes of it."""

    device: Device
    task: Task
    part: Part
    cost: Cost
    samples: int
    seconds: float  # T_k, training and transfer
    transfer: float
    bytes_down: int
    bytes_up: int
    budget: Budget
    able: bool = True  # whether the part fits into the device's memory
    reason: str = ""  # why its reply did not count, where somebody said


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two rounds: all that a resume needs."""

    state: Any  # the method's
    rounds: int = 0  # finished
    virtual_seconds: float = 0.0
    accepted: dict[int, int] | None = (
        None  # device -> the last round whose reply counted; None without device state
    )
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
        prototypes = {
            name: Prototype(model.structure, model.initial()) for name, model in self.problem.models.items()
        }
        by_server = self.settings.splitting == "server"
        weakest = self.planner.weakest(self.fleet, self.settings.samples) if by_server else None
        setup = Setup(
            prototypes,
            len(self.fleet),
            self.planner.price,
            self.data.public,
            self.data.validation,
            weakest,
            next(members for members in reversed(self.fleet.members) if len(members)) if by_server else None,
            self.settings.batch,
            Seeds(self.settings.seed),
        )
        return Progress(self.method.init(setup))

    def play(self, progress: Progress) -> tuple[Progress, RoundRecord]:
        """One round of the federation."""
        round_ = self.round(progress)
        asked, verdict = self.settle(progress, round_)
        arrived = [one for one, outcome in zip(asked, verdict.outcomes, strict=True) if outcome == "arrived"]
        return self.close(progress, round_, asked, verdict, self.train(arrived, progress))

    def round(self, progress: Progress) -> Round:
        """The round that comes next."""
        return Round(progress.rounds, self.planner.price, Seeds(self.settings.seed, progress.rounds))

    def close(
        self,
        progress: Progress,
        round_: Round,
        asked: list[Asked],
        verdict: Verdict,
        replies: Iterable[Reply],
    ) -> tuple[Progress, RoundRecord]:
        """Aggregate what has arrived, in device order, and write down the round."""
        losses: list[float] = []
        index, accepted = progress.rounds, progress.accepted
        arrived = [one for one, outcome in zip(asked, verdict.outcomes, strict=True) if outcome == "arrived"]
        round_ = replace(round_, at_hand=self.server(arrived, index))
        step = self.method.aggregate(progress.state, _noting(replies, losses), round_)
        round_seconds = verdict.round_seconds + self.server_seconds(step.server_operations)

        if accepted is not None or self.keeps_state:
            accepted = {**(accepted or {}), **{one.device.id: index for one in arrived}}
        progress = Progress(
            step.state,
            index + 1,
            progress.virtual_seconds + round_seconds,
            accepted,
            self.fitted_speeds(progress, asked, verdict.outcomes),
        )
        record = self.record(progress, asked, verdict.outcomes, verdict.round_seconds)
        record = record.model_copy(
            update={
                "metrics": {**_mean("train_loss", losses), **_finite(step.metrics), **self.privacy(progress)},
                "server_operations": step.server_operations,
                "round_seconds": round_seconds,
            }
        )
        last = progress.rounds == self.settings.rounds or self.out_of_time(progress)
        if progress.rounds % self.settings.eval_every == 0 or last:
            record = record.model_copy(update=self.evaluate(progress))
        return progress, record

    def privacy(self, progress: Progress) -> dict[str, float]:
        """ε so far, of a device that was in every round and in every replay; none where nothing is promised."""
        from fedpmt.training.private import epsilon

        settings = self.settings
        if settings.dp_clip is None or settings.dp_noise == 0:
            return {}
        releases = min(settings.rounds, progress.rounds + self.replays)
        return {"epsilon": epsilon(settings.dp_noise, releases, settings.dp_delta)}

    def settle(self, progress: Progress, round_: Round) -> tuple[list[Asked], Verdict]:
        """Who is asked for what, and what becomes of it on the clock: known before anybody trains."""
        asked = self.asked(progress, round_)
        failed = [
            not one.able or bool(round_.rng("failure", one.device.id).random() < self.settings.failure)
            for one in asked
        ]
        verdict = settle(
            [one.seconds for one in asked],
            failed,
            self.settings.deadline,
            min(self.settings.cohort, len(asked)),
        )
        return asked, verdict

    def asked(
        self, progress: Progress, round_: Round, reachable: Collection[int] | None = None
    ) -> list[Asked]:
        """Who is asked for what, in device order; `reachable` where not all of the cohort can be."""
        devices = self.cohort(progress.state, round_)
        if reachable is not None:
            devices = [device for device in devices if device.id in reachable]
        round_ = replace(round_, cohort=tuple(device.id for device in devices))
        return [self.ask(progress, device, round_) for device in devices]

    def server(self, arrived: list[Asked], round_index: int) -> Server:
        """What the server has at hand, and how much it may do with it: so many times what its devices do."""
        cap = self.settings.server_cap
        budget = np.inf if cap is None else cap * sum(map(self.operations, arrived))
        local = local_settings(self.settings, round_index)
        fast = self.settings.executor == "auto"
        site = Site(self.server_models, self.problem.objective, local, self.data.public, fast)
        return Server(site, self.data.public, self.data.validation, budget)

    @cached_property
    def server_models(self) -> dict[str, LayeredModel]:
        """The server's own copies: it may work while devices do, and a net that runs is changed."""
        return {name: model.clone() for name, model in self.problem.models.items()}

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

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep something between rounds."""
        from fedpmt.training.local import LocalWork

        return type(self.method.local()).first is not LocalWork.first

    @property
    def work(self) -> LocalWork[Any]:
        """What devices do: the method's local work, made private where that is asked for."""
        from fedpmt.training.private import PrivateWork

        work, settings = self.method.local(), self.settings
        return work if settings.dp_clip is None else PrivateWork(work, settings.dp_clip, settings.dp_noise)

    def cohort(self, state: Any, round_: Round) -> list[Device]:
        """Who is asked, in device order, each on its level of this round."""
        chosen = self.method.cohort(state, round_)
        if chosen is not None:
            return [self.fleet.device(int(device)) for device in sorted(chosen)]
        wanted = min(len(self.fleet), int(np.ceil(self.settings.cohort * self.settings.over_select)))
        rng = round_.rng("cohort")
        if self.settings.level_draw == "fixed":
            ids = SAMPLERS[self.settings.sampling](wanted)(self.fleet, round_.index, rng)
            return [self.fleet.device(int(device)) for device in ids]
        ids = SAMPLERS["uniform"](wanted)(self.fleet, round_.index, rng)
        levels = rng.permutation(np.arange(len(ids)) % len(self.fleet.level_speeds)) + 1
        return [
            self.fleet.at_level(int(device), int(level)) for device, level in zip(ids, levels, strict=True)
        ]

    def ask(self, progress: Progress, device: Device, round_: Round) -> Asked:
        """Give a device its task, and find out what it will take."""
        samples = self.problem.data.samples(device.id)
        speed = (progress.speeds or {}).get(device.id, device.speed)  # as the server knows it
        budget = self.planner.budget(replace(device, speed=speed), samples)
        by_server = self.settings.splitting == "server"
        client = Client(
            device.id,
            device.level if by_server else None,
            speed if by_server else None,
            budget if by_server else None,
            samples,
            self.steps(samples),
            self.problem.data.label_counts(device.id),
        )
        task = self.method.assign(progress.state, client, round_)
        if progress.accepted is not None:
            task = replace(task, accepted_round=progress.accepted.get(device.id))
        drift = parse_drift(self.settings.drift)
        if drift is not None:
            device = drifted(device, drift, round_.index, self.settings.partition_seed)
        return self.priced(device, task, self.choose(device, task, samples), samples, budget)

    def fitted_speeds(
        self, progress: Progress, asked: list[Asked], outcomes: tuple[Outcome, ...]
    ) -> dict[int, float] | None:
        """Speeds after this round, from what those took that were asked; late ones were at least that slow."""
        if self.settings.speeds == "stated":
            return None
        speeds, times = dict(progress.speeds or {}), self.planner.times
        for one, outcome in zip(asked, outcomes, strict=True):
            if outcome in ("failed", "refused"):
                continue
            at_one = replace(one.device, speed=1.0)
            work = times.training(at_one, one.cost, one.samples, self.share(one.task, one.samples))
            late = LATE * (self.settings.deadline or one.seconds)
            seconds = late if outcome == "late" else one.seconds - one.transfer
            if work > 0 and seconds > 0:
                seconds = believed(seconds, late if self.settings.deadline else None)
                before = speeds.get(one.device.id, float(self.fleet.speeds[one.device.id]))
                speeds[one.device.id] = fitted(before, work / seconds, self.settings.speed_weight)
        return speeds

    def choose(self, device: Device, task: Task, samples: int) -> Part:
        """The part that a device takes of those on offer (Option II), or the only one."""
        if len(task.offer) == 1:
            return task.offer[0]
        capacity = Capacity(device.id, device.speed, self.planner.budget(device, samples), samples)
        structure = self.problem.model.structure
        return self.work.choose(task.offer, capacity, self.planner.price, structure)

    def priced(self, device: Device, task: Task, part: Part, samples: int, budget: Budget) -> Asked:
        """What it will take a device to do its task with this part."""
        work = self.work
        cost = work.cost(part, self.planner.price)
        structure = self.problem.models[part.model].structure
        down, up = payload_bytes(task.tensors), work.upload_bytes(part, structure)
        transfer = self.planner.times.transfer(device, down + part.overhead_bytes, up)
        seconds = self.planner.times.training(device, cost, samples, self.share(task, samples)) + transfer
        if cost.memory_bytes > device.memory:
            # It says so at once: nothing is sent and nobody waits.
            return Asked(device, task, part, cost, samples, 0.0, 0.0, 0, 0, budget, able=False)
        return Asked(device, task, part, cost, samples, seconds, transfer, down, up, budget)

    def steps(self, samples: int) -> int:
        """All steps of a local round."""
        return self.settings.epochs * -(-samples // self.settings.batch)

    def share(self, task: Task, samples: int) -> float:
        """What a device is asked for, as a share of all steps of a local round."""
        steps = self.steps(samples)
        asked = steps if task.epochs is None else steps // self.settings.epochs * task.epochs
        return (asked if task.steps is None else min(asked, task.steps)) / steps

    def operations(self, one: Asked) -> float:
        """The work of one device's local round."""
        return one.cost.round_operations(
            samples=one.samples,
            epochs=self.settings.epochs,
            batch=self.settings.batch,
            cached=self.planner.price.cached,
        ) * self.share(one.task, one.samples)

    def train(self, arrived: list[Asked], progress: Progress) -> Iterator[Reply]:
        """The local rounds of those whose replies count; others are known not to, and are not computed."""
        work = self.work
        local = local_settings(self.settings, progress.rounds)
        units = (
            self.unit(one.device.id, one.task, one.part, one.samples, work, progress.rounds, local)
            for one in arrived
        )
        for one, (reply, own) in zip(arrived, self.executor.train(work, units), strict=True):
            if self.keeps_state:
                self.store.write(one.device.id, progress.rounds, own)
            yield replace(reply, seconds=one.seconds)

    def unit(
        self,
        device: int,
        task: Task,
        part: Part,
        samples: int,
        work: Any,
        round_index: int,
        local: LocalSettings,
    ) -> Unit:
        """One device's work, with what it kept from its last accepted round."""
        seeds = Seeds(self.settings.seed, round_index)
        rng = partial(_for_device, seeds, device)
        own = self.store.read(device, task.accepted_round)
        if own is None and self.keeps_state:
            own = work.first(device, partial(_for_device, Seeds(seeds.seed), device))
        shard = partial(self.data.shard, device)
        local = local if task.epochs is None else replace(local, epochs=task.epochs)
        return Unit(device, round_index, task, part, own, shard, rng, local, samples)

    def record(
        self, progress: Progress, asked: list[Asked], outcomes: tuple[Outcome, ...], round_seconds: float
    ) -> RoundRecord:
        """What the round cost and who was in it."""
        structure = self.problem.model.structure
        coverage = dict.fromkeys((layer.name for layer in structure.layers), 0)
        devices, operations, wasted, overhead = [], 0.0, 0.0, 0
        for one, outcome in zip(asked, outcomes, strict=True):
            counts = outcome == "arrived"
            work = self.operations(one)
            if counts:
                operations += work
                if one.part.model == GLOBAL:
                    for layer, trained in zip(coverage, mask(structure, one.part), strict=True):
                        coverage[layer] += trained
            else:
                wasted += work * min(1.0, round_seconds / one.seconds) if one.seconds else 0.0
            overhead += one.part.overhead_bytes
            devices.append(
                DeviceRecord(
                    device=one.device.id,
                    level=one.device.level,
                    speed=one.device.speed,
                    part=one.part.label,
                    samples=one.samples,
                    seconds=one.seconds,
                    transfer_seconds=one.transfer,
                    outcome=outcome,
                    bytes_up=one.bytes_up if counts else 0,
                    bytes_down=one.bytes_down,
                    operations=work,
                    memory_bytes=one.cost.memory_bytes,
                    reason=one.reason,
                    **self.charged(one, work),
                )
            )
        return RoundRecord(
            round=progress.rounds,
            virtual_seconds=progress.virtual_seconds,
            round_seconds=round_seconds,
            bytes_up=sum(device.bytes_up for device in devices),
            bytes_down=sum(device.bytes_down for device in devices),
            overhead_bytes=overhead,
            operations=operations,
            wasted_operations=wasted,
            learning_rate=local_settings(self.settings, progress.rounds - 1).learning_rate,
            layers=coverage,
            devices=tuple(devices),
        )

    def charged(self, one: Asked, operations: float) -> dict[str, float]:
        """What a device spent of what the run's budget limits, and how much it had, both for the whole round."""
        allowance = self.settings.allowance
        if allowance is None:
            return {}
        used = {
            "operations": operations,
            "time": one.seconds,
            "bytes": float(one.bytes_down + one.part.overhead_bytes + one.bytes_up),
            "upload": float(one.bytes_up),
            "memory": float(one.cost.memory_bytes),
        }[allowance.resource]
        limit = one.budget.limit(allowance.resource)
        if allowance.resource == "operations":
            limit *= self.settings.epochs * one.samples / self.settings.batch
        return {"used": used, "budget": limit}

    def predictor(self, progress: Progress) -> Predictor:
        """What is evaluated, with BatchNorm statistics of devices' data where the method keeps none."""
        predictor = self.method.predictor(progress.state)
        if predictor.statistics == "stored":
            return predictor
        shards = (self.data.shard(device) for device in range(min(len(self.fleet), STATISTICS_DEVICES)))
        return with_statistics(self.executor, predictor, self.problem.model.structure, shards)

    def evaluate(self, progress: Progress) -> dict[str, Any]:
        """Score and loss on the test set, as fields of a round's record."""
        predictor = self.predictor(progress)
        for name, tensor in predictor.tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise DivergedError(
                    f"training diverged: '{name}' is not finite after round {progress.rounds}; a smaller --lr may help"
                )
        if predictor.kind == "global":
            found = evaluate_global(self.executor, predictor, self.data.test, self.problem.data.classes)
        else:
            members = sorted(progress.accepted or {})[:PERSONAL_DEVICES]
            # A model that is half the server's knows all classes; a device's own answers for what the device has.
            of_its_classes = predictor.kind == "personal"
            owners = (
                (
                    self.store.read(device, (progress.accepted or {})[device]),
                    self.own_test(device, of_its_classes),
                )
                for device in members
            )
            found = evaluate_personal(self.executor, self.method.local(), predictor, owners)
        finite_loss = found.loss if found.loss is not None and np.isfinite(found.loss) else None
        return {
            "score": found.score,
            "score_name": self.problem.objective.score_name,
            "maximize": self.problem.objective.maximize,
            "loss": finite_loss,
            "score_by_class": found.by_class,
            "score_by_level": self.by_level(found.by_class),
            "evaluates": predictor.kind,
        }

    def own_test(self, device: int, of_its_classes: bool) -> Examples:
        """What a device's own model is tested on, the same in every round."""
        test, limit = self.data.test, self.settings.personal_test
        counts = self.problem.data.label_counts(device) if of_its_classes else None
        held = (
            np.arange(len(test)) if counts is None else np.flatnonzero(counts[test.targets.cpu().numpy()] > 0)
        )
        if limit is not None and limit < len(held):
            drawn = Seeds(self.settings.seed)("personal test", device)
            held = np.sort(drawn.choice(held, limit, replace=False))
        return test if len(held) == len(test) else test.take(held)

    def by_level(self, by_class: dict[str, float] | None) -> dict[str, float] | None:
        """The score with classes weighted as the devices of each level hold them."""
        if by_class is None or not self.held_by_level:
            return None
        labels = [int(label) for label in by_class]
        scores = np.array(list(by_class.values()))
        # Classes that the test set does not have say nothing of a level.
        held = {level: counts[labels] for level, counts in self.held_by_level.items()}
        return {
            level: float(counts @ scores / counts.sum()) for level, counts in held.items() if counts.any()
        }

    @cached_property
    def held_by_level(self) -> dict[str, np.ndarray]:
        """How many samples of each class the devices of a level hold, from the first few of them."""
        mixes = {}
        for level, members in enumerate(self.fleet.members, start=1):
            counts = [self.problem.data.label_counts(int(device)) for device in members[:LEVEL_DEVICES]]
            known = [count for count in counts if count is not None]
            if known:
                mixes[str(level)] = np.sum(known, axis=0)
        return mixes


def _for_device(seeds: Seeds, device: int, purpose: str) -> np.random.Generator:
    return seeds(purpose, device)


def _noting(replies: Iterable[Reply], losses: list[float]) -> Iterator[Reply]:
    for reply in replies:
        if "train_loss" in reply.metrics:
            losses.append(reply.metrics["train_loss"])
        yield reply


def _mean(name: str, values: list[float]) -> dict[str, float]:
    """A metric of the round; none where there is nothing to take the mean of, or it is not finite."""
    return _finite({name: float(np.mean(values)) if values else np.nan})


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that are numbers which JSON can hold."""
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def payload_bytes(payload: Payload) -> int:
    """The bytes of the tensors that travel."""
    return sum(
        tensor.numel() * tensor.element_size() for tensors in payload.values() for tensor in tensors.values()
    )


OnRound = Callable[[RoundRecord], None]
