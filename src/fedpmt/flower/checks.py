"""Check a reply before it can touch the model. The first thing that is wrong refuses it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedpmt.flower.answers import RefusedError, reading
from fedpmt.flower.wire import METRICS, REPLY, array_bytes, npy_bytes, tensors, wire_type
from fedpmt.pricing.meter import reply_shapes
from fedpmt.simulation.bookkeeping import LONGEST
from fedpmt.simulation.cohort import steps_asked
from fedpmt.training.local import Reach
from fedpmt.training.loop import LOSS
from fedpmt.training.messages import UPDATE, Reply
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flwr.app import Array, RecordDict

    from fedpmt.flower.wire import Order
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.simulation.loop import Federation
    from fedpmt.types import Payload, Tensors

SCALARS_LENGTH = 10_000
"""The most characters of a method's own scalars, which are a handful of numbers."""

CLAIMS = ("run", "round", "device", "samples")
"""What every reply says of itself."""

OPEN_CLAIMS = ("part", "label", "seconds")
"""What it says in addition, unless the part that a device chose is its secret."""

SCALARS = "scalars"


@dataclass(frozen=True)
class Inspector:
    """Checks and decodes replies in clear."""

    federation: Federation
    update_limit: float  # of ‖w_k - w‖ / ‖w‖, with w all that was sent

    @property
    def structure(self) -> Structure:
        """The global model's."""
        return self.federation.problem.model.structure

    def read(self, records: RecordDict, order: Order, samples: int) -> Reply:
        """Decode the reply to an order.

        Args:
            records: What the node sent.
            order: What it was asked.
            samples: How many samples it has said that it holds.

        Raises:
            RefusedError: Something in the reply is wrong.
        """
        claims = read_claims(records, order, samples)
        require_keys("what it says", claims, (*CLAIMS, *OPEN_CLAIMS, SCALARS))
        part, seconds = read_part(claims, order), read_seconds(claims)
        payload = self._read_payload(records, order, part)
        self._bound(payload, order, samples)
        scalars, metrics = _read_scalars(claims[SCALARS]), self._read_metrics(records, part)
        return Reply(order.device, order.round, part, samples, payload, scalars, metrics, seconds)

    def _read_payload(self, records: RecordDict, order: Order, part: Part) -> Payload:
        """The tensors: exactly the names, shapes and types of a reply with this part, and finite."""
        expected = reply_shapes(part, self.federation.planner.structures[part.model])
        sent = order.task.tensors.values()
        types = {name: tensor.dtype for group in sent for name, tensor in group.items()}
        require_keys("groups", records.array_records, expected)
        most = 0
        for group, shapes in expected.items():
            require_keys(f"tensors of {group}", records.array_records[group], shapes)
            for name, shape in shapes.items():
                most += npy_bytes(shape, types.get(name, torch.float32).itemsize)
        require_bytes(records, most)
        found = {}
        for group, shapes in expected.items():
            arrays = records.array_records[group]
            for name, shape in shapes.items():
                require_header(f"{group} '{name}'", arrays[name], shape, types.get(name, torch.float32))
            with reading(group):
                found[group] = tensors(arrays, self.federation.problem.model.device)
            for name, tensor in found[group].items():
                right = tuple(tensor.shape) == shapes[name] and tensor.dtype == types.get(name, torch.float32)
                require(right, f"{group} '{name}' is not what its header says")
                finite = bool(torch.isfinite(tensor).all())
                require(finite, f"{group} '{name}' holds values that are not finite")
        return found

    def _bound(self, payload: Payload, order: Order, samples: int) -> None:
        """Bound the norm of the update by that of all that was sent, and the norms of all other groups."""
        federation = self.federation
        limit = self.update_limit * max(1.0, norm(order.task.tensors[MODEL]))
        moved = norm(payload[UPDATE])  # ‖w_k - w‖
        require(moved <= limit, f"its update has norm {moved:.4g}, above the limit {limit:.4g}")
        steps = steps_asked(federation, order.task, samples)
        reach = Reach(limit, federation.local(order.round), steps, samples, order.round + 1)
        bounds = federation.method.local.bounds(order.task, reach)
        for group in sorted(set(payload) - {UPDATE}):
            # A group without a bound of its own is a difference too, and may be as long as the update.
            most, size = bounds.get(group, limit), norm(payload[group])
            require(size <= most, f"its {group} has norm {size:.4g}, above the limit {most:.4g}")

    def _read_metrics(self, records: RecordDict, part: Part) -> dict[str, float]:
        require_keys("metric records", {METRICS: None, **records.metric_records}, (METRICS,))
        found: Mapping[str, Any] = records.metric_records.get(METRICS, {})
        private = self.federation.settings.dp_clip is not None
        require_keys("metrics", found, () if private else (LOSS, *part.extra.metrics))
        for name, value in found.items():
            require(_is_number(value), f"metric '{name}' is not a finite number")
        return {name: float(value) for name, value in found.items()}


