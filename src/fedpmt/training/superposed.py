"""Local work on a slimmable net: a net and the narrower ones inside it take one step together (SlimFL)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

from fedpmt.training.widths import WidthsWork, outputs_at
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedpmt.parts.part import Part
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.local import Rng, Run, Site
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples


@dataclass(frozen=True)
class SlimWork(WidthsWork):
    """Superposition training: one step along g = w_1 Σ g_narrow + w_2 g_full.

    A narrow net is the leading corner of the part's own tensors, so all gradients fall into one place. It learns
    from what the full net says (in-place distillation), and that one from the labels.
    """

    narrow_weight: float  # w_1
    full_weight: float  # w_2
    distill: bool

    def start(self, site: Site, task: Task, part: Part, own: None, data: Examples, rng: Rng) -> Run:
        if self.narrower(part) and self.distill and site.objective.loss is not functional.cross_entropy:
            raise SettingError("slimfl.distill = 'true' is refused: it needs classes under cross-entropy")
        return super().start(site, task, part, own, data, rng)

    def narrower(self, part: Part) -> tuple[Part, ...]:
        """The nets inside the part that are trained with it."""
        return part.inner if self.narrow_weight else ()

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        objective = run.site.objective
        outputs = outputs_at(run, len(run.part.inner), batch.inputs)
        loss = self.full_weight * objective.loss(outputs, batch.targets)
        # Without `detach` the full net would learn to please the narrow ones.
        targets = outputs.detach().softmax(dim=-1) if self.distill else batch.targets
        for level in range(len(self.narrower(run.part))):
            narrow = outputs_at(run, level, batch.inputs)
            loss = loss + self.narrow_weight * objective.loss(narrow, targets)
        return loss

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        """Every net runs forward and backward, its activations held until the one update."""
        cost = price(part)
        for other in map(price, self.narrower(part)):
            cost = cost.plus(step=other.operations - other.update, memory_bytes=other.memory.activations)
        return cost
