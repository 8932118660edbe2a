"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

A device stays near the model it received, and a weak one does part of the work instead of being dropped:

    y <- y - η (g(y) + μ (y - w^t)),   τ_k steps;   w^{t+1} = Σ_{k in S} |D_k| y_k / Σ_{k in S} |D_k|
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from fedpmt.methods.averaging import Averaged, PartAveraging, with_steps
from fedpmt.methods.base import Traits, acts, require
from fedpmt.parts.depth import full
from fedpmt.resources import Resources
from fedpmt.training.local import LocalWork
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.methods.base import Round
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.training.local import Job, PriceOf, Run
    from fedpmt.training.messages import Client, Task


@dataclass(frozen=True)
class Proximal(LocalWork[None]):
    """Minimises F_k(y) + μ/2 ||y - w||²: the gradient is g(y) + μ (y - w), with w as received this round."""

    mu: float  # μ

    def start(self, job: Job[None]) -> Run[None]:
        check_mu(self.mu, job)
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
        check_mu(self.mu, job)
        return job.rule(strength=self.mu)

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """Two more operations per trained parameter and step, a difference and a multiply-add."""
        return replace(part.extra, step=part.extra.step + 2 * price(part).update)


def check_mu(mu: float, job: Job[Any]) -> None:
    """Refuse a pull that would overshoot."""
    rate = job.site.settings.learning_rate
    if rate * mu >= 2:
        raise SettingError(
            f"fedprox.mu must be < {2 / rate:g} at a learning rate of {rate:g}, where steps overshoot (got {mu:g})"
        )


@dataclass(frozen=True)
class FedProx(PartAveraging):
    """Every device trains the whole model; a weak one takes fewer steps."""

    mu: float = 1.0  # μ; no value suits every task
    partial: bool = True  # fewer steps on a weak device; else all of them, however long it takes it

    def __post_init__(self) -> None:
        require(self, mu=(0 <= self.mu < math.inf, ">= 0 and finite"))

    @property
    def traits(self) -> Traits:
        # Fewer steps take fewer operations and less time, but as many bytes and as much memory.
        budget = acts("work", "bytes", "upload", "memory") if self.partial else {}
        return Traits(needs_speeds=True, sums="layers", budget=budget)

    @property
    def local(self) -> LocalWork[Any]:
        return Proximal(self.mu) if self.mu else LocalWork()

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return full(state.structure)

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        task = super().assign(state, client, round)
        return with_steps(task, client, self.steps(client, task.offer[0]))

    def steps(self, client: Client, part: Part) -> int:
        """τ_k: as many steps as operations, time and energy pay for, at least one."""
        if not self.partial or client.plan is None:
            return client.steps
        limit = client.plan.limit
        limit = Resources.limit(operations=limit.operations, seconds=limit.seconds, joules=limit.joules)
        return max(1, client.plan.meter.affordable(part, limit))

    def neutral(self) -> Self:
        return replace(self, mu=0.0, partial=False)
