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
from fedpmt.methods.proximal import Proximal
from fedpmt.parts.depth import full
from fedpmt.resources import Resources
from fedpmt.training.local import LocalWork

if TYPE_CHECKING:
    from fedpmt.methods.base import Round
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Client, Task


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
