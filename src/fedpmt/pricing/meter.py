"""Prices a local round on one device: the only place where a Part, with all a method makes of it, becomes Resources.

The seconds of it are T_k = c_k |D_k| E / κ_k, plus what travels over the device's link; its energy is what the device
draws in these seconds. That of waiting for others depends on them, so it is no price but belongs to a round's record.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fedpmt.parts.depth import LEVEL_ID_BYTES
from fedpmt.parts.part import NOTHING, travelling_shapes
from fedpmt.pricing.matching import largest
from fedpmt.resources import ROUNDING, Resources

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fedpmt.devices.fleet import Device
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part, Shapes
    from fedpmt.pricing.cost import StepCost
    from fedpmt.pricing.price import Price


@dataclass(frozen=True)
class Times:
    """Virtual seconds. The unit of speed is a device that trains one epoch of the full model in `full_seconds`."""

    price: Price
    full_seconds: float
    epochs: int  # E

    def training(self, device: Device, cost: StepCost, samples: int, share: float = 1.0) -> float:
        """Seconds of local training; `share` is the part of its steps that a device is asked for."""
        load = self.price.load(cost, samples=samples, epochs=self.epochs * share)
        return self.full_seconds * load / device.speed

    def preparing(self, device: Device, samples: int) -> float:
        """Seconds before a device's first round, in which a base runs whose outputs are kept."""
        return self.full_seconds * self.price.base_load(samples) / device.speed

    @staticmethod
    def transfer(device: Device, bytes_down: float, bytes_up: float) -> float:
        """Seconds on the link, down and up; none where the fleet has no links."""
        return bytes_down / device.downlink + bytes_up / device.uplink


UPDATE = "update"
"""The group of a reply's tensors that holds what training changed: w_k - w of every trained entry."""


def reply_shapes(part: Part, structure: Structure) -> dict[str, Shapes]:
    """The tensors of a reply by group and name: it is priced by them, and checked against them."""
    return {UPDATE: travelling_shapes(part.trained, structure.shapes), **part.extra.answers}


def upload_bytes(part: Part, structure: Structure) -> int:
    """The bytes of a reply's tensors."""
    groups = reply_shapes(part, structure).values()
    return sum(_tensor_bytes(shapes, structure) for shapes in groups)


def download_bytes(part: Part, structure: Structure) -> int:
    """The bytes of a task's tensors; must be what the method really sends."""
    shapes = travelling_shapes(part.sent, structure.shapes)
    return _tensor_bytes(shapes, structure) + part.extra.task_bytes


def _tensor_bytes(shapes: Shapes, structure: Structure) -> int:
    return sum(structure.bytes_each(name) * math.prod(shape) for name, shape in shapes.items())


@dataclass(frozen=True)
class Quote:
    """What one local round takes of a device, and what of it is the link's."""

    usage: Resources
    transfer: float  # of its seconds, on the link
    download: int  # bytes of the task's tensors
    upload: int  # bytes of the reply's tensors


MOST_QUOTES = 1000


