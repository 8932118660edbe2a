"""Local work that is held back to the received model (FedProx)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.training.local import LocalWork, Pull, Site, local_tensors
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.parts.part import Part
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.messages import Task


@dataclass(frozen=True)
class ProximalWork(LocalWork[None]):
    """Minimises F_k(y) + μ/2 ||y - w||² by SGD: y <- y - η (g(y) + μ (y - w)), with w as received this round."""

    mu: float  # μ

    @property
    def fast(self) -> bool:
        return True

    def pulled(self, site: Site, task: Task, part: Part, own: None) -> Pull:
        """μ (y - w) itself: it is exactly zero at y = w, where the gradient of a norm is not defined."""
        rate = site.settings.learning_rate
        if rate * self.mu >= 2:
            raise SettingError(
                f"fedprox.mu = '{self.mu:g}' is refused: with a learning rate of {rate:g} steps would overshoot; "
                f"it must be below {2 / rate:g}"
            )
        return Pull(strength=self.mu, received=local_tensors(task, part, site.models[part.model].structure))

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        """Two more operations per trained parameter and step, a difference and a multiply-add; w is there anyway."""
        cost = price(part)
        return cost.plus(step=2 * cost.update)
