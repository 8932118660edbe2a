"""Learning from another net's answers: the losses, and a student's work on the server."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from fedpmt.training.adam import AdamWork, Moments
from fedpmt.training.batches import chunks
from fedpmt.training.evaluated import evaluated
from fedpmt.training.local import LocalSettings, LocalWork, Rng, Run, Site, clipped, train

if TYPE_CHECKING:
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples, Tensors

SERVER = -1
"""Stands for a device's id where the server trains."""


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(z_t / T) || softmax(z_s / T)), the mean over a batch; no T² and no gradient to the teacher."""
    target = functional.softmax(teacher.detach() / temperature, dim=-1)
    return functional.kl_div(
        functional.log_softmax(student / temperature, dim=-1), target, reduction="batchmean"
    )


@dataclass(frozen=True)
class StudentWork(AdamWork):
    """Steps towards the logits that stand in the place of targets."""

    temperature: float = 1.0  # T
    clip: float | None = None  # the largest norm of a step's gradient
    begun: int = 0  # steps taken before these
    total: int = 1  # steps over which the rate falls to zero

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        return divergence(run.forward(run.tensors, batch.inputs), batch.targets, self.temperature)

    def correct(self, run: Run, gradients: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        return clipped(gradients, self.clip)

    def scale(self, run: Run) -> float:
        """Half a cosine."""
        return (1 + math.cos(math.pi * min(1.0, (self.begun + run.steps) / self.total))) / 2


def on_server(
    work: LocalWork[Any],
    site: Site,
    task: Task,
    part: Part,
    moments: Moments | None,
    data: Examples,
    rng: Rng,
    *,
    steps: int,
    rate: float,
    round_index: int,
    batch: int | None = None,
) -> tuple[Tensors, Moments, float]:
    """So many steps by the one local loop, over the data as often as it takes: tensors, moments, mean loss."""
    batch = batch or site.settings.batch
    epochs = -(-steps // -(-len(data) // batch))
    settings = LocalSettings(epochs, batch, rate, prefix="recompute")
    reply, kept = train(
        work,
        replace(site, settings=settings),
        replace(task, steps=steps),
        part,
        moments,
        data,
        rng,
        device=SERVER,
        round_index=round_index,
    )
    tensors = next(iter(reply.tensors.values()))
    return tensors, kept or Moments(), reply.metrics["train_loss"]


@torch.no_grad()
def answers(model: LayeredModel, tensors: Tensors, examples: Examples, cut: int = 0) -> Tensor:
    """What a net says to all inputs, in evaluation mode; from layer `cut` on, where inputs are what comes before it."""
    batches = (examples.take(span).inputs for span in chunks(examples))
    if cut:
        model.set_training([False] * len(model.structure.layers))
        return torch.cat([model.suffix(cut, tensors, inputs) for inputs in batches])
    return torch.cat([evaluated(model, tensors, inputs) for inputs in batches])
