"""FedDF: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", 2020.

Devices train the prototype net that they can afford. The server averages each prototype p over its own devices and
then refines it on unlabelled data u, towards the mean logits of all received models k, whatever their prototype:

    x_p <- mean of the devices of p
    x_p <- x_p - η ∇ KL(softmax(1/|S| Σ_k z_k(u) / T) || softmax(z(u; x_p) / T)),   many steps of Adam

and keeps the best x_p on labelled validation data, the mean itself included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from fedpmt.methods.averaging import Weight, weight_of
from fedpmt.methods.base import (
    Fold,
    Gather,
    Method,
    Predictor,
    Round,
    Server,
    Setup,
    Step,
    Traits,
    acts,
    require,
)
from fedpmt.methods.slicing import fitted, rate_for
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, WHOLE
from fedpmt.parts.width import narrow_start
from fedpmt.training.distillation import answers, divergence
from fedpmt.training.local import Job, LocalWork
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.optimizers import SGD, Adam, Moments, clip
from fedpmt.types import MODEL, Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.pricing.cost import StepCost
    from fedpmt.training.local import Run
    from fedpmt.training.optimizers import Optimizer
    from fedpmt.types import Tensors

WIDEST = "full"
"""The prototype that is evaluated; others are named after the share of channels that they have."""


@dataclass(frozen=True)
class Fusion:
    """The server's state."""

    structure: Structure
    start: Mapping[str, Tensor]  # the widest net's initial weights, which those of the others are cut from
    nets: Mapping[str, Mapping[str, Tensor]]  # x_p by name; one that no device has trained yet is not there

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The widest prototype."""
        return self.nets[WIDEST]

    def net(self, part: Part) -> Mapping[str, Tensor]:
        """x_p."""
        return self.nets.get(part.label) or narrow_start(self.structure, self.start, part)


@dataclass(frozen=True)
class Student(LocalWork[Moments]):
    """Steps towards the logits that stand in the place of targets, on the server."""

    optimizer: Optimizer
    temperature: float = 1.0  # T
    clip: float | None = None  # the largest norm of a step's gradient
    begun: int = 0  # steps taken before these
    total: int = 1  # steps over which the rate falls to zero, as half a cosine

    def start(self, job: Job[Moments]) -> Run[Moments]:
        run, rate = super().start(job), job.site.settings.learning_rate
        run.optimizer, run.moments = self.optimizer, job.own
        if isinstance(self.optimizer, Adam):
            run.rate = lambda step: rate * self.scale(step)
        return run

    def scale(self, step: int) -> float:
        """Half a cosine."""
        return (1 + math.cos(math.pi * min(1.0, (self.begun + step) / self.total))) / 2

    def loss(self, run: Run[Moments], batch: Examples) -> Tensor:
        from fedpmt.training.objective import logits_of

        outputs = logits_of(run.forward(run.tensors, batch.inputs))
        return divergence(outputs, batch.targets, self.temperature)

    def correct(self, run: Run[Moments], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return clip(gradients, self.clip)


@dataclass(frozen=True)
class FedDF(Method[Fusion, None]):
    """A prototype per budget: the same net with fewer channels, and weights of its own; or one net for all."""

    nets: Literal["budget", "one"] = "budget"  # a prototype for each budget, or the whole net on every device
    weight: Weight = "uniform"
    steps: int = 10_000  # of distillation a round, at most; what the server's cap allows may be less
    rate: float = 1e-3  # η, of Adam, falling to zero over the steps that the cap allows, as half a cosine
    temperature: float = 1.0  # T
    every: int = 100  # steps between looks at the validation data
    steps_without_gain: int = 1_000  # steps without gain after which a prototype is done
    clip: float = 5.0  # the largest norm of a step's gradient
    student_optimizer: Literal["adam", "sgd"] = "adam"

    def __post_init__(self) -> None:
        require(
            self,
            steps=(self.steps >= 0, ">= 0"),
            rate=(self.rate > 0, "> 0"),
            temperature=(self.temperature > 0, "> 0"),
            every=(self.every >= 1, ">= 1"),
            steps_without_gain=(self.steps_without_gain >= 1, ">= 1"),
            clip=(self.clip > 0, "> 0"),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            needs_public=True,
            needs_validation=True,
            needs_classes=True,
            combines="mean of each prototype, then distillation",
            needs_round="its server learns from the ensemble of a round's nets",
            server_work="trains",
            budget=acts("device") if self.nets == "budget" else {},
        )

    @property
    def local(self) -> LocalWork[None]:
        return LocalWork()

    def init(self, setup: Setup) -> Fusion:
        prototype = setup.prototypes[GLOBAL]
        return Fusion(prototype.structure, prototype.tensors, {WIDEST: prototype.tensors})

    def assign(self, state: Fusion, client: Client, round: Round) -> Task:
        part = full(state.structure)
        if self.nets == "budget":
            rate = rate_for(state.structure, client.fits, "feddf")
            part = fitted(state.structure, rate, "feddf")
        return Task((part,), {MODEL: state.net(part)})

    def fold(self, state: Fusion, round: Round) -> Fold[Fusion]:
        # All at once, in device order: the ensemble is every model that came back.
        return Gather(lambda replies, server: self.fuse(state, replies, round, server))

    def fuse(self, state: Fusion, arrived: list[Reply], round: Round, server: Server) -> Step[Fusion]:
        """The mean of each prototype, and then what distillation makes of it."""
        parts = {reply.part.label: reply.part for reply in arrived} | {WIDEST: full(state.structure)}
        nets = {
            name: self.mean(state.net(part), [one for one in arrived if one.part.label == name])
            for name, part in sorted(parts.items())
        }
        costs = Distillation.of(round, server, arrived, parts, self.every)
        steps = server.affordable(lambda steps: costs.total(dict.fromkeys(parts, steps)), self.steps)
        taken = dict.fromkeys(parts, 0)
        if arrived and steps:
            ensemble = teachers(state, arrived, costs.seen(steps), round, server)
            for name, mean in nets.items():
                nets[name], taken[name] = self.refined(mean, parts[name], ensemble, steps, round, server)
        metrics = {"server_steps": float(max(taken.values())), "server_steps_default": float(self.steps)}
        # Teachers answered for all steps that could be taken, whether or not a student stopped before.
        operations = costs.total(taken, asked=steps)
        return Step(replace(state, nets={**state.nets, **nets}), metrics, operations)

    def mean(self, before: Tensors, members: list[Reply]) -> Tensors:
        """The mean of one prototype's devices; as it was where there is none."""
        from fedpmt.aggregation import CoverageMean

        mean = CoverageMean(before)
        for reply in members:
            # A prototype's tensors are its own: of the narrow net the device trained all.
            whole = replace(reply.part, trained=dict.fromkeys(reply.part.trained, WHOLE))
            mean.add(whole, reply.update, weight_of(self.weight, reply.samples))
        return mean.result()

    def refined(
        self, mean: Tensors, part: Part, ensemble: Examples, steps: int, round: Round, server: Server
    ) -> tuple[Tensors, int]:
        """The best student on the validation data, and the steps that were taken to find it."""
        from fedpmt.training.loop import train_on_server

        best, tensors, moments = mean, mean, None
        score, since, done = self.score(server, mean), 0, 0
        optimizer: Optimizer = Adam() if self.student_optimizer == "adam" else SGD()
        while done < steps and since < self.steps_without_gain:
            count, prefix = min(self.every, steps - done), f"distil/{part.label}/{done}"
            job: Job[Moments] = Job(
                server.site,
                Task((part,), {MODEL: tensors}),
                part,
                moments,
                ensemble,
                lambda purpose, prefix=prefix: round.rng(f"{prefix}/{purpose}"),  # type: ignore[misc]
            )
            # The rate is zero after all steps, however few the cap has left.
            work = Student(optimizer, self.temperature, self.clip, done, steps)
            run, _ = train_on_server(work, job, steps=count, rate=self.rate)
            tensors = {name: tensor.detach() for name, tensor in run.tensors.items()}
            moments = run.stepper.moments() if run.stepper else None
            done += count
            found = self.score(server, tensors)
            # Without validation data there is no best but the last.
            if found is None or score is None or found > score:
                best, score, since = tensors, found, 0
            else:
                since += count
        return best, done

    def score(self, server: Server, tensors: Tensors) -> float | None:
        """The score on the validation data, negative where lower is better."""
        import torch

        from fedpmt.training.loop import evaluate_model
        from fedpmt.training.objective import judge

        if server.validation is None:
            return None
        model, objective = server.site.models[GLOBAL], server.site.objective
        with torch.no_grad():
            found = judge(objective, partial(evaluate_model, model, tensors), server.validation).score
        return found if objective.maximize else -found

    def predictor(self, state: Fusion) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)

    def neutral(self) -> Self:
        return replace(self, steps=0, weight="samples")


