"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020.

The server keeps a control variate c and each device i one of its own, c_i, from round to round. c - c_i tells
a device how the others' gradients differ from its own, and takes its drift out of every step:

    y <- y - η_l (g_i(y) - c_i + c),   K steps from y = x
    Option I:   c_i⁺ = ∇F_i(x)
    Option II:  c_i⁺ = c_i - c + (x - y) / (K η_l)
    x <- x + η_g / |S| Σ_{i in S} (y_i - x),   c <- c + 1 / N Σ_{i in S} (c_i⁺ - c_i),   N devices in all

so that c is the mean of all c_i at any time, whoever takes part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from fedpmt.methods.averaging import Averaged, MeanFold, Weight, effective_steps
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits, require
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL
from fedpmt.training.local import LocalWork, Outcome
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.optimizers import SGD
from fedpmt.training.server import REPLACE, ServerOptimizer, make_server
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.training.local import Job, LocalSettings, PriceOf, Reach, Rng, Run

CONTROL = "control"
"""The group that travels with the weights: c down, Δc_i up, for parameters and not for buffers."""

Option = Literal["I", "II", "none"]


@dataclass(frozen=True)
class Control:
    """What a device keeps: c_i. A tensor that is not in it is zero."""

    variate: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Controlled(LocalWork[Control]):
    """SGD along g - c_i + c, and a new c_i after it. Every device trains the whole model."""

    option: Option

    def first(self, device: int, rng: Rng) -> Control:
        return Control()

    def drift(self, job: Job[Control]) -> dict[str, Tensor]:
        """c - c_i; zero where they are equal, and the step then that of plain SGD to the bit."""
        mine, control = variate(job.own), job.task.tensors[CONTROL]
        return {name: one - mine[name] if name in mine else one for name, one in control.items()}

    def start(self, job: Job[Control]) -> Run[Control]:
        run = super().start(job)
        run.memo["drift"] = self.drift(job)
        if self.option == "I":
            run.memo["gradient"] = full_gradient(self, run)
        return run

    def correct(self, run: Run[Control], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        drift = run.memo["drift"]
        return {name: gradient + drift[name] for name, gradient in gradients.items()}

    def compiled(self, job: Job[Control]) -> StepRule | None:
        return None if self.option == "I" else job.rule(constant=self.drift(job))

    def reply(self, run: Run[Control]) -> tuple[Outcome, Control]:
        """Δc_i = c_i⁺ - c_i, and the new c_i: made of the very numbers that the server adds to c."""
        mine, change = variate(run.job.own), self.change(run)
        kept = {name: mine[name] + tensor if name in mine else tensor for name, tensor in change.items()}
        return Outcome({CONTROL: change}), Control(kept)

    def change(self, run: Run[Control]) -> dict[str, Tensor]:
        """Δc_i."""
        import torch

        mine, control, received = variate(run.job.own), run.task.tensors[CONTROL], run.task.tensors[MODEL]
        if self.option == "I":
            # c_i⁺ = ∇F_i(x)
            gradient: dict[str, Tensor] = run.memo["gradient"]
            return {name: new - mine[name] if name in mine else new for name, new in gradient.items()}
        distance = travelled(run.site.settings, run.steps)
        if self.option == "none" or distance == 0:
            return {name: torch.zeros_like(one) for name, one in control.items()}
        # c_i⁺ = c_i - c + (x - y) / (K η)
        return {
            name: (received[name] - run.params[name].detach()) / distance - one
            for name, one in control.items()
        }

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """One more operation per trained parameter and step; c, c_i and c - c_i are held; Option I has a pass more."""
        cost, variates = price(part), structure.nbytes(structure.parameters)
        return replace(
            part.extra,
            step=cost.update,
            # Forward, backward, and gradients added up in the place of the update.
            once=cost.operations if self.option == "I" else 0.0,
            memory_bytes=(4 if self.option == "I" else 3) * variates,
            task_bytes=variates,
            answers={CONTROL: {name: structure.shapes[name] for name in structure.parameters}},
            kept_bytes=variates,
        )

    def bounds(self, task: Task, reach: Reach) -> Mapping[str, float]:
        """Of Δc_i: that of (x - y) / (K η) - c, or of the two gradients that Option I takes from each other."""
        if self.option == "I":
            return {CONTROL: 2 * reach.gradient}
        distance = travelled(reach.settings, reach.steps)
        if self.option == "none" or distance == 0:
            return {CONTROL: 0.0}
        before = math.sqrt(
            sum(float(one.cpu().double().square().sum()) for one in task.tensors[CONTROL].values())
        )
        return {CONTROL: reach.moved / distance + before}


def variate(own: Control | None) -> Mapping[str, Tensor]:
    """c_i by name; empty before a device's first accepted round."""
    return {} if own is None else own.variate


def travelled(settings: LocalSettings, steps: int) -> float:
    """K η of plain SGD, and what takes its place with momentum: how far a constant gradient of 1 would go."""
    momentum = settings.optimizer.momentum if isinstance(settings.optimizer, SGD) else 0.0
    return effective_steps(steps, momentum) * settings.learning_rate


def full_gradient(work: Controlled, run: Run[Control]) -> dict[str, Tensor]:
    """∇F_i(x), over all samples, batch by batch."""
    import torch

    batch, total = run.site.settings.batch, len(run.data)
    # On copies of the buffers: this pass is to leave no trace in running statistics.
    probe = replace(run, fixed={name: tensor.clone() for name, tensor in run.fixed.items()})
    summed = {name: torch.zeros_like(parameter) for name, parameter in run.params.items()}
    for start in range(0, total, batch):
        examples = run.data.take(slice(start, start + batch))
        gradients = torch.autograd.grad(work.loss(probe, examples), list(run.params.values()))
        for own, gradient in zip(summed.values(), gradients, strict=True):
            own.add_(gradient, alpha=len(examples) / total)
    return summed


@dataclass(frozen=True)
class Variates:
    """The server's state."""

    model: Averaged  # x
    control: Mapping[str, Tensor]  # c, for parameters only
    population: int  # N

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The global model."""
        return self.model.tensors


class ControlFold(Fold[Variates]):
    """The mean of y_i - x, and c with the changes of all c_i in it."""

    def __init__(self, method: Scaffold, state: Variates) -> None:
        import torch

        self._state = state
        self._mean = MeanFold(state.model, "overlap", method.weight, method.step)
        self._changes = {name: torch.zeros_like(one) for name, one in state.control.items()}  # Σ Δc_i

    def add(self, reply: Reply) -> None:
        self._mean.add(reply)
        for name, change in reply.tensors[CONTROL].items():
            self._changes[name] += change

    def finish(self, server: Server) -> Step[Variates]:
        state = self._state
        # c <- c + Σ Δc_i / N, with N all devices and not those of the round
        control = {name: c + self._changes[name] / state.population for name, c in state.control.items()}
        return Step(Variates(self._mean.finish(server).state, control, state.population))


@dataclass(frozen=True)
class Scaffold(Method[Variates, Control]):
    """Algorithm 1, with both options. A budget does not act on it.

    Option II, which the authors use in their experiments, is cheaper, but diverges at the default rate where devices
    hold two classes each: what sets c_i apart from c grows by about η K H / 2 from one of a device's rounds to the
    next. Option I takes its gradient at x and is the default.
    """

    option: Option = "I"  # how c_i is renewed; none: never, it stays 0
    server_rate: float = 1.0  # η_g
    weight: Weight = "uniform"  # of y_i in x; c is uniform always
    server: ServerOptimizer = REPLACE

    def __post_init__(self) -> None:
        require(self, server_rate=(self.server_rate > 0, "> 0"))
        alone = self.server_rate == 1 or self.server == REPLACE
        require(self, server_rate=(alone, "1 with a server optimizer, which has a rate of its own"))

    @property
    def traits(self) -> Traits:
        # Option II reads gradients off how far plain steps went.
        optimizers = ("sgd",) if self.option == "II" else None
        return Traits(sends_more=True, keeps="a control variate", optimizers=optimizers)

    @property
    def local(self) -> LocalWork[Control]:
        return Controlled(self.option)

    @property
    def step(self) -> ServerOptimizer:
        """x <- x + η_g (mean of y_i - x); or the server's own optimizer, which has a rate itself."""
        plain = self.server == REPLACE and self.server_rate != 1
        return make_server("sgd", self.server_rate) if plain else self.server

    def init(self, setup: Setup) -> Variates:
        import torch

        prototype = setup.prototypes[GLOBAL]
        control = {name: torch.zeros_like(prototype.tensors[name]) for name in prototype.structure.parameters}
        return Variates(Averaged(prototype.structure, prototype.tensors), control, setup.population)

    def assign(self, state: Variates, client: Client, round: Round) -> Task:
        tensors = {MODEL: state.model.tensors, CONTROL: state.control}
        return Task((full(state.model.structure),), tensors)

    def fold(self, state: Variates, round: Round) -> Fold[Variates]:
        return ControlFold(self, state)

    def predictor(self, state: Variates) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)

    def neutral(self) -> Self:
        return replace(self, option="none", server_rate=1.0, weight="samples")
