"""Both halves of group knowledge transfer (FedGKT): a device's edge net, and the server's net behind its features."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpmt.models.build import FlatLinear
from fedpmt.parts.part import GLOBAL
from fedpmt.training.adam import AdamWork, Moments, SteppedWork
from fedpmt.training.batches import chunks
from fedpmt.training.distillation import answers
from fedpmt.training.local import Outcome, Rng, Run, Site
from fedpmt.types import MODEL, Examples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.types import Arrays, Tensors

EDGE = "edge"
"""The name of the devices' net: the global net's first layer, then a linear head."""

HEAD = "head"
STEM = 1
"""Layers before the tap: what the edge net shares the shape of, and the server's net does not have."""

FEATURES, LOGITS, LABELS = "features", "logits", "labels"
TRANSFER, TEACHER = "transfer", "teacher"
FLOOR = 1e-7
"""Added to a teacher's probabilities."""


def knowledge(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KD = T² KL(softmax(z_t / T) + 1e-7 || softmax(z_s / T)), the mean over a batch."""
    target = functional.softmax(teacher.detach() / temperature, dim=-1) + FLOOR
    log_own = functional.log_softmax(student / temperature, dim=-1)
    return temperature**2 * functional.kl_div(log_own, target, reduction="batchmean")


@dataclass(frozen=True)
class Edge:
    """What a device keeps: its net, Adam's moments, and the samples that it told the server of, in that order."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # empty before its first round
    moments: Moments = field(default_factory=Moments)
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class EdgeWork(SteppedWork[Edge]):
    """CE(z_c, y) + α KD(z_c <- z_s), then features, logits and labels of all samples for the server."""

    alpha: float
    temperature: float  # T

    def first(self, device: int, rng: Rng) -> Edge:
        return Edge()

    def start(self, site: Site, task: Task, part: Part, own: Edge | None, data: Examples, rng: Rng) -> Run:
        own = own or Edge()
        tensors = own.tensors or site.models[part.model].initial()
        local = replace(task, tensors={MODEL: tensors})
        run = self.ready(super().start(site, local, part.resident(), own, data, rng), own.moments)
        if TEACHER in task.tensors and self.alpha:
            # By the sample's identity: batches come in another order every round.
            run.memo[TEACHER] = task.tensors[TEACHER][LOGITS]
            order = np.argsort(own.ids)
            run.memo["rows"] = lambda ids: order[np.searchsorted(own.ids, ids, sorter=order)]
        return run

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        outputs = run.forward(run.tensors, batch.inputs)
        loss = run.site.objective.loss(outputs, batch.targets)
        if TEACHER in run.memo:
            teacher = run.memo[TEACHER][torch.from_numpy(run.memo["rows"](batch.ids))]
            loss = loss + self.alpha * knowledge(outputs, teacher, self.temperature)
        return loss

    def reply(self, run: Run, own: Edge | None, data: Examples) -> tuple[Outcome, Edge]:
        tensors = {name: tensor.detach() for name, tensor in run.tensors.items()}
        model = run.site.models[run.part.model]
        features = features_of(model, tensors, data)
        told = Examples(features, data.targets, data.ids)
        tensors_up = {
            FEATURES: features.flatten(1),
            LOGITS: answers(model, tensors, told, STEM),
            LABELS: data.targets.to(torch.int32),
        }
        return Outcome({MODEL: {}, TRANSFER: tensors_up}), Edge(tensors, self.moments(run), data.ids)

    def evaluate(self, site: Site, shared: Tensors, own: Edge | None, data: Examples) -> Tensor:
        if own is None:
            raise ValueError("only a device that took part has a net")
        features = features_of(site.models[EDGE], own.tensors, data)
        outputs = answers(site.models[GLOBAL], shared, Examples(features, data.targets, data.ids), STEM)
        return site.objective.score(outputs, data.targets)


def features_of(model: LayeredModel, tensors: Tensors, data: Examples) -> Tensor:
    """What an edge net's stem makes of all samples, in evaluation mode."""
    model.set_training([False] * len(model.structure.layers))
    return torch.cat([model.prefix(STEM, tensors, data.take(span).inputs) for span in chunks(data)])


def behind_the_tap(edge: LayeredModel, features: Tensor) -> Tensor:
    """Features as the layer after the tap takes them; they travel flat."""
    head = edge.module.get_submodule(HEAD)
    assert isinstance(head, FlatLinear)
    return features.reshape(len(features), *head.shape)


@dataclass(frozen=True)
class ServerHalfWork(AdamWork):
    """KD(z_s <- z_c) + α CE(z_s, y) on features that devices sent; targets are their logits and labels."""

    alpha: float
    temperature: float  # T
    distil: bool

    def halves(
        self, site: Site, model: LayeredModel, part: Part, fixed: Tensors, data: Examples
    ) -> tuple[Examples, Callable[[Tensors, Arrays], Tensor]]:
        """Features enter behind the tap."""
        return data, site.forward(model, STEM)

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        outputs = run.forward(run.tensors, batch.inputs)
        loss = self.alpha * run.site.objective.loss(outputs, batch.targets[LABELS])
        if self.distil:
            loss = loss + knowledge(outputs, batch.targets[LOGITS], self.temperature)
        return loss