def read_claims(records: RecordDict, order: Order, samples: int) -> Mapping[str, Any]:
    """What a reply says of itself, once it is known to belong to this order."""
    require_keys("config records", records.config_records, (REPLY,))
    claims: Mapping[str, Any] = records.config_records[REPLY]
    for key, expected in (("run", order.run), ("round", order.round), ("device", order.device)):
        require(claims.get(key) == expected, f"it names {key} '{claims.get(key)}', not '{expected}'")
    trained = claims.get("samples")
    require(trained == samples, f"it trained on {trained} samples, not {samples}")
    return claims


def read_seconds(claims: Mapping[str, Any]) -> float:
    """The training time that a reply reports."""
    seconds: Any = claims.get("seconds")
    right = _is_number(seconds) and 0 <= seconds <= LONGEST
    require(right, f"its training time '{seconds}' is not a number of seconds")
    return float(seconds)


def read_part(claims: Mapping[str, Any], order: Order) -> Part:
    """The part that a reply says it trained: one of those on offer, under its own label."""
    place, offer = claims.get("part"), order.task.offer
    right = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(offer)
    require(right, f"it trained part '{place}' of {len(offer)} on offer")
    part = offer[int(str(place))]
    require(claims.get("label") == part.label, f"it trained '{claims.get('label')}', not '{part.label}'")
    return part


def _read_scalars(text: object) -> dict[str, Any]:
    require(isinstance(text, str) and len(text) <= SCALARS_LENGTH, "its scalars are not a short text")
    try:
        found = json.loads(str(text))
    except ValueError as error:
        raise RefusedError("its scalars are not JSON") from error
    require(isinstance(found, dict), "its scalars are not a table")
    for key, value in found.items():
        right = isinstance(value, str | bool) or _is_number(value)
        require(right, f"scalar '{key}' is not a finite number")
    return dict(found)


def require_bytes(records: RecordDict, most: int) -> None:
    """Refuse a reply whose tensors take more bytes than they need."""
    size = array_bytes(records)
    require(size <= most, f"its tensors take {size} bytes, where {most} are enough")


def require_header(label: str, array: Array, shape: tuple[int, ...], kind: torch.dtype) -> None:
    """Refuse an array whose header states another shape or type."""
    dtype = str(wire_type(kind)).removeprefix("torch.")
    require(tuple(array.shape) == shape, f"{label} has shape {tuple(array.shape)}, not {shape}")
    require(array.dtype == dtype, f"{label} is of type {array.dtype}, not {dtype}")


def require_keys(what: str, found: Mapping[str, Any], expected: Mapping[str, Any] | tuple[str, ...]) -> None:
    """Refuse a table that has not exactly these keys."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    wrong = [f"without {', '.join(missing)}"] if missing else []
    wrong += [f"with {', '.join(extra)[:200]}"] if extra else []
    require(not wrong, f"{what} {' and '.join(wrong)}")


def require(holds: object, reason: str) -> None:
    """Refuse a reply for this reason unless the condition holds."""
    if not holds:
        raise RefusedError(reason)


def norm(tensors: Tensors) -> float:
    """The norm of all of these tensors as one vector."""
    return math.sqrt(sum(float(one.cpu().double().square().sum()) for one in tensors.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
