"""FedAvg with one defect each: every check of the contract must find its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from fedpmt.methods import (
    UPDATE,
    Averaged,
    Fold,
    Gather,
    LocalWork,
    Method,
    Outcome,
    Server,
    Step,
    Traits,
    full,
    suffixes,
)
from fedpmt.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from fedpmt.methods import Client, Part, Reply, Round, Run, Task

COUNTER = itertools.count()


class Finishing(Fold[Averaged]):
    """The fold of FedAvg with something done to what it gives."""

    def __init__(self, fold: Fold[Averaged], change: Any) -> None:
        self._fold, self._change = fold, change

    def add(self, reply: Reply) -> None:
        self._fold.add(reply)

    def finish(self, server: Server) -> Step[Averaged]:
        step: Step[Averaged] = self._change(self._fold.finish(server))
        return step


def moved(step: Step[Averaged], by: float) -> Step[Averaged]:
    tensors = {name: tensor + by for name, tensor in step.state.tensors.items()}
    return replace(step, state=replace(step.state, tensors=tensors))


@dataclass
class Changeable(Method[Averaged, None]):
    """A dataclass, but not a frozen one."""

    weight: str = "samples"
    local = FedAvg.local
    init, assign, fold, predictor = FedAvg.init, FedAvg.assign, FedAvg.fold, FedAvg.predictor


@dataclass(frozen=True)
class Overwriting(FedAvg):
    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        next(iter(state.tensors.values())).add_(1.0)
        return super().fold(state, round)


@dataclass(frozen=True)
class Kept:
    count: torch.Tensor


class Counting(LocalWork[Kept]):
    def first(self, device: int, rng: Any) -> Kept:
        return Kept(torch.zeros(1))

    def reply(self, run: Run[Kept]) -> tuple[Outcome, Kept | None]:
        assert run.job.own is not None
        run.job.own.count.add_(1)
        return Outcome(), run.job.own


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Devices write over what they have kept."""

    @property
    def traits(self) -> Traits:
        return Traits(keeps="a count")

    @property
    def local(self) -> LocalWork[Any]:
        return Counting()


@dataclass(frozen=True)
class Remembering(Averaged):
    seen: Any = ()


@dataclass(frozen=True)
class Unwritable(FedAvg):
    """Its state holds what no file can."""

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        def with_set(step: Step[Averaged]) -> Step[Averaged]:
            new = step.state
            return Step(Remembering(new.structure, new.tensors, new.moments, {1, 2}))

        return Finishing(super().fold(state, round), with_set)


class LastWins(Fold[Averaged]):
    def __init__(self, state: Averaged) -> None:
        self._state, self._last = state, dict[str, torch.Tensor]()

    def add(self, reply: Reply) -> None:
        self._last = {name: self._state.tensors[name] + change for name, change in reply.update.items()}

    def finish(self, server: Server) -> Step[Averaged]:
        return Step(replace(self._state, tensors={**self._state.tensors, **self._last}))


@dataclass(frozen=True)
class Hasty(FedAvg):
    """The last reply wins."""

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return LastWins(state)


class Ageless(Finishing):
    """Late replies count as if they were not late."""

    def add(self, reply: Reply) -> None:
        super().add(replace(reply, discount=1.0))


@dataclass(frozen=True)
class Undiscounted(FedAvg):
    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Ageless(super().fold(state, round), lambda step: step)


@dataclass(frozen=True)
class Restless(FedAvg):
    """The server moves all entries, whoever has trained them."""

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return suffixes(state.structure, 2)[0]

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Finishing(super().fold(state, round), lambda step: moved(step, 0.1))


@dataclass(frozen=True)
class Uncovered(Restless):
    """The server's moments move on where nobody has trained."""

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        def decayed(step: Step[Averaged]) -> Step[Averaged]:
            moments = {
                moment: {name: 0.9 * tensor for name, tensor in tensors.items()}
                for moment, tensors in step.state.moments.items()
            }
            return replace(step, state=replace(step.state, moments=moments))

        return Finishing(FedAvg.fold(self, state, round), decayed)

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return full(state.structure) if round.index == 0 else super().part(state, client, round)


class Weighing(LocalWork[None]):
    def reply(self, run: Run[None]) -> tuple[Outcome, None]:
        return Outcome({UPDATE: {name: tensor.detach() for name, tensor in run.tensors.items()}}), None


@dataclass(frozen=True)
class Weighty(FedAvg):
    """Replies carry weights."""

    @property
    def local(self) -> LocalWork[Any]:
        return Weighing()


class Chattering(LocalWork[None]):
    def reply(self, run: Run[None]) -> tuple[Outcome, None]:
        return Outcome({"gossip": {"w": torch.zeros(3)}}), None


@dataclass(frozen=True)
class Chatty(FedAvg):
    """Replies carry tensors that nobody has been told of."""

    @property
    def local(self) -> LocalWork[Any]:
        return Chattering()


@dataclass(frozen=True)
class NotNeutral(FedAvg):
    weight: Any = "uniform"

    def neutral(self) -> Self:
        return self


@dataclass(frozen=True)
class Whimsical(FedAvg):
    """Assigns by a counter of its own: other parts each time, and other bits for other workers."""

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return suffixes(state.structure, 3)[next(COUNTER) % 3]


@dataclass(frozen=True)
class Busy(FedAvg):
    """The server spends more than it may."""

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Finishing(super().fold(state, round), lambda step: replace(step, server_operations=1e30))


@dataclass(frozen=True)
class Drifting(FedAvg):
    """What a round gives depends on how many rounds this process has seen."""

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Finishing(super().fold(state, round), lambda step: moved(step, 1e-4 * next(COUNTER)))


@dataclass(frozen=True)
class Idle(FedAvg):
    """The server learns nothing."""

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Gather(lambda replies, server: Step(state))

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        return replace(super().assign(state, client, round), steps=1)
