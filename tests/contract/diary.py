"""A method for tests only: it uses every part of the interface that the first three methods leave alone.

Devices keep a diary (their own bias vector and how often they took part), a drift tensor travels both ways
with the weights, the device chooses its depth, and what is evaluated is personal: the shared model with
the device's own bias on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedpmt import api
from fedpmt.methods.averaging import Averaged, MeanFold
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits
from fedpmt.parts.depth import suffixes
from fedpmt.parts.part import GLOBAL
from fedpmt.training.local import LocalWork, Outcome, Rng, Run, Site
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.server import REPLACE
from fedpmt.types import MODEL, Arrays, Examples, Tensors

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.training.local import Job, PriceOf

DRIFT = "drift"
CLASSES = 10


@dataclass(frozen=True)
class Diary:
    """What a device keeps."""

    bias: Tensor
    rounds: int


@dataclass(frozen=True)
class Shared:
    """The server's state: the global model and the mean drift of the last round."""

    model: Averaged
    drift: Tensor
    heard: dict[int, int]  # how many rounds each device says it has been in

    @property
    def tensors(self) -> Tensors:
        return self.model.tensors


class DiaryWork(LocalWork[Diary]):
    def first(self, device: int, rng: Rng) -> Diary:
        return Diary(torch.from_numpy(rng("diary").normal(size=self.classes).astype("float32")) * 0.01, 0)

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def start(self, job: Job[Diary]) -> Run[Diary]:
        run = super().start(job)
        assert job.own is not None
        run.memo["bias"] = job.own.bias
        return run

    def loss(self, run: Run[Diary], batch: Examples) -> Tensor:
        outputs = run.forward(run.tensors, batch.inputs) + run.memo["bias"]
        return run.site.objective.loss(outputs, batch.targets)

    def correct(self, run: Run[Diary], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        name = list(gradients)[-1]  # the classifier's bias
        return {**gradients, name: gradients[name] + 0.1 * run.task.tensors[DRIFT][DRIFT]}

    def reply(self, run: Run[Diary]) -> tuple[Outcome, Diary | None]:
        own, name = run.job.own, list(run.params)[-1]
        assert own is not None
        drift = run.params[name].detach() - run.task.tensors[MODEL][name]
        kept = Diary(own.bias - 0.5 * drift, own.rounds + 1)
        return Outcome({DRIFT: {DRIFT: drift}}, {"rounds": kept.rounds}), kept

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        size = 4 * self.classes
        answers = {DRIFT: {DRIFT: (self.classes,)}}
        return replace(part.extra, task_bytes=size, answers=answers, kept_bytes=size)

    def predict(self, site: Site, shared: Tensors, own: Diary | None, inputs: Arrays) -> Any:
        assert own is not None
        model = site.models[GLOBAL]
        model.set_training([False] * len(model.structure.layers))
        return model.forward(shared, inputs) + own.bias


class DiaryFold(Fold[Shared]):
    def __init__(self, state: Shared) -> None:
        self._state, self._mean = state, MeanFold(state.model, "overlap", "samples", REPLACE)
        self._drift, self._heard, self._count = torch.zeros_like(state.drift), dict(state.heard), 0

    def add(self, reply: Reply) -> None:
        self._mean.add(reply)
        self._drift += reply.tensors[DRIFT][DRIFT]
        # Server and device can never disagree about what was accepted.
        self._heard[reply.device] = self._heard.get(reply.device, 0) + 1
        assert self._heard[reply.device] == reply.scalars["rounds"]
        self._count += 1

    def finish(self, server: Server) -> Step[Shared]:
        model, heard = self._mean.finish(server).state, dict(sorted(self._heard.items()))
        drift = self._drift / max(1, self._count)
        return Step(Shared(model, drift, heard), {"members": float(len(heard))})


@dataclass(frozen=True)
class DiaryMethod(Method[Shared, Diary]):
    """A method with device state, extra tensors, device choice and personal models."""

    depths: int = 3
    classes: int = CLASSES

    @property
    def traits(self) -> Traits:
        return Traits(sends_more=True, keeps="a diary")

    @property
    def local(self) -> LocalWork[Diary]:
        return DiaryWork(self.classes)

    def init(self, setup: Setup) -> Shared:
        prototype = setup.prototypes[GLOBAL]
        return Shared(Averaged(prototype.structure, prototype.tensors), torch.zeros(self.classes), {})

    def assign(self, state: Shared, client: Client, round: Round) -> Task:
        offer = suffixes(state.model.structure, self.depths)
        return Task(offer, {MODEL: dict(state.model.tensors), DRIFT: {DRIFT: state.drift}})

    def fold(self, state: Shared, round: Round) -> Fold[Shared]:
        return DiaryFold(state)

    def predictor(self, state: Shared) -> Predictor:
        return Predictor("personal", GLOBAL, state.tensors)


class Blindfolded(DiaryMethod):
    """The same where the server may know no speeds."""

    def assign(self, state: Shared, client: Client, round: Round) -> Task:
        assert client.speed is None
        assert client.plan is None
        return super().assign(state, client, round)


SETTINGS: dict[str, Any] = {
    "task": "cnn-mnist",
    "splitting": "device",
    "devices": 12,
    "samples": 20,
    "cohort": 4,
    "rounds": 12,
    "lr": 0.1,
    "partition": "classes:2",
    "failure": 0.2,
    "deadline": 18.0,
    "eval_every": 3,
}


def play(folder: Path, **changes: Any) -> Any:
    return api.run(Blindfolded(), out=folder, resume=True, **{**SETTINGS, "checkpoint_seconds": 0, **changes})
