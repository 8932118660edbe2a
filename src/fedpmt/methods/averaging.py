"""Methods that send a part, average what comes back, and take a server step. Loads no torch until it computes."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits
from fedpmt.parts.part import GLOBAL, Part, take
from fedpmt.training.local import LocalWork
from fedpmt.training.messages import UPDATE, Chance, Client, Reply, Task
from fedpmt.training.server import REPLACE, ServerOptimizer
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fedpmt.aggregation import Rule, Stretch
    from fedpmt.models.structure import Structure
    from fedpmt.training.server import Moments

Weight = Literal["samples", "uniform"]
"""a_k = |D_k|, or 1; in the paper all devices hold equally many samples."""

Normalise = Literal["none", "steps", "draws"]
"""What a reply's difference is divided by before the mean: nothing; its steps, so that a device with fewer of them has
its say; or its steps and how likely it was that it trained a layer, so that the mean is right over the draws."""


PLAIN = "plain"
"""The mean by weights, which trusts every reply."""


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
        self,
        state: Averaged,
        rule: Rule,
        weight: Weight,
        server: ServerOptimizer = REPLACE,
        mean: str = PLAIN,
        normalise: Normalise = "none",
        momentum: float = 0.0,
    ) -> None:
        from fedpmt.aggregation import CoverageMean, make_mean

        self._state, self._weight, self._server = state, weight, server
        self._normalise, self._momentum = normalise, momentum
        self._parameters = frozenset(() if normalise == "none" else state.structure.parameters)
        self._unit = 0.0  # τ of the first reply: steps are in its units, so that equal ones need no product
        plain = mean == PLAIN
        self._mean = CoverageMean(state.tensors, rule) if plain else make_mean(state.tensors, rule, mean)

    def add(self, reply: Reply) -> None:
        stretches = None if self._normalise == "none" else self._stretch(reply)
        weight = reply.samples if self._weight == "samples" else 1
        self._mean.add(reply.part, reply.tensors[UPDATE], weight, stretches, reply.discount)

    def finish(self, server: Server) -> Step[Averaged]:
        state = self._state
        if self._server == REPLACE:
            return Step(replace(state, tensors=self._mean.result()))
        tensors, moments = self._server.apply(self._mean, state.structure.parameters, state.moments)
        return Step(Averaged(state.structure, tensors, moments))

    def _stretch(self, reply: Reply) -> dict[str, Stretch]:
        """1 / (q_kl τ_k) and E[τ_k] of each parameter; running statistics of norms are no sums of steps."""
        from fedpmt.aggregation import Stretch

        if reply.steps < 1:
            raise ValueError(f"the server did not say how many steps device {reply.device} was asked for")
        chances = reply.chances if self._normalise == "draws" else ()
        possible = chances or (Chance(1.0, reply.part, reply.steps),)
        steps = effective_steps(reply.steps, self._momentum)
        self._unit = self._unit or steps
        expected = expect(
            [(one.probability, effective_steps(one.steps, self._momentum) / self._unit) for one in possible]
        )
        names = {name: None for one in possible for name in one.part.trained}
        stretches = {}
        for name in names if chances else reply.part.trained:
            if name not in self._parameters:
                continue
            drawn = expect([(one.probability, float(name in one.part.trained)) for one in possible])  # q_kl
            stretches[name] = Stretch(1 / (drawn * (steps / self._unit)), expected)
        return stretches


def expect(values: Sequence[tuple[float, float]]) -> float:
    """The mean of values with these probabilities; exact where they are all the same.

    >>> expect([(0.75, 1.0), (0.25, 5.0)]), expect([(1 / 3, 0.1), (2 / 3, 0.1)])
    (2.0, 0.1)
    """
    first = values[0][1]
    if all(value == first for _, value in values):
        return first
    return math.fsum(probability * value for probability, value in values)


def effective_steps(steps: int, momentum: float) -> float:
    """How often the K gradients of a local round stand in x - y, all together, in units of η.

    K without momentum. With it each gradient comes back in later steps, and dividing by K alone would take the
    gradient for up to 1 / (1 - m) times what it is.

    >>> effective_steps(3, 0.0), effective_steps(3, 0.5)  # 1 + 1.5 + 1.75
    (3.0, 4.25)
    """
    total, weight = 0.0, 0.0
    for _ in range(steps):
        weight = 1 + momentum * weight
        total += weight
    return total


@dataclass(frozen=True)
class PartAveraging(Method[Averaged, Any]):
    """Sends each device a part of the global model and averages every entry over those that trained it.

    A method is four values: which part a device gets (`part`), what it does with it (`local`), how replies are
    folded (`rule`, `mean`), and what becomes of the folded difference (`server`).
    """

    weight: Weight = "samples"
    mean: str = PLAIN  # or robust: median, trimmed:SHARE, clipped:NORM
    server: ServerOptimizer = REPLACE
    normalise: Normalise = "none"

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
    def rule(self) -> Rule:
        """How entries that only some devices trained are averaged."""
        return "overlap"

    @property
    def traits(self) -> Traits:
        return Traits(sums="entries", combines=f"{self.rule} mean")

    def init(self, setup: Setup) -> Averaged:
        prototype = setup.prototypes[GLOBAL]
        return Averaged(prototype.structure, prototype.tensors)

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        return send(state.tensors, self.offer(state, client, round))

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return MeanFold(state, self.rule, self.weight, self.server, self.mean, self.normalise, round.momentum)

    def predictor(self, state: Averaged) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)


def why_rounds(method: Method[Any, Any]) -> str:
    """Say why a method cannot run on the clock of events; empty where it can."""
    traits = method.traits
    if traits.keeps:
        return f"its devices keep {traits.keeps}"
    if type(method).cohort is not Method.cohort:
        return "it chooses its devices itself"
    if traits.needs_round or traits.discounts or isinstance(method, PartAveraging):
        return traits.needs_round
    return "its fold does not make late replies count less (Traits.discounts)"


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
    """A method put together from values: the parts of one method with another's local work, rule or server.

    >>> from fedpmt.methods.fedpmt import FedPMT
    >>> from fedpmt.methods.proximal import Proximal
    >>> method = Composed(parts=FedPMT(), local=Proximal(0.1), rule="fill")
    >>> method.traits.combines
    'fill mean'
    """

    parts: Parts | None = None
    local: LocalWork[Any] = SGD_STEPS
    rule: Rule = "overlap"

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return self.offer(state, client, round)[0]

    def offer(self, state: Averaged, client: Client, round: Round) -> tuple[Part, ...]:
        from fedpmt.parts.depth import full

        return (full(state.structure),) if self.parts is None else self.parts.offer(state, client, round)
