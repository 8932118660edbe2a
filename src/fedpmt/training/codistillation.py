"""A net of one's own, trained beside others by the answers that all give to public samples (COMET)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpmt.parts.part import GLOBAL
from fedpmt.parts.width import narrow_start
from fedpmt.training.distillation import answers
from fedpmt.training.local import LocalWork, Outcome, Rng, Run, Site
from fedpmt.types import MODEL, SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples, Tensors

CENTROIDS, ANSWERS = "centroids", "answers"
ASKED, TOLD, COUNT = "asked", "told", "count"
"""Scalars of a task: the seeds by which public samples are drawn, this round's and that of the centroids."""


@dataclass(frozen=True)
class Personal:
    """What a device keeps: its net. Empty before its first round."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def drawn(public: Examples, count: int, seed: int) -> Examples:
    """U_t: so many public samples, the same for all who know the seed; all of them, where there are no more."""
    if count >= len(public):
        return public
    return public.take(np.sort(np.random.default_rng(seed).permutation(len(public))[:count]))


def nearest(own: Tensor, centroids: Tensor) -> int:
    """c(k) = argmin_c ||f_k(U) - s_c||²."""
    return int((centroids - own).square().flatten(1).sum(dim=1).argmin())


@dataclass(frozen=True)
class PersonalWork(LocalWork[Personal]):
    """F_k(w) + λ mean_u ||f_k(u; w) - s_c(u)||² on soft predictions f, with c the centroid nearest to its own."""

    pull: float  # λ

    def first(self, device: int, rng: Rng) -> Personal:
        return Personal()

    def start(
        self, site: Site, task: Task, part: Part, own: Personal | None, data: Examples, rng: Rng
    ) -> Run:
        part, model = part.resident(), site.models[GLOBAL]
        tensors = (own or Personal()).tensors or narrow_start(model.structure, model.initial(), part)
        local = replace(task, tensors={**task.tensors, MODEL: tensors})
        run = super().start(site, local, part, own, data, rng)
        centroids = task.tensors.get(CENTROIDS, {}).get(CENTROIDS)
        if centroids is not None and self.pull:
            public = drawn(_public(site), int(task.scalars[COUNT]), int(task.scalars[TOLD]))
            # With the net as it is now, on the very samples that the centroids are of.
            mine = functional.softmax(answers(model, tensors, public), dim=1)
            run.memo["public"], run.memo["centroid"] = public, centroids[nearest(mine, centroids)]
            run.memo["order"] = rng("public").permutation(len(public))
            model.set_training([True] * len(model.structure.layers))
        return run

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        loss = run.site.objective.loss(run.forward(run.tensors, batch.inputs), batch.targets)
        if "centroid" not in run.memo:
            return loss
        order = run.memo["order"]
        size = min(run.site.settings.batch, len(order))
        # Round and round through U_t, a batch at every step.
        chosen = order[(run.steps * size + np.arange(size)) % len(order)]
        outputs = run.forward(run.tensors, run.memo["public"].take(chosen).inputs)
        apart: Tensor = functional.softmax(outputs, dim=1) - run.memo["centroid"][torch.from_numpy(chosen)]
        return loss + self.pull * apart.square().sum(dim=1).mean()

    def reply(self, run: Run, own: Personal | None, data: Examples) -> tuple[Outcome, Personal]:
        tensors = {name: tensor.detach() for name, tensor in run.tensors.items()}
        public = drawn(_public(run.site), int(run.task.scalars[COUNT]), int(run.task.scalars[ASKED]))
        said = functional.softmax(answers(run.site.models[GLOBAL], tensors, public), dim=1)
        return Outcome({MODEL: {}, ANSWERS: {ANSWERS: said}}), Personal(tensors)

    def evaluate(self, site: Site, shared: Tensors, own: Personal | None, data: Examples) -> Tensor:
        if own is None:
            raise ValueError("only a device that took part has a net")
        return site.objective.score(answers(site.models[GLOBAL], own.tensors, data), data.targets)


def _public(site: Site) -> Examples:
    if site.public is None:
        raise SettingError("public = 'none' is refused: devices learn from one another on public data")
    return site.public
