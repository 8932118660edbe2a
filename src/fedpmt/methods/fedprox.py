"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

A device stays near the model it received, and a weak one does part of the work instead of being dropped:

    y <- y - η (g(y) + μ (y - w^t)),   τ_k steps;   w^{t+1} = Σ_{k in S} |D_k| y_k / Σ_{k in S} |D_k|
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import FROM_0
from fedpmt.parts.depth import full

if TYPE_CHECKING:
    from fedpmt.methods.base import Action, Round
    from fedpmt.parts.part import Part
    from fedpmt.pricing.budget import Usage
    from fedpmt.resources import Resource
    from fedpmt.training.local import LocalWork
    from fedpmt.training.messages import Client, Task


@dataclass(frozen=True)
class FedProx(PartAveraging):
    """Every device trains the whole model; a weak one takes fewer steps."""

    needs_speeds = True
    sums = "layers"

    mu: float = 1.0  # μ; no value suits every task
    partial: bool = True  # fewer steps on a weak device; else all of them, however long it takes it

    def __post_init__(self) -> None:
        self.require(mu=(0 <= self.mu < math.inf, FROM_0))

    @property
    def combines(self) -> str:
        return "mean"

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return full(state.structure)

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        task = super().assign(state, client, round)
        part = task.offer[0]
        steps = self.steps(client, self.local().usage(part, round.price, state.structure))
        if steps == client.steps:
            return task
        # The label says how much, since the same part is less work here.
        part = replace(part, label=f"{part.label}, {steps} of {client.steps} steps")
        return replace(task, offer=(part,), steps=steps)

    def steps(self, client: Client, usage: Usage) -> int:
        """τ_k: as many steps as the budget of a whole local round pays for, at least one."""
        if not self.partial or client.budget is None:
            return client.steps
        return max(1, math.floor(client.budget.share(usage) * client.steps))

    def action(self, resource: Resource) -> Action:
        """Fewer steps take fewer operations and less time, but as many bytes and as much memory."""
        return "work" if self.partial and resource in ("operations", "time") else "none"

    def local(self) -> LocalWork[None]:
        from fedpmt.training.local import LocalWork
        from fedpmt.training.proximal import ProximalWork

        return ProximalWork(self.mu) if self.mu else LocalWork()

    def neutral(self) -> Self:
        return replace(self, mu=0.0, partial=False)
