"""Replies that only add up: the server opens sums per layer, of layers that enough devices trained (SecAgg+).

A layer that fewer than `min_devices` train is taken out of the tasks where the server assigns them, and is not opened
where devices have left since, or have chosen for themselves: its sum stays under masks for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord

from fedpmt.flower.checks import MaskedInspector
from fedpmt.flower.collect import Collector, SumError
from fedpmt.flower.fixed_point import Scale
from fedpmt.flower.layer_vector import (
    COVER,
    Cover,
    covered,
    layers_part,
    mean_changes,
    read_cover,
    sizes,
    weight_of,
)
from fedpmt.flower.masks import WORD
from fedpmt.flower.secure_node import SECURE
from fedpmt.flower.secure_sum import SecureSum
from fedpmt.flower.wire import write_order
from fedpmt.parts.depth import mask
from fedpmt.simulation.assignment import account
from fedpmt.training.messages import UPDATE, Reply
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.app import RecordDict
    from flwr.serverapp import Grid

    from fedpmt.flower.answers import Loss
    from fedpmt.flower.deployment import Deployment
    from fedpmt.flower.roster import Roster
    from fedpmt.flower.wire import Order
    from fedpmt.models.structure import Structure
    from fedpmt.records import RoundRecord
    from fedpmt.simulation.assignment import Assignment
    from fedpmt.simulation.loop import Federation
    from fedpmt.types import Tensors

STAGE_SECONDS = 120.0
"""How long nodes have for keys, for shares and for an opening, at most; Flower finds out within one minute who is gone.
Openings come after the deadline, once all replies are in."""

SUM = -1
"""The device that a sum comes from."""

HIDDEN = "hidden"
"""The part of a device that chose for itself and told nobody."""


@dataclass
class Sealed(Collector):
    """The server sees sums."""

    federation: Federation
    roster: Roster
    deployment: Deployment
    _lost: dict[int, Loss] = field(default_factory=dict)  # by device
    _sum: SecureSum = field(default_factory=lambda: SecureSum(()))
    _scale: Scale = field(default_factory=lambda: Scale(1.0, 1, 1.0))
    _model: Tensors = field(default_factory=dict)  # w^t, as it was sent
    _cover: Cover | None = None
    _held_back: int = 0  # layers

    @property
    def structure(self) -> Structure:
        """The model's."""
        return self.federation.problem.model.structure

    @property
    def hidden(self) -> bool:
        """Whether nobody knows which layers a device trained."""
        return self.federation.settings.splitting == "device"

    def prepare(self, grid: Grid, asked: list[Assignment], seconds: Callable[[], float]) -> list[Assignment]:
        """Arrange who trains what, and gather those that take part in the sum."""
        least, self._lost, self._cover = self.deployment.min_devices, {}, None
        asked = [self._unknown(one) for one in asked] if self.hidden else self._arranged(asked, least)
        able = {self.roster.of(one.device.id).id: one for one in asked if one.able}
        self._sum = SecureSum(sizes(self.structure))
        there = list(able)
        if len(able) >= least:
            self._sum.gather(grid, able, lambda: stage_seconds(seconds()))
            self._lost = {able[node].device.id: loss for node, loss in self._sum.lost.items()}
            there = sorted(self._sum.members)
        members = [able[node] for node in there]
        if len(members) < least:
            alone: Loss = ("failed", f"no sum: {len(members)} of min-devices = {least} are there for it")
            self._lost = {one.device.id: self._lost.get(one.device.id, alone) for one in able.values()}
            return asked
        self._model = members[0].task.tensors[MODEL]
        unit = max(self.weight(one.samples) for one in members)
        self._scale = Scale(self.deployment.secagg_range, len(members), unit)
        return asked

    def weight(self, samples: int) -> int:
        """a_k, as the method has it."""
        return weight_of(self.federation.method, samples)

    def _unknown(self, one: Assignment) -> Assignment:
        """With Option II nobody tells: it is priced as the widest part, whether or not that fits into its memory."""
        widest = max(one.task.offer, key=lambda part: self.federation.planner.price(part).operations)
        device = replace(one.device, memory=math.inf)
        part = replace(widest, label=HIDDEN)
        return account(self.federation, device, one.task, part, one.samples, one.plan)

    def _arranged(self, asked: list[Assignment], least: int) -> list[Assignment]:
        """With Option I nobody trains what would not be opened."""
        counts = covered(self.structure, [(one.part, 1) for one in asked if one.able]).counts
        rare = {
            name
            for layer, count in zip(self.structure.layers, counts, strict=True)
            if count < least
            for name in layer.tensors
        }
        return [self._narrowed(one, rare) if one.able else one for one in asked]

    def _narrowed(self, one: Assignment, rare: set[str]) -> Assignment:
        kept = {name: selection for name, selection in one.part.trained.items() if name not in rare}
        if len(kept) == len(one.part.trained):
            return one
        part = replace(one.part, trained=kept)
        fewer = sum(mask(self.structure, one.part)) - sum(mask(self.structure, part))
        part = replace(part, label=f"{one.part.label} less {fewer} layer{'s' if fewer > 1 else ''}")
        task = replace(one.task, offer=(part,))
        return account(self.federation, one.device, task, part, one.samples, one.plan)

    @property
    def lost(self) -> Mapping[int, Loss]:
        """The devices without keys or shares."""
        return self._lost

    def write(self, order: Order) -> RecordDict:
        """The order with the letters of the device's neighbours."""
        records = write_order(order, self.structure)
        letters = self._sum.letters(self.roster.of(order.device).id)
        said: dict[str, Any] = {**letters.config_records[SECURE]}
        said |= {"devices": self._scale.devices, "unit": float(self._scale.unit)}
        records[SECURE] = ConfigRecord(said)
        return records

    def read(self, records: RecordDict, order: Order, samples: int) -> Reply:
        """Add a masked vector to the sum; its reply has no tensors."""
        inspector = MaskedInspector(self._sum.sizes, hidden=self.hidden)
        reply, words = inspector.read(records, order, samples)
        self._sum.add(self.roster.of(order.device).id, words)
        return replace(reply, part=replace(reply.part, label=HIDDEN)) if self.hidden else reply

    def replies(self, grid: Grid, good: list[Reply]) -> list[Reply]:
        """Open what may be opened: one reply stands for all, with the mean of each layer."""
        if not good:
            return []
        assigned = [(reply.part, self.weight(reply.samples)) for reply in good]
        if self.hidden:
            cover = read_cover(self._sum.open(grid, [COVER], STAGE_SECONDS)[COVER])
        else:
            cover = covered(self.structure, assigned)
        self._check(cover, [weight for _, weight in assigned])
        layers = [layer for layer, count in enumerate(cover.counts) if count >= self.deployment.min_devices]
        self._held_back = len(self.structure.layers) - len(layers)
        if not layers:
            self._cover = cover
            return []
        sums = self._sum.open(grid, [COVER, *(1 + layer for layer in layers)], STAGE_SECONDS)
        if any((ours != theirs).any() for ours, theirs in zip(cover, read_cover(sums[COVER]), strict=True)):
            raise SumError("no sum: devices have not trained the layers that they were assigned")
        changes = mean_changes(self.structure, cover, layers, sums, self._scale)
        self._bound(changes)
        update = {name: change.to(self._model[name]) for name, change in changes.items()}
        total, part = sum(weight for _, weight in assigned), layers_part(self.structure, layers)
        self._cover = cover  # only now is it known to be right
        return [Reply(SUM, good[0].round, part, total, {UPDATE: update})]

    def _check(self, cover: Cover, weights: list[int]) -> None:
        """What a cover of these devices can be."""
        least, most = cover.counts * min(weights), cover.counts * max(weights)
        right = (cover.counts <= len(weights)) & (least <= cover.weights) & (cover.weights <= most)
        if not right.all():
            raise SumError("no sum: the counts and weights of its layers cannot be those of its devices")

    def _bound(self, changes: Tensors) -> None:
        """The norm of the mean; that of one device is nobody's to see."""
        moved = _norm(changes)
        limit = self.deployment.update_limit * max(1.0, _norm(self._model))
        if not moved <= limit:
            raise SumError(f"no sum: the mean update has norm {moved:.4g}, above the limit {limit:.4g}")

    def priced(self, one: Assignment) -> Assignment:
        """A masked vector is as long as the whole model, whatever was trained."""
        return replace(one, bytes_up=WORD.itemsize * sum(self._sum.sizes))

    def noted(self, record: RoundRecord) -> RoundRecord:
        """How many devices trained each layer comes from the sum, and how many layers were not opened."""
        if self._cover is None:
            return record
        names = (layer.name for layer in self.structure.layers)
        counts = dict(zip(names, self._cover.counts.tolist(), strict=True))
        metrics = {**record.metrics, "layers_held_back": float(self._held_back)}
        return record.model_copy(update={"layers": counts, "metrics": metrics})


def stage_seconds(left: float) -> float:
    """How long a stage may take of what is left of the round: one silent node must not cost the others theirs.

    >>> stage_seconds(60.0), stage_seconds(3600.0), stage_seconds(0.0)
    (15.0, 120.0, 1.0)
    """
    return max(1.0, min(STAGE_SECONDS, left / 4))


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))
