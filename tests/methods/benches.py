"""The bench that methods are driven on, with what tests of single methods ask of it in addition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import support
from fedpmt.devices.fleet import Device
from fedpmt.methods.base import aggregate
from fedpmt.parts.part import take
from fedpmt.pricing.meter import Meter
from fedpmt.pricing.times import Times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from fedpmt.methods.base import Step
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.local import LocalWork
    from fedpmt.training.messages import Reply
    from fedpmt.types import Tensors


class Bench(support.Bench):
    """One method on one small model, driven by hand."""

    def aggregate(
        self, replies: Iterable[Reply], index: int = 0, *, state: Any = None, **server: Any
    ) -> Step[Any]:
        """Fold replies into this state, or the bench's own, on a server that may have other things at hand."""
        state, at_hand = self.state if state is None else state, replace(self.server, **server)
        return aggregate(self.method, state, replies, self.round(index), at_hand)

    def cost(self, part: Part) -> Cost:
        """The price of one batch of the method's local work on a part."""
        return work_cost(self.method.local, part, self.price, self.models[part.model].structure)


class ForwardPrice(support.FlatPrice):
    """With a price of a forward pass too."""

    def __call__(self, part: Part) -> Cost:
        return replace(super().__call__(part), forward=100.0)


def work_cost(work: LocalWork[Any], part: Part, price: Any, structure: Structure) -> Cost:
    """The price of one batch of a part, with all that this local work adds to it."""
    meter = Meter(Times(price, 1.0, 1), {}, Device(0, 1, 1.0), 1, 1)
    return meter.cost(replace(part, extra=work.extra(part, price, structure)))


def trained(received: Tensors, reply: Reply) -> dict[str, Tensor]:
    """The weights w_k that a reply stands for: what it changed, added to what it was sent of w."""
    found = reply.part.trained
    return {name: take(received[name], found[name]) + change for name, change in reply.update.items()}
