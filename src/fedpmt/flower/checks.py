"""What a node sends is looked at here before it can touch the model; the first thing wrong refuses the reply."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedpmt.flower.answers import RefusedError, reading
from fedpmt.flower.wire import MASKED, METRICS, REPLY, array_bytes, npy_bytes, tensors
from fedpmt.pricing.adaptive import LONGEST
from fedpmt.pricing.meter import reply_shapes
from fedpmt.simulation.assignment import steps_asked
from fedpmt.training.local import Reach
from fedpmt.training.loop import LOSS
from fedpmt.training.messages import UPDATE, Reply
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flwr.app import Array, RecordDict

    from fedpmt.flower.fixed_point import Words
    from fedpmt.flower.wire import Order
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.simulation.loop import Federation
    from fedpmt.types import Payload, Tensors

SCALARS_LENGTH = 10_000
"""Characters of a method's own scalars; they are a handful of numbers."""


@dataclass(frozen=True)
class Inspector:
    """Everything that a reply is held against."""

    federation: Federation
    update_limit: float  # of ‖w_k - w‖ / ‖w‖, w all that was sent

    @property
    def structure(self) -> Structure:
        """The model's."""
        return self.federation.problem.model.structure

    def read(self, records: RecordDict, order: Order, samples: int) -> Reply:
        """The reply to an order, or a refusal. `samples` is what the node said that it holds."""
        said = _said(records, order, samples)
        _same("what it says", said, dict.fromkeys((*MASKED_SAID, *OPENLY, SCALARS)))
        part, seconds = _part(said, order), _seconds(said)
        payload = self._payload(records, order, part)
        self._bound(payload, order, part, samples)
        return Reply(
            order.device,
            order.round,
            part,
            samples,
            payload,
            _scalars(said[SCALARS]),
            self._metrics(records, part),
            seconds,
        )

    def _payload(self, records: RecordDict, order: Order, part: Part) -> Payload:
        """The tensors: the names, shapes and types that this part has, no more and no less, all finite."""
        expected = reply_shapes(part, self.structure)
        kinds = {
            name: tensor.dtype for group in order.task.tensors.values() for name, tensor in group.items()
        }
        _same("groups", records.array_records, expected)
        most = 0
        for group, shapes in expected.items():
            _same(f"tensors of {group}", records.array_records[group], shapes)
            most += sum(
                npy_bytes(shape, kinds.get(name, torch.float32).itemsize) for name, shape in shapes.items()
            )
        size = array_bytes(records)
        _must(size <= most, f"its tensors take {size} bytes, where {most} are enough")
        found = {}
        for group, shapes in expected.items():
            arrays = records.array_records[group]
            for name, shape in shapes.items():
                _fits(f"{group} '{name}'", arrays[name], shape, kinds.get(name, torch.float32))
            found[group] = _read(group, arrays)
            for name, tensor in found[group].items():
                fits = tuple(tensor.shape) == shapes[name] and tensor.dtype == kinds.get(name, torch.float32)
                _must(fits, f"{group} '{name}' is not what its header says")
                _must(
                    bool(torch.isfinite(tensor).all()), f"{group} '{name}' holds values that are not finite"
                )
        return found

    def _bound(self, payload: Payload, order: Order, part: Part, samples: int) -> None:
        """‖w_k - w‖ over what was trained, against the norm of all that was sent; and that of all other groups."""
        sent = order.task.tensors
        limit = self.update_limit * max(1.0, _norm(sent[MODEL]))
        moved = _norm(payload[UPDATE])
        _must(moved <= limit, f"its update has norm {moved:.4g}, above the limit {limit:.4g}")
        federation = self.federation
        steps = steps_asked(federation, order.task, samples)
        reach = Reach(limit, federation.local(order.round), steps, samples, order.round + 1)
        bounds = federation.method.local.bounds(order.task, reach)
        for group in sorted(set(payload) - {UPDATE}):
            # A group without a bound of its own is a difference too, and may be as long as the update.
            most, size = bounds.get(group, limit), _norm(payload[group])
            _must(size <= most, f"its {group} has norm {size:.4g}, above the limit {most:.4g}")

    def _metrics(self, records: RecordDict, part: Part) -> dict[str, float]:
        _same("metric records", {METRICS: None, **records.metric_records}, {METRICS: None})
        found: Mapping[str, Any] = records.metric_records.get(METRICS, {})
        private = self.federation.settings.dp_clip is not None
        _same("metrics", found, {} if private else dict.fromkeys((LOSS, *part.extra.metrics)))
        for name, value in found.items():
            _must(_number(value), f"metric '{name}' is not a finite number")
        return {name: float(value) for name, value in found.items()}


