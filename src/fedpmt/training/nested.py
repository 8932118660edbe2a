"""Local work on nested widths: each batch trains one of the parts inside the part (ordered dropout)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.nn import functional

from fedpmt.complexity.cost import FLOAT_BYTES
from fedpmt.submodel.part import size, travelling_shapes
from fedpmt.submodel.width import corners
from fedpmt.training.local import LocalWork, Outcome, Rng, Run, Site
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedpmt.complexity.cost import Cost
    from fedpmt.models.structure import Structure
    from fedpmt.submodel.part import Part, Shapes
    from fedpmt.training.messages import Task
    from fedpmt.types import Arrays, Examples

WIDTHS, CORNERS, STATISTICS = "width", "corners", "statistics"


def statistics_of(level: int) -> str:
    """The name of the group in which BatchNorm statistics of a width travel; 1 is the narrowest."""
    return f"statistics {level}"


def buffers_of(structure: Structure) -> list[str]:
    """All BatchNorm statistics of a model."""
    return [name for layer in structure.layers for name in layer.buffers]


@dataclass(frozen=True)
class NestedWork(LocalWork[None]):
    """Draws a width p for each batch, of those inside the part and its own, and trains that corner of the tensors.

    Nothing outside the corner moves in that step, by decay or momentum either. With `distil` the part's own width is
    trained in every step and teaches the narrower one (self-distillation), both in one step on the sum:

        ℓ = CE(f_{p_max}(x), y) + CE(f_p(x), softmax f_{p_max}(x)), the second without a gradient into its target

    Each width has BatchNorm statistics of its own.
    """

    distil: bool = False

    @property
    def fast(self) -> bool:
        return not self.distil

    def start(self, site: Site, task: Task, part: Part, own: None, data: Examples, rng: Rng) -> Run:
        if self.distil and site.objective.loss is not functional.cross_entropy:
            raise SettingError("fjord.distil = 'true' is refused: it needs cross-entropy as the loss")
        run = super().start(site, task, part, own, data, rng)
        structure = site.models[part.model].structure
        run.memo[WIDTHS] = rng("width")
        run.memo[CORNERS] = [corners(structure, inner) for inner in part.inner]
        run.memo[STATISTICS] = [
            {name: tensor.clone() for name, tensor in task.tensors.get(statistics_of(level), {}).items()}
            for level in range(1, len(part.inner) + 2)
        ]
        return run

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        inner = len(run.part.inner)
        drawn = int(run.memo[WIDTHS].integers(inner + 1)) if inner else 0
        objective = run.site.objective.loss
        if not self.distil:
            run.corner = run.memo[CORNERS][drawn] if drawn < inner else {}
            return objective(outputs_at(run, drawn, batch.inputs), batch.targets)
        teacher = outputs_at(run, inner, batch.inputs)
        loss = objective(teacher, batch.targets)
        if drawn == inner:
            return loss  # it would teach itself what it knows: that gradient is zero
        pupil = outputs_at(run, drawn, batch.inputs)
        return loss + functional.cross_entropy(pupil, teacher.detach().softmax(dim=-1))

    def reply(self, run: Run, own: None, data: Examples) -> tuple[Outcome, None]:
        outcome, _ = super().reply(run, own, data)
        groups = {
            statistics_of(level): statistics
            for level, statistics in enumerate(run.memo[STATISTICS], start=1)
            if statistics
        }
        return replace(outcome, tensors={**outcome.tensors, **groups}), None

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        """The mean over the widths; with distillation the widest in every step, and a narrower one beside it."""
        widest, count = price(part), len(part.inner) + 1
        if not part.inner:
            return widest
        inner = [price(one) for one in part.inner]
        if self.distil:
            beside = [one.operations - one.update for one in inner]
            held = max(one.memory.activations for one in inner)
            return widest.plus(step=sum(beside) / count, memory_bytes=held)

        def mean(of: Callable[[Cost], float]) -> float:
            return sum(of(one) for one in (*inner, widest)) / count

        return replace(
            widest,
            prefix=mean(lambda one: one.prefix),
            forward=mean(lambda one: one.forward),
            error=mean(lambda one: one.error),
            gradient=mean(lambda one: one.gradient),
            update=mean(lambda one: one.update),
            share=mean(lambda one: one.share),
            sustained=mean(lambda one: one.sustained),
        )

    def download_bytes(self, part: Part, structure: Structure) -> int:
        return super().download_bytes(part, structure) + statistics_bytes(part, structure)

    def upload(self, part: Part, structure: Structure) -> dict[str, Shapes]:
        buffers = buffers_of(structure)
        statistics = {
            statistics_of(level): travelling_shapes(
                {name: one.sent[name] for name in buffers}, structure.shapes
            )
            for level, one in enumerate((*part.inner, part), start=1)
            if buffers
        }
        return {**super().upload(part, structure), **statistics}


def statistics_bytes(part: Part, structure: Structure) -> int:
    """The BatchNorm statistics of all widths of a part."""
    return FLOAT_BYTES * sum(
        size(one.sent[name], structure.shapes[name])
        for one in (*part.inner, part)
        for name in buffers_of(structure)
    )


def outputs_at(run: Run, level: int, inputs: Arrays) -> Tensor:
    """What the net of one of the widths gives; the last is the part's own."""
    tensors = run.tensors
    if level < len(run.part.inner):
        tensors = {name: tensors[name][corner] for name, corner in run.memo[CORNERS][level].items()}
    return run.forward({**tensors, **run.memo[STATISTICS][level]}, inputs)
