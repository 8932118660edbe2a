"""Local work under a mask that also learns what the masked-out weights would be worth (PruneFL)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedpmt.parts.part import Mask, take, travelling_shapes
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.training.local import LocalWork, Outcome, Reach, Rng, Run, Site

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part, Shapes
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples

SQUARES = "squares"
"""What travels up beside the weights before the mask is changed: squared gradients."""

ACCURACY = "train_accuracy"
VERSION, EACH_STEP = "mask", "each step"
TOTALS, MASKS, RIGHT = "totals", "masks", "right"


@dataclass(frozen=True)
class Squares:
    """What a device keeps: squared gradients summed over its rounds under one mask. A tensor not in it is zero."""

    sums: Mapping[str, Tensor]
    version: int = -1  # of the mask


class MaskedWork(LocalWork[Squares]):
    """SGD that leaves masked-out weights at zero and sums up the gradients of all of them.

    The mask is applied to gradients, never inside the graph: a masked-out weight has a gradient too, without which
    it could not come back.
    """

    measures = (*LocalWork.measures, ACCURACY)

    def first(self, device: int, rng: Rng) -> Squares:
        return Squares({})

    def start(self, site: Site, task: Task, part: Part, own: Squares | None, data: Examples, rng: Rng) -> Run:
        run = super().start(site, task, part, own, data, rng)
        run.memo[TOTALS] = {name: torch.zeros_like(parameter) for name, parameter in run.params.items()}
        run.memo[MASKS] = {
            name: torch.from_numpy(selection.bits).to(run.params[name])
            for name, selection in part.trained.items()
            if isinstance(selection, Mask)
        }
        run.memo[RIGHT] = []
        return run

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        outputs, objective = run.forward(run.tensors, batch.inputs), run.site.objective
        run.memo[RIGHT].append(objective.score(outputs.detach(), batch.targets))
        return objective.loss(outputs, batch.targets)

    def correct(self, run: Run, gradients: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = run.memo[TOTALS]
        for name, gradient in gradients.items():
            if run.task.scalars[EACH_STEP]:
                totals[name].addcmul_(gradient, gradient)
            else:
                totals[name].add_(gradient)
        # In place, now that they are added up: each is a tensor of its own.
        for name, mask in run.memo[MASKS].items():
            gradients[name].mul_(mask)
        return gradients

    def reply(self, run: Run, own: Squares | None, data: Examples) -> tuple[Outcome, Squares]:
        outcome, _ = super().reply(run, own, data)
        scores, version = torch.cat([torch.zeros(0), *run.memo[RIGHT]]), int(run.task.scalars[VERSION])
        outcome = replace(outcome, metrics={ACCURACY: float(scores.mean()) if len(scores) else 0.0})
        sums = self.gained(run, len(data))
        if own is not None and own.version == version:
            sums = {
                name: total + own.sums[name] if name in own.sums else total for name, total in sums.items()
            }
        if not run.part.reported:
            return outcome, Squares(sums, version)
        squares = {name: take(sums[name], selection) for name, selection in run.part.reported.items()}
        return replace(outcome, tensors={**outcome.tensors, SQUARES: squares}), Squares({}, version)

    def upload(self, part: Part, structure: Structure) -> dict[str, Shapes]:
        squares = {SQUARES: travelling_shapes(part.reported, structure.shapes)} if part.reported else {}
        return {**super().upload(part, structure), **squares}

    def bounds(self, task: Task, reach: Reach) -> Mapping[str, float]:
        """Of n (Σ g)², as many times as there were rounds; Σ g² over single steps is no more."""
        summed = reach.steps * reach.gradient
        return {SQUARES: reach.rounds * reach.samples * summed * summed}

    def gained(self, run: Run, samples: int) -> dict[str, Tensor]:
        """This round's share: n (Σ g)² over the local steps, or Σ g² where each step is to count by itself."""
        totals: dict[str, Tensor] = run.memo[TOTALS]
        if run.task.scalars[EACH_STEP]:
            return totals
        return {name: total.square().mul_(samples) for name, total in totals.items()}

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        """Products are dense: a mask saves updates. One more operation for each gradient, and two sums of them held."""
        cost = price(part)
        gradients = cost.memory.gradients
        return cost.plus(step=gradients / FLOAT_BYTES, memory_bytes=2 * gradients)