@dataclass(frozen=True)
class MaskedInspector:
    """What can be looked at in a reply under masks: all but its values."""

    sizes: Sequence[int]  # words in each group of the vector
    hidden: bool  # whether the part is the device's own secret, and with it the time it took

    def read(self, records: RecordDict, order: Order, samples: int) -> tuple[Reply, list[Words]]:
        """The reply without its tensors, and the masked vector."""
        said = _said(records, order, samples)
        _must(not records.metric_records, "it says more than it was asked")
        _same("what it says", said, dict.fromkeys(MASKED_SAID if self.hidden else (*MASKED_SAID, *OPENLY)))
        part = order.task.offer[-1] if self.hidden else _part(said, order)
        seconds = 0.0 if self.hidden else _seconds(said)
        names = [str(group) for group in range(len(self.sizes))]
        _same("groups", records.array_records, {MASKED: None})
        arrays = records.array_records[MASKED]
        _same("tensors of masked", arrays, dict.fromkeys(names))
        most = sum(npy_bytes((size,), np.dtype(np.uint32).itemsize) for size in self.sizes)
        size = array_bytes(records)
        _must(size <= most, f"its tensors take {size} bytes, where {most} are enough")
        words = []
        for name, length in zip(names, self.sizes, strict=True):
            _fits(f"masked '{name}'", arrays[name], (length,), torch.uint32)
            found = _read_words(arrays[name])
            fits = found.shape == (length,) and found.dtype == np.uint32
            _must(fits, f"masked '{name}' is not what its header says")
            words.append(found)
        return Reply(order.device, order.round, part, samples, {}, seconds=seconds), words


MASKED_SAID = ("run", "round", "device", "samples")
OPENLY = ("part", "label", "seconds")
SCALARS = "scalars"


def _said(records: RecordDict, order: Order, samples: int) -> Mapping[str, Any]:
    """What a reply says of itself: it belongs to this order."""
    said = _config(records)
    for key, expected in (("run", order.run), ("round", order.round), ("device", order.device)):
        _must(said.get(key) == expected, f"it names {key} '{said.get(key)}', not '{expected}'")
    _must(said.get("samples") == samples, f"it trained on {said.get('samples')} samples, not {samples}")
    return said


def _seconds(said: Mapping[str, Any]) -> float:
    seconds: Any = said.get("seconds")
    _must(
        _number(seconds) and 0 <= seconds <= LONGEST,
        f"its training time '{seconds}' is not a number of seconds",
    )
    return float(seconds)


def _config(records: RecordDict) -> Mapping[str, Any]:
    _same("config records", records.config_records, {REPLY: None})
    found: Mapping[str, Any] = records.config_records[REPLY]
    return found


def _part(said: Mapping[str, Any], order: Order) -> Part:
    """The part it says it trained: one of those it was offered, under its own name."""
    place, offer = said.get("part"), order.task.offer
    _must(
        isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(offer),
        f"it trained part '{place}' of {len(offer)} on offer",
    )
    part = offer[int(str(place))]
    _must(said.get("label") == part.label, f"it trained '{said.get('label')}', not '{part.label}'")
    return part


def _fits(label: str, array: Array, shape: tuple[int, ...], kind: torch.dtype) -> None:
    dtype = str(kind).removeprefix("torch.")
    _must(tuple(array.shape) == shape, f"{label} has shape {tuple(array.shape)}, not {shape}")
    _must(array.dtype == dtype, f"{label} is of type {array.dtype}, not {dtype}")


def _read(group: str, arrays: Mapping[str, Array]) -> Tensors:
    with reading(group):
        return tensors(arrays)


def _read_words(array: Array) -> Words:
    with reading(MASKED):
        found: Words = array.numpy()
    _must(isinstance(found, np.ndarray), f"{MASKED} is not an array")
    return found


def _scalars(text: object) -> dict[str, Any]:
    _must(isinstance(text, str) and len(text) <= SCALARS_LENGTH, "its scalars are not a short text")
    try:
        found = json.loads(str(text))
    except ValueError as error:
        raise RefusedError("its scalars are not JSON") from error
    _must(isinstance(found, dict), "its scalars are not a table")
    for key, value in found.items():
        _must(isinstance(value, str | bool) or _number(value), f"scalar '{key}' is not a finite number")
    return dict(found)


def _norm(found: Tensors) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in found.values()))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _same(what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    wrong = [f"without {', '.join(missing)}"] if missing else []
    wrong += [f"with {', '.join(extra)[:200]}"] if extra else []
    _must(not wrong, f"{what} {' and '.join(wrong)}")


def _must(holds: object, reason: str) -> None:
    if not holds:
        raise RefusedError(reason)
