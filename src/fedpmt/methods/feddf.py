"""FedDF: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", 2020.

Devices train the prototype net that they can afford. The server averages each prototype p over its own devices and
then refines it on unlabelled data u, towards the mean logits of all received models k, whatever their prototype:

    x_p <- mean of the devices of p
    x_p <- x_p - η ∇ KL(softmax(1/|S| Σ_k z_k(u) / T) || softmax(z(u; x_p) / T)),   many steps of Adam

and keeps the best x_p on labelled validation data, the mean itself included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np

from fedpmt.methods.base import ABOVE_0, FROM_0, FROM_1, Method, Predictor, Round, Server, Setup, Step
from fedpmt.methods.fitted import fitted, rate_for
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, WHOLE
from fedpmt.parts.width import narrow_start
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL, Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from fedpmt.methods.base import Action
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.pricing.cost import Cost
    from fedpmt.resources import Resource
    from fedpmt.training.distillation import StudentWork
    from fedpmt.training.local import LocalWork
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
class FedDF(Method[Fusion, None]):
    """A prototype per budget: the same net with fewer channels, and weights of its own; or one net for all."""

    needs_speeds: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True
    needs_validation: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    server_work = "trains"

    nets: Literal["budget", "one"] = "budget"  # a prototype for each budget, or the whole net on every device
    weight: Literal["samples", "uniform"] = "uniform"
    steps: int = 10_000  # of distillation a round, at most; what the server's cap allows may be less
    rate: float = 1e-3  # η, of Adam, falling to zero over the steps that the cap allows, as half a cosine
    temperature: float = 1.0  # T
    every: int = 100  # steps between looks at the validation data
    patience: int = 1_000  # steps without gain after which a prototype is done
    clip: float = 5.0  # the largest norm of a step's gradient
    optimizer: Literal["adam", "sgd"] = "adam"

    def __post_init__(self) -> None:
        self.require(
            steps=(self.steps >= 0, FROM_0),
            rate=(self.rate > 0, ABOVE_0),
            temperature=(self.temperature > 0, ABOVE_0),
            every=(self.every >= 1, FROM_1),
            patience=(self.patience >= 1, FROM_1),
            clip=(self.clip > 0, ABOVE_0),
        )

    def init(self, setup: Setup) -> Fusion:
        prototype = setup.prototypes[GLOBAL]
        return Fusion(prototype.structure, prototype.tensors, {WIDEST: prototype.tensors})

    def assign(self, state: Fusion, client: Client, round: Round) -> Task:
        part = full(state.structure)
        if self.nets == "budget":
            rate = rate_for(state.structure, self.fits(client, state.structure, round.price), "feddf")
            part = fitted(state.structure, rate, "feddf")
        return Task((part,), {MODEL: state.net(part)})

    @property
    def combines(self) -> str:
        return "mean of each prototype, then distillation"

    def action(self, resource: Resource) -> Action:
        return "device" if self.nets == "budget" else "none"

    def local(self) -> LocalWork[None]:
        from fedpmt.training.local import LocalWork

        return LocalWork()

    def aggregate(self, state: Fusion, replies: Iterable[Reply], round: Round) -> Step[Fusion]:
        # All at once, in device order: the ensemble is every model that came back.
        arrived = sorted(replies, key=lambda reply: reply.device)
        parts = {reply.part.label: reply.part for reply in arrived} | {WIDEST: full(state.structure)}
        nets = {
            name: self.mean(state.net(part), [one for one in arrived if one.part.label == name])
            for name, part in sorted(parts.items())
        }
        bill = Bill.of(round, arrived, parts, self.every)
        steps = round.server.affordable(lambda steps: bill.total(dict.fromkeys(parts, steps)), self.steps)
        taken = dict.fromkeys(parts, 0)
        if arrived and steps:
            ensemble = teachers(arrived, bill.seen(steps), round)
            for name, mean in nets.items():
                nets[name], taken[name] = self.refined(mean, parts[name], ensemble, steps, round)
        metrics = {"server_steps": float(max(taken.values())), "server_steps_default": float(self.steps)}
        # Teachers answered for all steps that could be taken, whether or not a student stopped before.
        operations = bill.total(taken, asked=steps)
        return Step(replace(state, nets={**state.nets, **nets}), metrics, operations)

    def mean(self, before: Tensors, members: list[Reply]) -> Tensors:
        """The mean of one prototype's devices; as it was where there is none."""
        from fedpmt.aggregation import CoverageMean

        mean = CoverageMean(before)
        for reply in members:
            # A prototype's tensors are its own: of the narrow net the device trained all.
            whole = replace(reply.part, trained=dict.fromkeys(reply.part.trained, WHOLE))
            mean.add(whole, reply.tensors[MODEL], reply.samples if self.weight == "samples" else 1)
        return mean.result()

    def refined(
        self, mean: Tensors, part: Part, ensemble: Examples, steps: int, round: Round
    ) -> tuple[Tensors, int]:
        """The best student on the validation data, and the steps that were taken to find it."""
        from fedpmt.training.distillation import on_server

        best, tensors, moments = mean, mean, None
        score, since, done = self.score(round.server, mean), 0, 0
        while done < steps and since < self.patience:
            count = min(self.every, steps - done)
            tensors, moments, _ = on_server(
                self.work(done, steps),
                round.server.site,
                Task((part,), {MODEL: tensors}),
                part,
                moments,
                ensemble,
                partial(_purpose, round, f"distil/{part.label}/{done}"),
                steps=count,
                rate=self.rate,
                round_index=round.index,
            )
            done += count
            found = self.score(round.server, tensors)
            # Without validation data there is no best but the last.
            if found is None or score is None or found > score:
                best, score, since = tensors, found, 0
            else:
                since += count
        return best, done

    def work(self, begun: int, steps: int) -> StudentWork:
        """What a student does, `begun` steps on; the rate is zero after all steps, however few the cap has left."""
        from fedpmt.training.adam import Adam
        from fedpmt.training.distillation import StudentWork

        adam = Adam(self.rate) if self.optimizer == "adam" else None
        return StudentWork(adam, self.temperature, self.clip, begun, steps)

    def score(self, server: Server, tensors: Tensors) -> float | None:
        """The score on the validation data, negative where lower is better."""
        from fedpmt.training.distillation import answers

        if server.validation is None:
            return None
        outputs = answers(server.site.models[GLOBAL], tensors, server.validation)
        objective = server.site.objective
        mean = float(objective.score(outputs, server.validation.targets).mean())
        return mean if objective.maximize else -mean

    def predictor(self, state: Fusion) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)

    def neutral(self) -> Self:
        return replace(self, steps=0, weight="samples")


@dataclass(frozen=True)
class Bill:
    """What the server's work of a round costs."""

    asking: float  # operations of all teachers' answers to one batch
    students: Mapping[str, Cost]
    public: int  # samples
    validation: int
    batch: int
    every: int

    @classmethod
    def of(cls, round: Round, arrived: list[Reply], parts: Mapping[str, Part], every: int) -> Bill:
        """For these teachers and students."""
        server = round.server
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


def teachers(arrived: list[Reply], count: int, round: Round) -> Examples:
    """Public samples with the ensemble's answer in the place of a target: 1/|S| Σ_k z_k(u), computed once a round."""
    import torch

    from fedpmt.training.distillation import answers

    server = round.server
    if server.public is None:
        raise SettingError("public = 'none' is refused: feddf needs some")
    chosen = np.sort(round.rng("public").permutation(len(server.public))[:count])
    asked = server.public.take(chosen)
    net = server.site.models[GLOBAL]
    logits = [answers(net, reply.tensors[MODEL], asked) for reply in arrived]
    return Examples(asked.inputs, torch.stack(logits).mean(dim=0), asked.ids)


def _purpose(round: Round, prefix: str, purpose: str) -> np.random.Generator:
    return round.rng(f"{prefix}/{purpose}")
