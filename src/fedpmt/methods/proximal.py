"""The proximal term, which keeps a device near the model that it received: of FedProx, and an option of FedAsync."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedpmt.training.local import LocalWork
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.training.local import Job, PriceOf, Run


@dataclass(frozen=True)
class Proximal(LocalWork[None]):
    """Minimises F_k(y) + μ/2 ||y - w||²: the gradient is g(y) + μ (y - w), with w as received this round."""

    mu: float  # μ
    setting: str = "fedprox.mu"  # what a user calls it, in errors

    def start(self, job: Job[None]) -> Run[None]:
        self._check(job)
        from fedpmt.training.loop import local_tensors

        run = super().start(job)
        run.memo["received"] = local_tensors(
            job.task, job.part, job.model.structure
        )  # no copy: w is held anyway
        return run

    def correct(self, run: Run[None], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        received = run.memo["received"]
        # μ (y - w) itself: it is exactly zero at y = w, where the gradient of a norm is not defined.
        return {
            name: gradient.add(run.params[name].detach() - received[name], alpha=self.mu)
            for name, gradient in gradients.items()
        }

    def compiled(self, job: Job[None]) -> StepRule | None:
        self._check(job)
        return job.rule(strength=self.mu)

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """Two more operations per trained parameter and step, a difference and a multiply-add."""
        return replace(part.extra, step=part.extra.step + 2 * price(part).update)

    def _check(self, job: Job[None]) -> None:
        """Refuse a pull that would overshoot."""
        rate = job.site.settings.learning_rate
        if rate * self.mu >= 2:
            raise SettingError(
                f"{self.setting} must be < {2 / rate:g} at a learning rate of {rate:g}, where steps overshoot "
                f"(got {self.mu:g})"
            )
