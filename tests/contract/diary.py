"""A method for tests only: it uses every part of the interface that the first three methods leave alone.

Devices keep a diary (their own bias vector and how often they took part), a drift tensor travels both ways
beside the weights, the device chooses its depth, and what is evaluated is personal: the shared model with
the device's own bias on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedpmt import api
from fedpmt.methods.averaging import Averaged
from fedpmt.methods.base import Method, Predictor, Round, Setup, Step
from fedpmt.parts.depth import suffixes
from fedpmt.parts.part import GLOBAL, Part, Shapes
from fedpmt.training.local import LocalWork, Outcome, Rng, Run, Site
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL, Examples, Tensors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fedpmt.models.structure import Structure

DRIFT = "drift"
CLASSES = 10


@dataclass(frozen=True)
class Diary:
    """What a device keeps."""

    bias: Tensor
    rounds: int


@dataclass(frozen=True)
class Server:
    """The global model and the mean drift of the last round."""

    model: Averaged
    drift: Tensor
    heard: dict[int, int]  # how many rounds each device says it has been in


class DiaryWork(LocalWork[Diary]):
    def first(self, device: int, rng: Rng) -> Diary:
        return Diary(torch.from_numpy(rng("diary").normal(size=CLASSES).astype("float32")) * 0.01, 0)

    def start(self, site: Site, task: Task, part: Part, own: Diary | None, data: Examples, rng: Rng) -> Run:
        run = super().start(site, task, part, own, data, rng)
        assert own is not None
        run.memo["diary"] = own
        return run

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        outputs = run.forward(run.tensors, batch.inputs) + run.memo["diary"].bias
        return run.site.objective.loss(outputs, batch.targets)

    def correct(self, run: Run, gradients: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        pull = run.task.tensors[DRIFT][DRIFT]
        return {**gradients, "out.bias": gradients["out.bias"] + 0.1 * pull}

    def reply(self, run: Run, own: Diary | None, data: Examples) -> tuple[Outcome, Diary | None]:
        outcome, own = super().reply(run, own, data)
        assert own is not None
        drift = outcome.tensors[MODEL]["out.bias"] - run.task.tensors[MODEL]["out.bias"]
        kept = Diary(own.bias - 0.5 * drift, own.rounds + 1)
        tensors = {**outcome.tensors, DRIFT: {DRIFT: drift}}
        return replace(outcome, tensors=tensors, scalars={"rounds": kept.rounds}), kept

    def upload(self, part: Part, structure: Structure) -> dict[str, Shapes]:
        return {**super().upload(part, structure), DRIFT: {DRIFT: (CLASSES,)}}

    def evaluate(self, site: Site, shared: Tensors, own: Diary | None, data: Examples) -> Tensor:
        assert own is not None
        model = site.models[GLOBAL]
        model.set_training([False] * len(model.structure.layers))
        return site.objective.score(model.forward(shared, data.inputs) + own.bias, data.targets)


@dataclass(frozen=True)
class DiaryMethod(Method[Server, Diary]):
    depths: int = 3

    def init(self, setup: Setup) -> Server:
        prototype = setup.prototypes[GLOBAL]
        return Server(Averaged(prototype.structure, prototype.tensors), torch.zeros(CLASSES), {})

    def assign(self, state: Server, client: Client, round: Round) -> Task:
        assert client.speed is None  # the server knows no speeds
        offer = suffixes(state.model.structure, self.depths)
        return Task(offer, {MODEL: dict(state.model.tensors), DRIFT: {DRIFT: state.drift}})

    def local(self) -> LocalWork[Diary]:
        return DiaryWork()

    def aggregate(self, state: Server, replies: Iterable[Reply], round: Round) -> Step[Server]:
        from fedpmt.aggregation import CoverageMean

        mean, drift, heard, count = (
            CoverageMean(state.model.tensors),
            torch.zeros(CLASSES),
            dict(state.heard),
            0,
        )
        for reply in replies:
            mean.add(reply.part, reply.tensors[MODEL], reply.samples)
            drift = drift + reply.tensors[DRIFT][DRIFT]
            # Server and device can never disagree about what was accepted.
            heard[reply.device] = heard.get(reply.device, 0) + 1
            assert heard[reply.device] == reply.scalars["rounds"]
            count += 1
        model = Averaged(state.model.structure, mean.result())
        return Step(Server(model, drift / max(1, count), heard), {"members": float(len(heard))})

    def predictor(self, state: Server) -> Predictor:
        return Predictor("personal", GLOBAL, state.model.tensors)


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
    return api.run(DiaryMethod(), out=folder, resume=True, **{**SETTINGS, "checkpoint_seconds": 0, **changes})
