"""Local work that is held back to the received model (FedProx)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.training.local import LocalWork, Rng, Run, Site, local_tensors
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedpmt.complexity.cost import Cost
    from fedpmt.submodel.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples

ANCHOR = "anchor"


@dataclass(frozen=True)
class ProximalWork(LocalWork[None]):
    """Minimises F_k(y) + μ/2 ||y - w||² by SGD: y <- y - η (g(y) + μ (y - w)), with w as received this round."""

    mu: float  # μ

    def start(self, site: Site, task: Task, part: Part, own: None, data: Examples, rng: Rng) -> Run:
        rate = site.settings.learning_rate
        if rate * self.mu >= 2:
            raise SettingError(
                f"fedprox.mu = '{self.mu:g}' is refused: with a learning rate of {rate:g} steps would overshoot; "
                f"it must be below {2 / rate:g}"
            )
        run = super().start(site, task, part, own, data, rng)
        run.memo[ANCHOR] = local_tensors(task, part, site.models[part.model].structure)
        return run

    def correct(self, run: Run, gradients: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Add the term's gradient itself: it is exactly zero at y = w, where that of a norm is not defined."""
        anchor: dict[str, Tensor] = run.memo[ANCHOR]
        return {
            # g(y) + μ (y - w)
            name: gradient.add(run.params[name].detach() - anchor[name], alpha=self.mu)
            for name, gradient in gradients.items()
        }

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        """Two more operations per trained parameter and step, a difference and a multiply-add; w is there anyway."""
        cost = price(part)
        return cost.plus(step=2 * cost.update)