@dataclass(frozen=True)
class Distillation:
    """What the server's work of a round costs."""

    asking: float  # operations of all teachers' answers to one batch
    students: Mapping[str, StepCost]
    public: int  # samples
    validation: int
    batch: int
    every: int

    @classmethod
    def of(
        cls, round: Round, server: Server, arrived: list[Reply], parts: Mapping[str, Part], every: int
    ) -> Distillation:
        """For these teachers and students."""
        asking = sum(round.price(reply.part).inference for reply in arrived)
        students = {name: round.price(part) for name, part in parts.items()}
        public, validation = (0 if data is None else len(data) for data in (server.public, server.validation))
        return cls(asking, students, public, validation, server.site.settings.batch, every)

    def seen(self, steps: int) -> int:
        """How many public samples so many steps look at."""
        return min(self.public, steps * self.batch)

    def total(self, steps: Mapping[str, int], asked: int | None = None) -> float:
        """Operations of so many steps of each student, with teachers asked for so many; none where nobody takes one."""
        most = max(steps.values())
        if most == 0:
            return 0.0
        # Teachers answer once a round, to each public sample that may be used.
        total = self.seen(asked or most) / self.batch * self.asking
        for name, count in steps.items():
            # The validation data is looked at before the first step and after every so many.
            looks = 1 + -(-count // self.every)
            cost = self.students[name]
            total += count * cost.operations + looks * self.validation / self.batch * cost.inference
        return total


def teachers(state: Fusion, arrived: list[Reply], count: int, round: Round, server: Server) -> Examples:
    """Public samples with the ensemble's answer in the place of a target: 1/|S| Σ_k z_k(u), computed once a round."""
    import torch

    if server.public is None:
        raise SettingError("feddf needs public data (public = 'none')")
    chosen = np.sort(round.rng("public").permutation(len(server.public))[:count])
    asked = server.public.take(chosen)
    net = server.site.models[GLOBAL]
    logits = []
    for reply in arrived:
        sent = state.net(reply.part)
        model = {name: sent[name] + change for name, change in reply.update.items()}  # w_k
        logits.append(answers(net, model, asked))
    return Examples(asked.inputs, torch.stack(logits).mean(dim=0), asked.ids)
