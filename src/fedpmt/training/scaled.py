"""Local work on a thinned net: kept activations stand in for dropped ones, absent classes are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedpmt.parts.part import Indices, local_shape
from fedpmt.training.local import LocalWork
from fedpmt.training.optimizers import clip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.training.local import Job, Run
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples

RATE = "rate"
ABSENT = "absent"


@dataclass(frozen=True)
class ScaledWork(LocalWork[None]):
    """Scales hidden layers in training only, by a factor that makes up for dropped channels.

    inputs    what enters a layer times n / m (m kept of n): inverted dropout with exact counts, where n / m and not
              1 / keep is what makes the expected input of the next layer the full one
    outputs   what a hidden layer gives, before its activation, times n / m; the same wherever that is a ReLU
    rate      the same times 1 / r, with the rate r that the task names (HeteroFL's Scaler)

    A layer's output is scaled through its weights, s (W x + b) = (s W) x + s b, so any net can be scaled whose axes
    are known, and the fast path can do it too. Frozen BatchNorm has statistics of outputs that were not scaled, so
    layers before one are left as they are; a batch's own would have cancelled the factor. With `masked`, classes whose
    rows are not trained have logits 0.
    """

    scale: Literal["inputs", "outputs", "rate"] | None = "inputs"
    masked: bool = False
    clip: float | None = None  # the largest norm of a step's gradient
    frozen_norms: bool = False  # BatchNorm in evaluation mode

    def factors(self, task: Task, part: Part, structure: Structure) -> Mapping[str, float]:
        if self.scale is None:
            return {}
        axes = structure.require_axes("scaling")
        normed = self._normed(structure) if self.frozen_norms else ()
        found: dict[str, float] = {}
        for weight in structure.parameters:
            if len(axes.tensors[weight]) < 2:
                continue  # a bias, which goes with its weight, or a norm, which is not scaled
            leaving = axes.leaving(weight)
            for place in (leaving, 1 - leaving):
                group = axes.tensors[weight][place].group
                if group is None or not axes.groups[group].hidden or group in normed:
                    continue
                # What heads see is not scaled, or their attention would be another: what comes of them is.
                at_entry = self.scale == "inputs" or axes.groups[group].kind == "heads"
                if at_entry == (place == leaving):
                    continue
                full = structure.shapes[weight]
                kept = local_shape(part.sent[weight], full)
                factor = 1 / float(task.scalars[RATE]) if self.scale == "rate" else full[place] / kept[place]
                bias = f"{weight.removesuffix('weight')}bias"
                names = [weight, bias] if place == leaving and bias in axes.tensors else [weight]
                found |= {name: found.get(name, 1.0) * factor for name in names}
        return {name: factor for name, factor in found.items() if factor != 1}

    def _normed(self, structure: Structure) -> set[str | None]:
        """The channels of which running statistics are kept."""
        axes = structure.require_axes("scaling")
        return {axis.group for name in structure.buffers for axis in axes.tensors.get(name, ())}

    def absent(self, part: Part, structure: Structure) -> np.ndarray | None:
        """The classes whose rows of the classifier the part does not train."""
        if not self.masked:
            return None
        axes = structure.require_axes("leaving classes out")
        for name, selection in part.trained.items():
            for place, axis in enumerate(axes.tensors[name]):
                group = axes.groups[axis.group] if axis.group is not None else None
                if group is None or group.kind != "output" or not isinstance(selection, Indices):
                    continue
                rows = selection.axes[place]
                return None if rows is None else np.isin(np.arange(group.size), rows, invert=True)
        return None

    def start(self, job: Job[None]) -> Run[None]:
        import torch

        run = super().start(job)
        structure = job.model.structure
        factors, forward = self.factors(job.task, job.part, structure), run.forward
        absent = self.absent(job.part, structure)
        if absent is not None:
            device = next(iter(run.tensors.values())).device
            run.memo[ABSENT] = torch.from_numpy(absent).to(device)
        if factors:
            run.forward = lambda tensors, inputs: forward(
                {name: one * factors[name] if name in factors else one for name, one in tensors.items()},
                inputs,
            )
        return run

    def loss(self, run: Run[None], batch: Examples) -> Tensor:
        from fedpmt.training.objective import logits_of, with_logits

        outputs = run.forward(run.tensors, batch.inputs)
        if ABSENT in run.memo:
            # Zero, not minus infinity: an absent class keeps a share of the softmax, but gets no gradient.
            outputs = with_logits(outputs, logits_of(outputs).masked_fill(run.memo[ABSENT], 0))
        return run.site.objective.loss(outputs, batch.targets)

    def correct(self, run: Run[None], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return clip(gradients, self.clip)

    def compiled(self, job: Job[None]) -> StepRule | None:
        structure = job.model.structure
        if self.clip is not None or (self.frozen_norms and structure.buffers):
            return None
        factors = self.factors(job.task, job.part, structure)
        return job.rule(factors=factors, absent=self.absent(job.part, structure))
