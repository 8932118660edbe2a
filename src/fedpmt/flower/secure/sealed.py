"""The collector of secure aggregation: the server opens sums of layers that enough devices trained (SecAgg+).

Where the server assigns parts, layers that fewer than `min_devices` devices would train are left out of the tasks.
Where devices have left since, or have chosen their parts themselves, the sum of such a layer is never opened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ConfigRecord

from fedpmt.flower.answers import reading
from fedpmt.flower.checks import (
    CLAIMS,
    OPEN_CLAIMS,
    norm,
    read_claims,
    read_part,
    read_seconds,
    require,
    require_bytes,
    require_header,
    require_keys,
)
from fedpmt.flower.secure.layer_vector import (
    COVER,
    Cover,
    Scale,
    count_cover,
    group_sizes,
    mean_update,
    read_cover,
    sum_part,
    weigh,
)
from fedpmt.flower.secure.masks import WORD
from fedpmt.flower.secure.node import SECURE
from fedpmt.flower.secure.sums import SecureSum
from fedpmt.flower.strategy import Collector, SumError
from fedpmt.flower.wire import MASKED, npy_bytes, write_order
from fedpmt.parts.part import NOTHING, mask
from fedpmt.simulation.cohort import account
from fedpmt.training.messages import UPDATE, Reply
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flwr.app import Array, RecordDict
    from flwr.serverapp import Grid

    from fedpmt.flower.answers import Missing
    from fedpmt.flower.deployment import Deployment
    from fedpmt.flower.roster import Roster
    from fedpmt.flower.secure.layer_vector import Words
    from fedpmt.flower.wire import Order
    from fedpmt.models.structure import Structure
    from fedpmt.records import RoundRecord
    from fedpmt.simulation.cohort import Assignment
    from fedpmt.simulation.loop import Federation
    from fedpmt.types import Tensors


STAGE_SECONDS = 120.0
"""The longest that nodes have for each of keys, shares and an opening; Flower notices within one minute who is gone.
Openings come after the deadline, once all replies are in."""

SUM = -1
"""The device id of a reply that stands for a sum."""

HIDDEN = "hidden"
"""The label of a part that a device has chosen and kept secret."""


@dataclass
class Sealed(Collector):
    """The server sees sums."""

    federation: Federation
    roster: Roster
    deployment: Deployment
    _missing: dict[int, Missing] = field(default_factory=dict)  # by device
    _sum: SecureSum = field(default_factory=lambda: SecureSum(()))
    _scale: Scale = field(default_factory=lambda: Scale(1.0, 1, 1.0))
    _model: Tensors = field(default_factory=dict)  # w^t, as it was sent
    _cover: Cover | None = None
    _held_back: int = 0  # layers

    @property
    def structure(self) -> Structure:
        """The global model's."""
        return self.federation.problem.model.structure

    @property
    def hidden(self) -> bool:
        """Whether the parts that devices train are their own secret (Option II)."""
        return self.federation.settings.splitting == "device"

    @property
    def missing(self) -> Mapping[int, Missing]:
        """The devices that have not sent keys or shares."""
        return self._missing

    def prepare(
        self, grid: Grid, assignments: list[Assignment], seconds: Callable[[], float]
    ) -> list[Assignment]:
        """Decide which layers are trained, and gather the devices that take part in the sum."""
        least, self._missing, self._cover = self.deployment.min_devices, {}, None
        if self.hidden:
            assignments = [self._hide(one) for one in assignments]
        else:
            assignments = self._leave_out_rare(assignments, least)
        able = {self.roster.of(one.device.id).id: one for one in assignments if one.able}
        self._sum = SecureSum(group_sizes(self.structure))
        there = list(able)
        if len(able) >= least:
            self._sum.gather(grid, able, lambda: stage_seconds(seconds()))
            self._missing = {able[node].device.id: absent for node, absent in self._sum.missing.items()}
            there = sorted(self._sum.members)
        members = [able[node] for node in there]
        if len(members) < least:
            alone: Missing = ("failed", f"no sum: {len(members)} of min-devices = {least} are there for it")
            self._missing = {one.device.id: self._missing.get(one.device.id, alone) for one in able.values()}
            return assignments
        self._model = members[0].task.tensors[MODEL]
        unit = max(weigh(self.federation.method, one.samples) for one in members)
        self._scale = Scale(self.deployment.secagg_range, len(members), unit)
        return assignments

    def _hide(self, one: Assignment) -> Assignment:
        """With Option II the part is unknown: account for the largest, and let the device mind its own memory."""
        largest = max(one.task.offer, key=lambda part: self.federation.planner.price(part).operations)
        device = replace(one.device, memory=math.inf)
        part = replace(largest, label=HIDDEN)
        hidden = account(self.federation, device, one.task, part, one.samples, one.plan)
        return replace(hidden, version=one.version)

    def _leave_out_rare(self, assignments: list[Assignment], least: int) -> list[Assignment]:
        """With Option I, leave out layers that would not be opened."""
        counts = count_cover(self.structure, [(one.part, 1) for one in assignments if one.able]).counts
        rare = {
            name
            for layer, count in zip(self.structure.layers, counts, strict=True)
            if count < least
            for name in layer.tensors
        }
        return [self._leave_out(one, rare) if one.able else one for one in assignments]

    def _leave_out(self, one: Assignment, names: set[str]) -> Assignment:
        kept = {name: selection for name, selection in one.part.trained.items() if name not in names}
        if len(kept) == len(one.part.trained):
            return one
        part = one.plan.meter.complete(replace(one.part, trained=kept, extra=NOTHING))
        fewer = sum(mask(self.structure, one.part)) - sum(mask(self.structure, part))
        part = replace(part, label=f"{one.part.label} less {fewer} layer{'s' if fewer > 1 else ''}")
        task = replace(one.task, offer=(part,))
        fitted = account(self.federation, one.device, task, part, one.samples, one.plan)
        return replace(fitted, version=one.version)

    def write(self, order: Order) -> RecordDict:
        """Encode a task, with the letters of the device's neighbours."""
        records = write_order(order, self.structure)
        letters = self._sum.letters(self.roster.of(order.device).id)
        record: dict[str, Any] = {**letters.config_records[SECURE]}
        record |= {"devices": self._scale.devices, "unit": float(self._scale.unit)}
        records[SECURE] = ConfigRecord(record)
        return records

    def read(self, records: RecordDict, order: Order, samples: int) -> Reply:
        """Check a masked vector and add it to the sum; the reply that is returned has no tensors."""
        inspector = MaskedInspector(self._sum.sizes, hidden=self.hidden)
        reply, words = inspector.read(records, order, samples)
        self._sum.add(self.roster.of(order.device).id, words)
        return replace(reply, part=replace(reply.part, label=HIDDEN)) if self.hidden else reply

    def replies(self, grid: Grid, replies: list[Reply]) -> list[Reply]:
        """Open what may be opened: one reply stands for all, with the mean update of each layer."""
        if not replies:
            return []
        parts = [(reply.part, weigh(self.federation.method, reply.samples)) for reply in replies]
        weights = [weight for _, weight in parts]
        if self.hidden:
            cover = read_cover(self._sum.open(grid, [COVER], STAGE_SECONDS)[COVER])
        else:
            cover = count_cover(self.structure, parts)
        _check_cover(cover, weights)
        layers = [layer for layer, count in enumerate(cover.counts) if count >= self.deployment.min_devices]
        self._held_back = len(self.structure.layers) - len(layers)
        if not layers:
            self._cover = cover
            return []
        sums = self._sum.open(grid, [COVER, *(1 + layer for layer in layers)], STAGE_SECONDS)
        if any((ours != theirs).any() for ours, theirs in zip(cover, read_cover(sums[COVER]), strict=True)):
            raise SumError("no sum: devices have not trained the layers that they were assigned")
        exact = mean_update(self.structure, cover, layers, sums, self._scale)
        self._bound(exact)
        update = {name: change.to(self._model[name]) for name, change in exact.items()}
        self._cover = cover  # only now is it known to be right
        part = sum_part(self.structure, layers)
        return [Reply(SUM, replies[0].round, part, sum(weights), {UPDATE: update})]

    def _bound(self, update: Tensors) -> None:
        """Bound the norm of the mean; nobody can see that of one device."""
        moved = norm(update)
        limit = self.deployment.update_limit * max(1.0, norm(self._model))
        if not moved <= limit:
            raise SumError(f"no sum: the mean update has norm {moved:.4g}, above the limit {limit:.4g}")

    def adjust(self, assignment: Assignment) -> Assignment:
        """A masked vector is as long as the whole model, whatever was trained."""
        return replace(assignment, bytes_up=WORD.itemsize * sum(self._sum.sizes))

    def annotate(self, record: RoundRecord) -> RoundRecord:
        """Take the number of devices per layer from the sum, and add how many layers were not opened."""
        if self._cover is None:
            return record
        names = (layer.name for layer in self.structure.layers)
        counts = dict(zip(names, self._cover.counts.tolist(), strict=True))
        metrics = {**record.metrics, "layers_held_back": float(self._held_back)}
        return record.model_copy(update={"layers": counts, "metrics": metrics})


