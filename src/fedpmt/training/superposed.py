"""Local work on a slimmable net: a net and the narrower ones inside it take one step together (SlimFL)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

from fedpmt.submodel.width import corners
from fedpmt.training.local import LocalWork, Rng, Run, Site
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedpmt.complexity.cost import Cost
    from fedpmt.submodel.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples

CORNERS = "corners"


@dataclass(frozen=True)
class SlimWork(LocalWork[None]):
    """Superposition training: one step along g = w_1 Σ g_narrow + w_2 g_full.

    A narrow net is the leading corner of the part's own tensors, so all gradients fall into one place. It learns
    from what the full net says (in-place distillation), and that one from the labels.
    """

    narrow_weight: float  # w_1
    full_weight: float  # w_2
    distill: bool

    def start(self, site: Site, task: Task, part: Part, own: None, data: Examples, rng: Rng) -> Run:
        run = super().start(site, task, part, own, data, rng)
        structure = site.models[part.model].structure
        run.memo[CORNERS] = [corners(structure, inner) for inner in self.narrower(part)]
        if run.memo[CORNERS] and self.distill and site.objective.loss is not functional.cross_entropy:
            raise SettingError("slimfl.distill = 'true' is refused: it needs classes under cross-entropy")
        return run

    def narrower(self, part: Part) -> tuple[Part, ...]:
        """The nets inside the part that are trained with it."""
        return part.inner if self.narrow_weight else ()

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        objective = run.site.objective
        outputs = run.forward(run.tensors, batch.inputs)
        loss = self.full_weight * objective.loss(outputs, batch.targets)
        # Without `detach` the full net would learn to please the narrow ones.
        targets = outputs.detach().softmax(dim=-1) if self.distill else batch.targets
        for corner in run.memo[CORNERS]:
            narrow = {name: tensor[corner[name]] for name, tensor in run.params.items()}
            # Copies: a narrow pass must not write its statistics over those of the full net.
            statistics = {name: tensor[corner[name]].clone() for name, tensor in run.fixed.items()}
            outputs = run.forward({**statistics, **narrow}, batch.inputs)
            loss = loss + self.narrow_weight * objective.loss(outputs, targets)
        return loss

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        """Every net runs forward and backward, its activations held until the one update."""
        cost = price(part)
        for other in map(price, self.narrower(part)):
            cost = cost.plus(step=other.operations - other.update, memory_bytes=other.memory.activations)
        return cost
