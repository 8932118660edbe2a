"""Methods that send a part, average what comes back, and take a server step. Loads no torch until it computes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits
from fedpmt.parts.part import GLOBAL, Part, take
from fedpmt.training.local import LocalWork
from fedpmt.training.messages import UPDATE, Client, Reply, Task
from fedpmt.training.server import REPLACE, ServerOptimizer
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.aggregation import Rule
    from fedpmt.models.structure import Structure
    from fedpmt.training.server import Moments

Weight = Literal["samples", "uniform"]
"""a_k = |D_k|, or 1; in the paper all devices hold equally many samples."""


def weight_of(weight: Weight, samples: int) -> int:
    """a_k of a device by its number of samples."""
    return samples if weight == "samples" else 1


@dataclass(frozen=True)
class Averaged:
    """The server's state: the global model w^t, and what the server's optimizer keeps."""

    structure: Structure
    tensors: Mapping[str, Tensor]
    moments: Moments = field(default_factory=dict)


class MeanFold(Fold[Averaged]):
    """The coverage-weighted mean of all replies, then the server's step."""

    def __init__(
        self, state: Averaged, rule: Rule, weight: Weight, server: ServerOptimizer = REPLACE
    ) -> None:
        from fedpmt.aggregation import CoverageMean

        self._state, self._weight, self._server = state, weight, server
        self._mean = CoverageMean(state.tensors, rule)

    def add(self, reply: Reply) -> None:
        weight = weight_of(self._weight, reply.samples)
        self._mean.add(reply.part, reply.tensors[UPDATE], weight, reply.discount)

    def finish(self, server: Server) -> Step[Averaged]:
        state = self._state
        if self._server == REPLACE:
            return Step(replace(state, tensors=self._mean.result()))
        tensors, moments = self._server.apply(self._mean, state.structure.parameters, state.moments)
        return Step(Averaged(state.structure, tensors, moments))


@dataclass(frozen=True)
class PartAveraging(Method[Averaged, Any]):
    """Sends each device a part of the global model and averages every entry over those that trained it.

    A method is four values: which part a device gets (`part`), what it does with it (`local`), how replies are
    folded (`mean`), and what becomes of the folded difference (`server`).
    """

    weight: Weight = "samples"
    server: ServerOptimizer = REPLACE

    @abstractmethod
    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        """Which part this device gets: all that tells most of these methods apart."""

    def offer(self, state: Averaged, client: Client, round: Round) -> tuple[Part, ...]:
        """The parts a device may choose from: the one the server decided on."""
        return (self.part(state, client, round),)

    @property
    def local(self) -> LocalWork[Any]:
        return LocalWork()

    @property
    def mean(self) -> Rule:
        """How entries that only some devices trained are averaged."""
        return "overlap"

    @property
    def traits(self) -> Traits:
        return Traits(sums="entries", combines=f"{self.mean} mean")

    def init(self, setup: Setup) -> Averaged:
        prototype = setup.prototypes[GLOBAL]
        return Averaged(prototype.structure, prototype.tensors)

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        return send(state.tensors, self.offer(state, client, round))

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return MeanFold(state, self.mean, self.weight, self.server)

    def predictor(self, state: Averaged) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)


def send(tensors: Mapping[str, Tensor], offer: tuple[Part, ...], **more: Any) -> Task:
    """A task with these parts on offer, and the tensors that they are made of."""
    sent = {name: take(tensors[name], selection) for name, selection in offer[0].sent.items()}
    return Task(offer, {MODEL: sent}, **more)


def with_steps(task: Task, client: Client, steps: int) -> Task:
    """The task with fewer steps than a whole local round has, or as it is where they are all of them."""
    if steps == client.steps:
        return task
    # The label says how much, since the same part is less work here.
    part = replace(task.offer[0], label=f"{task.offer[0].label}, {steps} of {client.steps} steps")
    return replace(task, offer=(part,), steps=steps)


class Parts(Protocol):
    """Anything that says which parts a device may choose from, such as `FedPMT()`."""

    def offer(self, state: Averaged, client: Client, round: Round) -> tuple[Part, ...]:
        """The parts on offer."""
        ...


SGD_STEPS: LocalWork[Any] = LocalWork()


@dataclass(frozen=True)
class Composed(PartAveraging):
    """A method put together from values: the parts of one method with another's local work, mean or server.

    >>> from fedpmt.methods.fedpmt import FedPMT
    >>> from fedpmt.methods.fedprox import Proximal
    >>> method = Composed(parts=FedPMT(), local=Proximal(0.1), mean="fill")
    >>> method.traits.combines
    'fill mean'
    """

    parts: Parts | None = None
    local: LocalWork[Any] = SGD_STEPS
    mean: Rule = "overlap"

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return self.offer(state, client, round)[0]

    def offer(self, state: Averaged, client: Client, round: Round) -> tuple[Part, ...]:
        from fedpmt.parts.depth import full

        return (full(state.structure),) if self.parts is None else self.parts.offer(state, client, round)
