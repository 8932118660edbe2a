"""SCAFFOLD (Karimireddy et al., 2020), Option II with plain SGD, at its shortest: tests compare it with the library's.

y <- y - η (g_i(y) - c_i + c),   c_i⁺ = c_i - c + (x - y) / (K η),   x <- x + mean (y_i - x),   c <- c + 1 / N Σ Δc_i
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import fedpmt.methods as fl
from fedpmt.types import MODEL

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class State:
    """The server's: x, c and N."""

    model: fl.Averaged
    control: Tensors
    population: int


class Controlled(fl.LocalWork[dict[str, torch.Tensor]]):
    """SGD along g - c_i + c; a device keeps c_i."""

    def first(self, device: int, rng: Any) -> dict[str, torch.Tensor]:
        return {}

    def correct(self, run: fl.Run[Any], gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own, control = run.job.own or {}, run.task.tensors["control"]
        return {name: g + (control[name] - own.get(name, 0)) for name, g in gradients.items()}

    def reply(self, run: fl.Run[Any]) -> tuple[fl.Outcome, dict[str, torch.Tensor]]:
        own, sent, moved = run.job.own or {}, run.task.tensors, run.steps * run.site.settings.learning_rate
        change = {
            n: (sent[MODEL][n] - run.params[n].detach()) / moved - c for n, c in sent["control"].items()
        }
        return fl.Outcome({"control": change}), {n: own.get(n, 0) + one for n, one in change.items()}

    def extra(self, part: fl.Part, price: Any, structure: Any) -> fl.Extra:
        shapes = {name: structure.shapes[name] for name in structure.parameters}
        size = 4 * structure.size(structure.parameters)
        return fl.Extra(price(part).update, 0.0, 3 * size, size, {"control": shapes}, kept_bytes=size)


@dataclass(frozen=True)
class ShortScaffold(fl.Method[State, dict[str, torch.Tensor]]):
    """All devices train everything and correct for their drift."""

    @property
    def traits(self) -> fl.Traits:
        return fl.Traits(sends_more=True, keeps="a control variate", optimizers=("sgd",))

    @property
    def local(self) -> fl.LocalWork[Any]:
        return Controlled()

    def init(self, setup: fl.Setup) -> State:
        start = setup.prototypes[fl.GLOBAL]
        zeros = {name: torch.zeros_like(start.tensors[name]) for name in start.structure.parameters}
        return State(fl.Averaged(start.structure, start.tensors), zeros, setup.population)

    def assign(self, state: State, client: fl.Client, round: fl.Round) -> fl.Task:
        return fl.Task(
            (fl.full(state.model.structure),), {MODEL: state.model.tensors, "control": state.control}
        )

    def fold(self, state: State, round: fl.Round) -> fl.Fold[State]:
        def finish(replies: list[fl.Reply], server: fl.Server) -> fl.Step[State]:
            mean, control = fl.MeanFold(state.model, "overlap", "uniform"), dict(state.control)
            for reply in replies:
                mean.add(reply)
            for name, c in state.control.items():
                control[name] = c + sum(one.tensors["control"][name] for one in replies) / state.population
            return fl.Step(replace(state, model=mean.finish(server).state, control=control))

        return fl.Gather(finish)

    def predictor(self, state: State) -> fl.Predictor:
        return fl.Predictor("global", fl.GLOBAL, state.model.tensors)
