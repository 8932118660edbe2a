"""Everything that "send a part, average it back" methods share. Loads no torch until it computes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedpmt.methods.base import Method, Predictor, Round, Setup, Step, Sums
from fedpmt.parts.part import GLOBAL, Part, take
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from fedpmt.aggregation import Rule
    from fedpmt.models.structure import Structure
    from fedpmt.training.local import LocalWork


@dataclass(frozen=True)
class Averaged:
    """The server's state: the global model w^t."""

    structure: Structure
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class PartAveraging(Method[Averaged, None]):
    """Sends each device a part of the global model and averages every entry over those that trained it."""

    sums: ClassVar[Sums] = "entries"

    weight: Literal["samples", "uniform"] = (
        "samples"  # a_k = |D_k|, or 1; the paper's devices hold equal counts
    )

    @abstractmethod
    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        """Which part this device gets: all that tells these methods apart."""

    def offer(self, state: Averaged, client: Client, round: Round) -> tuple[Part, ...]:
        """The parts a device may choose from: the one the server decided on."""
        return (self.part(state, client, round),)

    def rule(self) -> Rule:
        """How entries that only some devices trained are averaged."""
        return "overlap"

    @property
    def combines(self) -> str:
        return f"{self.rule()} mean"

    def weight_of(self, samples: int) -> int:
        """a_k of a device with so many samples."""
        return samples if self.weight == "samples" else 1

    def init(self, setup: Setup) -> Averaged:
        prototype = setup.prototypes[GLOBAL]
        return Averaged(prototype.structure, prototype.tensors)

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        return self.task(state, self.offer(state, client, round))

    def task(self, state: Averaged, offer: tuple[Part, ...]) -> Task:
        """These parts on offer, with the tensors that they are made of."""
        sent = {name: take(state.tensors[name], selection) for name, selection in offer[0].sent.items()}
        return Task(offer, {MODEL: sent})

    def local(self) -> LocalWork[None]:
        from fedpmt.training.local import LocalWork

        return LocalWork()

    def aggregate(self, state: Averaged, replies: Iterable[Reply], round: Round) -> Step[Averaged]:
        from fedpmt.aggregation import CoverageMean

        mean = CoverageMean(state.tensors, self.rule())
        for reply in replies:
            mean.add(reply.part, reply.tensors[MODEL], self.weight_of(reply.samples))
        return Step(Averaged(state.structure, mean.result()))

    def predictor(self, state: Averaged) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)