def _check_cover(cover: Cover, weights: list[int]) -> None:
    """Refuse counts and weights that devices of these weights cannot add up to."""
    least, most = cover.counts * min(weights), cover.counts * max(weights)
    right = (cover.counts <= len(weights)) & (least <= cover.weights) & (cover.weights <= most)
    if not right.all():
        raise SumError("no sum: the counts and weights of its layers cannot be those of its devices")


def stage_seconds(left: float) -> float:
    """How long a stage may take of what is left of the round, so that one silent node does not use all of it.

    >>> stage_seconds(60.0), stage_seconds(3600.0), stage_seconds(0.0)
    (15.0, 120.0, 1.0)
    """
    return max(1.0, min(STAGE_SECONDS, left / 4))


@dataclass(frozen=True)
class MaskedInspector:
    """Checks and decodes replies under masks."""

    sizes: Sequence[int]  # words in each group of the vector
    hidden: bool  # whether the part, and with it the training time, is the device's own secret

    def read(self, records: RecordDict, order: Order, samples: int) -> tuple[Reply, list[Words]]:
        """Decode the reply to an order: the reply without its tensors, and the masked vector.

        Raises:
            RefusedError: Something in the reply is wrong.
        """
        claims = read_claims(records, order, samples)
        require(not records.metric_records, "it says more than it was asked")
        require_keys("what it says", claims, CLAIMS if self.hidden else (*CLAIMS, *OPEN_CLAIMS))
        part = order.task.offer[-1] if self.hidden else read_part(claims, order)
        seconds = 0.0 if self.hidden else read_seconds(claims)
        names = tuple(str(group) for group in range(len(self.sizes)))
        require_keys("groups", records.array_records, (MASKED,))
        arrays = records.array_records[MASKED]
        require_keys(f"tensors of {MASKED}", arrays, names)
        require_bytes(records, sum(npy_bytes((size,), WORD_BYTES) for size in self.sizes))
        words = [_read_words(arrays[name], name, size) for name, size in zip(names, self.sizes, strict=True)]
        return Reply(order.device, order.round, part, samples, {}, seconds=seconds), words


WORD_BYTES = np.dtype(np.uint32).itemsize


def _read_words(array: Array, name: str, length: int) -> Words:
    label = f"{MASKED} '{name}'"
    require_header(label, array, (length,), torch.uint32)
    with reading(MASKED):
        found: Words = array.numpy()
    require(isinstance(found, np.ndarray), f"{MASKED} is not an array")
    right = found.shape == (length,) and found.dtype == np.uint32
    require(right, f"{label} is not what its header says")
    return found