@dataclass(frozen=True)
class Meter:
    """What local rounds take on one device."""

    times: Times
    structures: Mapping[str, Structure]  # of all nets in play, by the name that parts call them
    device: Device
    samples: int  # |D_k|
    steps: int  # τ of a whole local round
    extra: Callable[[Part], Extra] | None = (
        None  # what the method's local work adds; None: what the part says
    )
    _quotes: dict[tuple[int, int | None, bool], tuple[Part, Quote]] = field(
        init=False, default_factory=dict, compare=False
    )

    def complete(self, part: Part) -> Part:
        """The part with all that the method's local work adds to its price."""
        if self.extra is None:
            return part
        extra = self.extra(part)
        return part if extra is part.extra else replace(part, extra=extra)

    def cost(self, part: Part) -> StepCost:
        """The price of one batch, with what the method adds to it."""
        cost, extra = self.times.price(part, self.samples), part.extra
        if extra is NOTHING:
            return cost
        return cost.plus(step=extra.step, once=extra.once, memory_bytes=extra.memory_bytes)

    def usage(self, part: Part, steps: int | None = None) -> Resources:
        """What a local round of this part takes; `steps` where the device is asked for another number of them."""
        return self.quote(self.complete(part), steps).usage

    def quote(self, part: Part, steps: int | None = None, *, reuses: bool = False) -> Quote:
        """The same in detail, of a complete part. Parts that come again, as suffixes do, are priced once.

        A device that `reuses` outputs of frozen layers, made in an earlier round, does not run these layers.
        """
        steps = None if steps == self.steps else steps
        known = self._quotes.get((id(part), steps, reuses))
        if known is not None and known[0] is part:
            return known[1]
        quote = self._price(part, steps, reuses=reuses)
        # Parts by width or mask are made anew each time, and large: to remember them would only hold memory.
        if part.overhead_bytes <= LEVEL_ID_BYTES and not part.inner and len(self._quotes) < MOST_QUOTES:
            self._quotes[id(part), steps, reuses] = part, quote
        return quote

    def _price(self, part: Part, steps: int | None, *, reuses: bool) -> Quote:
        cost, structure, times = self.cost(part), self.structures[part.model], self.times
        if reuses:
            cost = replace(cost, base=cost.prefix)
        share = 1.0 if steps is None else steps / self.steps
        operations = times.price.round_operations(cost, samples=self.samples, epochs=times.epochs * share)
        down, up = download_bytes(part, structure), upload_bytes(part, structure)
        traffic = down + part.overhead_bytes + up
        transfer = times.transfer(self.device, down + part.overhead_bytes, up)
        training, watts = times.training(self.device, cost, self.samples, share), self.device.watts
        joules = 0.0 if watts is None else watts.joules(training, transfer)
        usage = Resources(operations, training + transfer, traffic, up, cost.memory_bytes, joules)
        return Quote(usage, transfer, down, up)

    def affordable(self, part: Part, limit: Resources) -> int:
        """Return the most steps of a local round of this part that are within a limit; 0 where not even one is."""
        return bisect_right(
            range(1, self.steps + 1), 0, key=lambda steps: int(not self.usage(part, steps) <= limit)
        )

    def resources(self, operations: float, download: float, upload: float) -> Resources:
        """The same for amounts that no part has, such as products with pruned weights that are not computed."""
        full = self.times.price.full
        whole = self.times.price.round_operations(full, samples=self.samples, epochs=self.times.epochs)
        training = self.times.training(self.device, full, self.samples, operations / whole)
        transfer = self.times.transfer(self.device, download, upload)
        joules = 0.0 if self.device.watts is None else self.device.watts.joules(training, transfer)
        return Resources(operations, training + transfer, download + upload, upload, joules=joules)


@dataclass(frozen=True)
class Plan:
    """What the planner grants one device."""

    meter: Meter
    limit: Resources  # for a local round
    depth: int | None = None  # FedPMT's, 1 the smallest; None where a budget in amounts decides
    budgeted: bool = False  # whether the user set a budget; else the limit is what FedPMT's depth takes

    capacity: Resources | None = (
        None  # what the device can do by the deadline, where that is more than the limit
    )

    @property
    def room(self) -> Resources:
        """What a device may spend where it trades samples for layers: all that its deadline or budget leaves."""
        return self.capacity or self.limit

    def fits(self, part: Part) -> bool:
        """Whether a local round of this part is within the limit."""
        return self.meter.usage(part) <= self.limit

    def affords(self, part: Part) -> bool:
        """Whether a local round of this part is within all that the deadline or budget leaves."""
        return self.meter.usage(part) <= self.room

    def deepest(self, parts: Sequence[Part]) -> Part:
        """Return the deepest of the parts, smallest first, that the device can train in all steps: the paper's plan."""
        if self.depth is not None and not self.budgeted:
            return parts[self.depth - 1]
        # No deeper than planned, though with a cached prefix a deeper part may hold less memory.
        return largest(parts[: self.depth], self.fits)

    def trade(self, parts: Sequence[Part], share: float) -> tuple[Part, int]:
        """Trade samples for layers: the deepest of the parts, smallest first, that leaves a share of the steps.

        Where none does, it is the smallest part, with as many steps as the device can afford, at least one: it takes
        part with fewer samples rather than not at all.
        """
        limit = self.room
        wanted = math.ceil(share * self.meter.steps * (1 - ROUNDING))
        chosen = largest(parts, lambda part: self.meter.affordable(part, limit) >= max(1, wanted))
        return chosen, max(1, self.meter.affordable(chosen, limit))
