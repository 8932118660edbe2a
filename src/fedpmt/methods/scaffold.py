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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from fedpmt.methods.base import ABOVE_0, Method, Predictor, Round, Setup, Step
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.training.control import Control
    from fedpmt.training.local import LocalWork


@dataclass(frozen=True)
class Controlled:
    """The server's state."""

    structure: Structure
    tensors: Mapping[str, Tensor]  # x
    control: Mapping[str, Tensor]  # c, for parameters only
    population: int  # N


@dataclass(frozen=True)
class Scaffold(Method[Controlled, "Control"]):
    """Algorithm 1, with both options. A budget does not act on it.

    Option II, which the authors use in their experiments, is cheaper, but diverges at the default rate where devices hold
    two classes each: what sets c_i apart from c grows by about η K H / 2 from one of a device's rounds to the next. Option I
    takes its gradient at x and is the default.
    """

    sends_more: ClassVar[bool] = True

    option: Literal["I", "II", "none"] = "I"  # how c_i is renewed; none: never, it stays 0
    server_rate: float = 1.0  # η_g
    weight: Literal["samples", "uniform"] = "uniform"  # of y_i in x; c is uniform always

    def __post_init__(self) -> None:
        self.require(server_rate=(self.server_rate > 0, ABOVE_0))

    @property
    def keeps(self) -> str:
        return "a control variate"

    def kept_bytes(self, structures: Mapping[str, Structure]) -> int:
        return FLOAT_BYTES * structures[GLOBAL].size(structures[GLOBAL].parameters)

    def init(self, setup: Setup) -> Controlled:
        import torch

        prototype = setup.prototypes[GLOBAL]
        control = {name: torch.zeros_like(prototype.tensors[name]) for name in prototype.structure.parameters}
        return Controlled(prototype.structure, prototype.tensors, control, setup.population)

    def assign(self, state: Controlled, client: Client, round: Round) -> Task:
        from fedpmt.training.control import CONTROL

        return Task((full(state.structure),), {MODEL: state.tensors, CONTROL: state.control})

    def local(self) -> LocalWork[Control]:
        from fedpmt.training.control import ControlledWork

        return ControlledWork(self.option)

    def aggregate(self, state: Controlled, replies: Iterable[Reply], round: Round) -> Step[Controlled]:
        import torch

        from fedpmt.aggregation import CoverageMean
        from fedpmt.training.control import CONTROL

        mean = CoverageMean(state.tensors)
        changes = {name: torch.zeros_like(tensor) for name, tensor in state.control.items()}  # Σ Δc_i
        for reply in replies:
            mean.add(reply.part, reply.tensors[MODEL], reply.samples if self.weight == "samples" else 1)
            for name, change in reply.tensors[CONTROL].items():
                changes[name] += change
        tensors = mean.result()
        if self.server_rate != 1:
            # x <- x + η_g (mean of y_i - x); running statistics are no step, and stay the mean.
            for name in state.structure.parameters:
                tensors[name] = torch.lerp(state.tensors[name], tensors[name], self.server_rate)
        # c <- c + Σ Δc_i / N, with N all devices and not those of the round
        control = {name: c + changes[name] / state.population for name, c in state.control.items()}
        return Step(Controlled(state.structure, tensors, control, state.population))

    def predictor(self, state: Controlled) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)

    def neutral(self) -> Self:
        return replace(self, option="none", server_rate=1.0, weight="samples")
