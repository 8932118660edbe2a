"""DepthFL: Kim, Yu, Kim and Moon, "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", 2023; and its
plain form, the skeleton of InclusiveFL: Liu et al., "No One Left Behind: Inclusive Federated Learning over
Heterogeneous Devices", 2022.

A device gets the first layers of the model, as many as it can afford, with a classifier behind them: FedPMT's mirror
image. In DepthFL it gets the classifiers of all smaller depths too, and those of a device learn from each other:

    ℓ = Σ_i CE(z_i, y) + w_t / (d - 1) Σ_i Σ_{j≠i} KL(softmax z_j || softmax z_i),   w_t = exp(-5 (1 - t / T)²) up to T

with no gradient into z_j. The server averages each tensor over the devices that have it. With FedDyn (Acar et al.,
2021) a device keeps λ_k, and the server u:

    g <- g - λ_k + α (θ - θ^t),   λ_k <- λ_k - α (θ_k - θ^t),   u <- u + Σ_k (θ_k - θ^t) / N,   θ^{t+1} = mean + u

With InclusiveFL's momentum distillation the last layer of a net with e layers learns from the next larger one, which
has n, where their tensors have the same shapes. With Δ_k the change of device k, and K the devices of the larger net:

    Δ_k[e] <- (1 - β) Δ_k[e] + β m_e,   m_e = mean_{k in K} mean_{l = e..n} Δ_k[l] of the last round that had some
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from fedpmt.methods.averaging import PLAIN, Averaged, MeanFold, Weight, send, weight_of
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits, acts, require
from fedpmt.parts.depth import ALL_EXITS, even_ends, exit_of, exits_in, until, with_exits
from fedpmt.parts.part import GLOBAL
from fedpmt.pricing.matching import largest
from fedpmt.training.local import LocalWork, Outcome
from fedpmt.training.messages import UPDATE
from fedpmt.training.server import REPLACE, ServerOptimizer
from fedpmt.types import MODEL, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Layer, Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.training.local import Job, PriceOf, Rng, Run
    from fedpmt.training.messages import Client, Reply, Task
    from fedpmt.types import Arrays, Examples, Tensors

USUAL_EXITS = 4
"""As in the paper, where the model has enough layers."""


@dataclass(frozen=True)
class Distilling(LocalWork[Any]):
    """The cross-entropy of all exits, and what each of them learns from the others."""

    distil: float  # the largest w_t
    ramp: int  # T

    def weight(self, index: int) -> float:
        """w_t, which grows from almost nothing."""
        # w_t = exp(-5 (1 - t / T)²)
        left = 1 - min(index, self.ramp) / self.ramp if self.ramp else 0.0
        return self.distil * math.exp(-5 * left**2)

    def loss(self, run: Run[Any], batch: Examples) -> Tensor:
        from fedpmt.training.distillation import divergence

        objective, outputs = run.site.objective, run.forward(run.tensors, batch.inputs)
        if run.part.model == GLOBAL:
            return objective.loss(outputs, batch.targets)
        loss, *others = [objective.loss(logits, batch.targets) for logits in outputs]
        loss = sum(others, start=loss)
        weight = self.weight(run.job.round) / max(1, len(outputs) - 1)
        if weight:
            for pupil in outputs:
                for teacher in outputs:
                    if teacher is not pupil:
                        loss = loss + weight * divergence(pupil, teacher)
        return loss

    def compiled(self, job: Job[Any]) -> StepRule | None:
        return job.rule() if job.part.model == GLOBAL else None


@dataclass(frozen=True)
class Drift:
    """What a device keeps for FedDyn: λ_k. A tensor that is not in it is zero."""

    gradient: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Dynamic(Distilling):
    """The same with FedDyn's regularisation."""

    alpha: float

    def first(self, device: int, rng: Rng) -> Drift:
        return Drift()

    def correct(self, run: Run[Drift], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        kept, received = (run.job.own or Drift()).gradient, run.task.tensors[MODEL]
        corrected = {}
        for name, gradient in gradients.items():
            # g <- g - λ_k + α (θ - θ^t)
            pulled = gradient + self.alpha * (run.params[name].detach() - received[name])
            corrected[name] = pulled - kept[name] if name in kept else pulled
        return corrected

    def reply(self, run: Run[Drift]) -> tuple[Outcome, Drift]:
        kept, received = (run.job.own or Drift()).gradient, run.task.tensors[MODEL]
        # λ_k <- λ_k - α (θ_k - θ^t)
        moved = {
            name: self.alpha * (received[name] - one.detach()) + kept.get(name, 0.0)
            for name, one in run.params.items()
        }
        return Outcome(), Drift({**kept, **moved})

    def compiled(self, job: Job[Any]) -> None:
        return None

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """Two more operations per trained parameter and step, and λ_k, which is kept."""
        names = [name for name in structure.parameters if name in part.trained]
        held = structure.nbytes(names)
        return replace(part.extra, step=2.0 * structure.size(names), memory_bytes=held, kept_bytes=held)


@dataclass(frozen=True)
class Exits:
    """The server's state."""

    model: Averaged  # the whole model, with all exits
    population: int  # N
    drift: Mapping[str, Tensor] = field(default_factory=dict)  # u of FedDyn
    momentum: Mapping[str, Tensor] = field(default_factory=dict)  # m_e, by tensor of layer e

    @property
    def tensors(self) -> Tensors:
        """The whole model with all exits."""
        return self.model.tensors


@dataclass(frozen=True)
class Lesson:
    """What the last layer of a net learns from the next larger one."""

    pupil: str  # the net's name
    teacher: str  # the larger net's
    tensors: Mapping[str, tuple[str, ...]]  # those of its last layer, and the larger net's of the same shape


def lessons(structure: Structure, whole: str) -> tuple[Lesson, ...]:
    """The lessons of all nets but the largest, which is called `whole`; buffers are no gradients, and not taught."""
    ends = (*exits_in(structure), len(structure.layers) - 1)
    nets = (*(until(end) for end in ends[:-1]), whole)
    found = []
    for place, end in enumerate(ends[:-1]):
        layers = [_by_suffix(layer) for layer in structure.layers[end - 1 : ends[place + 1]]]
        taught = {
            name: tuple(
                layer[suffix]
                for layer in layers
                if suffix in layer and structure.shapes[layer[suffix]] == structure.shapes[name]
            )
            for suffix, name in layers[0].items()
        }
        # One that only its own layer has would learn nothing that the mean does not tell it.
        tensors = {name: names for name, names in taught.items() if len(names) > 1}
        found.append(Lesson(nets[place], nets[place + 1], tensors))
    return tuple(found)


def _by_suffix(layer: Layer) -> dict[str, str]:
    """A layer's parameters without its exit's, by what their names have behind the layer's own."""
    return {name.removeprefix(f"{layer.name}."): name for name in layer.parameters if exit_of(name) is None}


class ExitsFold(Fold[Exits]):
    """The mean of each tensor over those that have it; with FedDyn, and what all devices have drifted by so far."""

    def __init__(self, method: DepthFL, state: Exits) -> None:
        self._state, self._dynamic = state, bool(method.dynamic)
        self._mean = MeanFold(state.model, "overlap", method.weight, method.server, method.mean)
        self._moved = dict[str, "Tensor"]()  # Σ_k (θ_k - θ^t)
        self._beta, self._weight = method.teaching, method.weight
        self._lessons = method.lessons(state.model.structure) if self._beta else ()
        self._taught = dict[str, tuple["Tensor", float]]()  # Σ_k a_k mean_l Δ_k[l] and Σ_k a_k

    def add(self, reply: Reply) -> None:
        self._mean.add(self._teach(reply) if self._beta else reply)
        if self._dynamic:
            for name in self._state.model.structure.parameters:
                if name in reply.update:
                    change = reply.update[name]
                    self._moved[name] = self._moved[name] + change if name in self._moved else change

    def _teach(self, reply: Reply) -> Reply:
        """The reply with what its last layer learns; what it teaches is kept for the next round."""
        import torch

        update, weight = dict(reply.update), weight_of(self._weight, reply.samples)
        for lesson in self._lessons:
            for name, names in lesson.tensors.items():
                if lesson.teacher == reply.part.model:
                    mean = torch.stack([reply.update[one] for one in names]).mean(dim=0)
                    total, weights = self._taught.get(name, (torch.zeros_like(mean), 0.0))
                    # A late reply teaches less, as it counts less in the mean.
                    self._taught[name] = total + weight * reply.discount * mean, weights + weight
                elif lesson.pupil == reply.part.model and name in self._state.momentum:
                    # Δ_k[e] <- (1 - β) Δ_k[e] + β m_e
                    update[name] = (1 - self._beta) * update[name] + self._beta * self._state.momentum[name]
        return replace(reply, tensors={**reply.tensors, UPDATE: update})

    def finish(self, server: Server) -> Step[Exits]:
        state, model = self._state, self._mean.finish(server).state
        if self._beta:
            learnt = {name: total / weights for name, (total, weights) in self._taught.items()}
            return Step(replace(state, model=model, momentum={**state.momentum, **learnt}))
        if not self._dynamic:
            return Step(replace(state, model=model))
        # u <- u + Σ_k (θ_k - θ^t) / N
        drift = {
            name: moved / state.population + state.drift.get(name, 0.0) for name, moved in self._moved.items()
        }
        tensors = {name: one + drift[name] if name in drift else one for name, one in model.tensors.items()}
        return Step(replace(state, model=replace(model, tensors=tensors), drift={**state.drift, **drift}))


@dataclass(frozen=True)
class DepthFL(Method[Exits, Any]):
    """The first layers on each device, with a classifier at every depth; classifiers learn from each other."""

    weight: Weight = "samples"
    exits: int | None = (
        None  # classifiers, the model's own among them; None: 4, or fewer for a model of few layers
    )
    heads: Literal["all", "last"] = (
        "all"  # the classifiers that a device trains: of all its depths, or its last
    )
    distil: float = 1.0  # the largest w_t; 0: classifiers don't learn from each other
    ramp: int = 300  # T, rounds until w_t is at its largest
    dynamic: float = 0.0  # α of FedDyn; 0: without it
    teaching: float = 0.0  # β of InclusiveFL's momentum distillation; 0: without it
    predicts: Literal["own", "ensemble"] = (
        "own"  # what is evaluated: the model's own classifier, or the mean of all
    )
    mean: str = PLAIN
    server: ServerOptimizer = REPLACE

    def __post_init__(self) -> None:
        require(
            self,
            exits=(self.exits is None or self.exits >= 1, ">= 1"),
            distil=(self.distil >= 0, ">= 0"),
            ramp=(self.ramp >= 0, ">= 0"),
            dynamic=(self.dynamic >= 0, ">= 0"),
            teaching=(0 <= self.teaching < 1, ">= 0 and < 1"),
        )
        require(
            self,
            # The next round's momentum is a plain mean, through which a false reply would reach all.
            teaching=(not self.teaching or self.mean == PLAIN, "0 with a robust mean"),
            dynamic=(not self.dynamic or not self.teaching, "0 with teaching"),
        )
        plain = self.server == REPLACE and self.mean == PLAIN
        require(self, dynamic=(self.dynamic == 0 or plain, "0 with a server optimizer or a robust mean"))

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            needs_classes=True,
            combines="overlap mean"
            + (", FedDyn" if self.dynamic else "")
            + (", momentum distillation" if self.teaching else ""),
            discounts=True,
            keeps="a gradient of its loss" if self.dynamic else "",
            budget=acts("device"),
        )

    @property
    def local(self) -> LocalWork[Any]:
        if self.dynamic:
            return Dynamic(self.distil, self.ramp, self.dynamic)
        return Distilling(self.distil, self.ramp)

    def models(
        self, model: LayeredModel, example: Arrays, rng: Callable[[str], np.random.Generator]
    ) -> Mapping[str, LayeredModel]:
        """The nets of all depths, and the whole one with all exits; none where the model's own exit is the only one."""
        from fedpmt.methods.exits import nets_with_exits

        layers, name = len(model.structure.layers), type(self).__name__.lower()
        most = max(1, layers - 1)
        if self.exits is not None and self.exits > most:
            raise SettingError(
                f"{name}.exits must be <= {most} for a model of {layers} layers (got {self.exits})"
            )
        ends = even_ends(layers, self.exits or min(USUAL_EXITS, most))
        return nets_with_exits(name, model, example, ends, rng, every=self.heads == "all") if ends else {}

    def lessons(self, structure: Structure) -> tuple[Lesson, ...]:
        """Who learns what from whom, with momentum distillation."""
        *_, whole, _ = self.depths(structure)
        memo, key = structure.memo, (lessons, whole.model)
        if key not in memo:
            memo[key] = lessons(structure, whole.model)
        made: tuple[Lesson, ...] = memo[key]
        return made

    def init(self, setup: Setup) -> Exits:
        whole = setup.prototypes.get(ALL_EXITS, setup.prototypes[GLOBAL])
        if self.teaching and not any(lesson.tensors for lesson in self.lessons(whole.structure)):
            name = type(self).__name__.lower()
            raise SettingError(
                f"{name}.teaching must be 0 for this model (got {self.teaching:g}): behind no exit there is a layer "
                "of the same shape as the one before it"
            )
        return Exits(Averaged(whole.structure, whole.tensors), setup.population)

    def depths(self, structure: Structure) -> tuple[Part, ...]:
        """The parts of all depths, smallest first, and last the whole model without exits."""
        memo = structure.memo
        if (DepthFL, self.heads) not in memo:
            ends = exits_in(structure)
            count, every = len(ends) + 1, self.heads == "all" and bool(ends)
            early = [
                with_exits(structure, ends if every else (end,), until(end), f"depth {depth} of {count}", end)
                for depth, end in enumerate(ends, start=1)
            ]
            model = with_exits(structure, (), GLOBAL, f"depth {count} of {count}")
            whole = with_exits(structure, ends, ALL_EXITS, model.label) if every else model
            memo[DepthFL, self.heads] = (*early, whole, model)
        made: tuple[Part, ...] = memo[DepthFL, self.heads]
        return made

    def part(self, state: Exits, client: Client) -> Part:
        """The deepest part that fits. A device that can afford the whole model gets all of it with its exits."""
        *early, whole, model = self.depths(state.model.structure)
        plan = client.plan
        # The model as it is, without what exits and FedDyn add: else nobody would train its last layers.
        able = plan is None or plan.meter.quote(model).usage <= plan.limit
        return whole if able or not early else largest(early, client.fits)

    def assign(self, state: Exits, client: Client, round: Round) -> Task:
        return send(state.tensors, (self.part(state, client),))

    def fold(self, state: Exits, round: Round) -> Fold[Exits]:
        return ExitsFold(self, state)

    def predictor(self, state: Exits) -> Predictor:
        if self.predicts == "ensemble" and exits_in(state.model.structure):
            return Predictor("global", ALL_EXITS, state.tensors)
        own = {name: tensor for name, tensor in state.tensors.items() if exit_of(name) is None}
        return Predictor("global", GLOBAL, own)

    def neutral(self) -> Self:
        return replace(self, exits=1, dynamic=0.0, teaching=0.0)


@dataclass(frozen=True)
class InclusiveFL(DepthFL):
    """The first layers on each device, with one classifier behind them; nothing is distilled."""

    heads: Literal["all", "last"] = "last"
    distil: float = 0.0
