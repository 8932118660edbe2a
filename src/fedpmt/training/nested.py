"""Local work on nested widths: each batch trains one of the parts inside the part (ordered dropout)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.nn import functional

from fedpmt.training.widths import CORNERS, WidthsWork, outputs_at
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedpmt.parts.part import Part
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.local import Rng, Run, Site
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples

WIDTHS = "width"


@dataclass(frozen=True)
class NestedWork(WidthsWork):
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
        run.memo[WIDTHS] = rng("width")
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
