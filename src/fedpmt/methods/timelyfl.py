"""TimelyFL: Zhang et al., "TimelyFL: Heterogeneity-aware Asynchronous Federated Learning with Adaptive Partial
Training", 2023.

The server steps in fixed intervals, as long as the k-th fastest device needs for a whole local round. Each device is
asked for what it can do in one of them: more epochs where it is fast, the last layers alone where it is slow:

    E_k = max(1, ⌊(T - t_com) / t_epoch⌋);   where t_com + t_epoch > T, the deepest suffix that fits into T
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import Traits
from fedpmt.parts.depth import suffixes
from fedpmt.pricing.matching import largest
from fedpmt.resources import ROUNDING

if TYPE_CHECKING:
    from fedpmt.methods.base import Round
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Client, Task

MOST_EPOCHS = 1000
"""A device that takes next to no time is not asked for more."""


@dataclass(frozen=True)
class TimelyFL(PartAveraging):
    """Every device trains as many epochs, or as many of the last layers, as fit into the server's interval."""

    depths: int | None = None  # how many suffixes there are; None: one per layer

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            sums="layers",
            combines="overlap mean",
            events={"step_every": "fastest:0.5"},
        )

    def masks(self, state: Averaged) -> tuple[Part, ...]:
        """All suffixes, smallest first."""
        memo = state.structure.memo
        if (TimelyFL, self.depths) not in memo:
            memo[TimelyFL, self.depths] = suffixes(
                state.structure, self.depths or len(state.structure.layers)
            )
        made: tuple[Part, ...] = memo[TimelyFL, self.depths]
        return made

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        """The deepest suffix of which a device can train one epoch in time, else the smallest."""
        masks = self.masks(state)
        if client.plan is None or math.isinf(round.interval):
            return masks[-1]
        return largest(masks, lambda part: self.fits(client, part, 1, round))

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        task = super().assign(state, client, round)
        part = task.offer[0]
        if client.plan is None or math.isinf(round.interval):
            return task
        epochs = self.epochs(client, part, round) if part is self.masks(state)[-1] else 1
        if epochs == client.plan.meter.times.epochs:
            return task
        # The label says how many, since the same part is more work here.
        memo, key = state.structure.memo, (TimelyFL, id(part), epochs)
        if key not in memo:
            memo[key] = replace(part, label=f"{part.label}, {epochs} epoch{'s' if epochs > 1 else ''}")
        return replace(task, offer=(memo[key],), epochs=epochs)

    def epochs(self, client: Client, part: Part, round: Round) -> int:
        """E_k: the most epochs of a part that fit into the interval, at least one."""
        fitting = bisect_right(
            range(1, MOST_EPOCHS + 1), 0, key=lambda epochs: int(not self.fits(client, part, epochs, round))
        )
        return max(1, fitting)

    def fits(self, client: Client, part: Part, epochs: int, round: Round) -> bool:
        """Whether a device can train this many epochs of a part in time."""
        assert client.plan is not None
        steps = epochs * client.steps // client.plan.meter.times.epochs
        return client.usage(part, steps).seconds <= round.interval * (1 + ROUNDING)

    def neutral(self) -> Self:
        return self
