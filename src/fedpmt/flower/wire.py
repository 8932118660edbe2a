"""Tasks and replies as Flower's records: tensors by group, and a config record that describes them.

A Part is encoded compactly: both sides know the model, so selections are a list of codes in the order of its tensors, 0
for absent, 1 for whole, a list with the number of a list of positions for each axis (-1 for the whole axis), or the
number of a mask. Lists of positions travel once, as bounds where they are a range, else as one bit per position. Of
other nets than the global one whole tensors travel, by their names.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedpmt.parts.part import GLOBAL, WHOLE, Indices, Mask, Part, Selection, Whole
from fedpmt.training.messages import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fedpmt.flower.secure.layer_vector import Words
    from fedpmt.models.structure import Structure
    from fedpmt.training.messages import Reply
    from fedpmt.types import Payload, Tensors


TASK, REPLY, METRICS, NODE = "task", "reply", "metrics", "node"
MASKED = "masked"
NONE = -1
"""Stands for None in a record, which holds whole numbers only."""


@dataclass(frozen=True)
class Order:
    """A task for one device, and the run and round that it belongs to."""

    run: str
    round: int
    device: int
    task: Task
    deadline: float  # what depths are fitted to; a device that chooses its own needs it
    keeps_base: bool = False  # whether what a frozen base makes of the samples is kept over rounds
    turn: int = 0  # which draw of the round's devices it was in


def write_order(order: Order, structure: Structure) -> RecordDict:
    """Encode a task."""
    task = order.task
    text, lists = encode_parts(task.offer, structure)
    record: dict[str, Any] = {
        "run": order.run,
        "round": order.round,
        "turn": order.turn,
        "device": order.device,
        "deadline": order.deadline,
        "keeps-base": order.keeps_base,
        "offer": text,
        "lists": lists,
        "scalars": json.dumps(dict(task.scalars)),
        "steps": NONE if task.steps is None else task.steps,
        "epochs": NONE if task.epochs is None else task.epochs,
        "accepted": NONE if task.accepted_round is None else task.accepted_round,
    }
    return RecordDict({TASK: ConfigRecord(record), **_encode(task.tensors)})


def read_order(records: RecordDict, structure: Structure, device: torch.device) -> Order:
    """Decode a task, its tensors on a device."""
    record: Mapping[str, Any] = records.config_records[TASK]

    def number(key: str) -> int | None:
        return None if record[key] == NONE else int(record[key])

    task = Task(
        decode_parts(record["offer"], record["lists"], structure),
        {group: tensors(arrays, device) for group, arrays in records.array_records.items()},
        json.loads(record["scalars"]),
        number("steps"),
        number("accepted"),
        number("epochs"),
    )
    return Order(
        record["run"],
        record["round"],
        record["device"],
        task,
        record["deadline"],
        record["keeps-base"],
        record["turn"],
    )


def write_reply(order: Order, reply: Reply) -> RecordDict:
    """Encode a reply: the update and other tensors, and the part, the round and the run that they belong to."""
    metrics: dict[str, Any] = {name: float(value) for name, value in reply.metrics.items()}
    record = ConfigRecord(_claims(order, reply))
    return RecordDict({REPLY: record, METRICS: MetricRecord(metrics), **_encode(reply.tensors)})


def write_masked(order: Order, reply: Reply, groups: Sequence[Words], *, hidden: bool) -> RecordDict:
    """Encode a reply to a secure sum: a masked vector; with `hidden` neither the part nor the time travels."""
    claims = _claims(order, reply)
    for key in ("scalars", *(("part", "label", "seconds") if hidden else ())):
        del claims[key]
    arrays = {str(group): Array(words) for group, words in enumerate(groups)}
    return RecordDict({REPLY: ConfigRecord(claims), MASKED: ArrayRecord(arrays)})


def _claims(order: Order, reply: Reply) -> dict[str, Any]:
    """What a reply says of itself."""
    return {
        "run": order.run,
        "round": order.round,
        "device": order.device,
        "part": next(place for place, part in enumerate(order.task.offer) if part is reply.part),
        "label": reply.part.label,
        "samples": reply.samples,
        "seconds": reply.seconds,
        "scalars": json.dumps(dict(reply.scalars)),
    }


def tensors(arrays: Mapping[str, Array], device: torch.device) -> Tensors:
    """Decode the tensors of one group; they own their memory."""
    return {name: _decoded(torch.from_numpy(array.numpy())).to(device) for name, array in arrays.items()}


def wire_type(kind: torch.dtype) -> torch.dtype:
    """The type in which numbers travel: NumPy has no bfloat16, and nothing else travels as int16."""
    return torch.int16 if kind == torch.bfloat16 else kind


def _encoded(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.view(wire_type(tensor.dtype)).numpy()
    return found


def _decoded(tensor: Tensor) -> Tensor:
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def array_bytes(records: RecordDict) -> int:
    """The bytes of all arrays as they are serialised."""
    return sum(len(array.data) for group in records.array_records.values() for array in group.values())


def npy_bytes(shape: tuple[int, ...], item: int) -> int:
    """How long a serialised array may be: its numbers and a header."""
    return item * math.prod(shape) + HEADER


HEADER = 256
"""NumPy's header is 128 bytes for any shape a layer has."""


def _encode(payload: Payload) -> dict[str, ArrayRecord]:
    return {
        group: ArrayRecord(
            {name: Array(_encoded(tensor.detach().cpu().contiguous())) for name, tensor in named.items()}
        )
        for group, named in payload.items()
    }


ABSENT, ALL, KEPT = 0, 1, -1


def encode_parts(parts: Sequence[Part], structure: Structure) -> tuple[str, list[bytes]]:
    """Encode the parts on offer as text, and the lists of positions that it refers to."""
    lists: dict[bytes, int] = {}

    def number(data: bytes) -> int:
        return lists.setdefault(data, len(lists))

    def code(name: str, selections: Mapping[str, Selection]) -> Any:
        selection, shape = selections.get(name), structure.shapes[name]
        if selection is None:
            return ABSENT
        if isinstance(selection, Whole):
            return ALL
        if isinstance(selection, Mask):
            return {"mask": number(_pack(selection.bits.reshape(-1)))}
        pairs = zip(selection.axes, shape, strict=True)
        return [KEPT if kept is None else number(_positions(kept, full)) for kept, full in pairs]

    def codes(selections: Mapping[str, Selection], model: str) -> Any:
        if model != GLOBAL:
            return {"whole": list(selections)}
        found = [code(name, selections) for name in structure.tensors]
        return found[0] if found and all(one == found[0] for one in found) and found[0] in (0, 1) else found

    def plain(part: Part) -> dict[str, Any]:
        return {
            "model": part.model,
            "label": part.label,
            "overhead": part.overhead_bytes,
            "sent": codes(part.sent, part.model),
            "trained": codes(part.trained, part.model),
            "reported": codes(part.reported, part.model),
            "inner": [plain(inner) for inner in part.inner],
        }

    text = json.dumps([plain(part) for part in parts], separators=(",", ":"))
    return text, list(lists)


def decode_parts(text: str, lists: Sequence[bytes], structure: Structure) -> tuple[Part, ...]:
    """Decode what `encode_parts` returned; equal selections of a tensor become one object, as they were."""
    axes: dict[tuple[int, int], np.ndarray] = {}
    seen: dict[str, Selection] = {}

    def axis(place: int, full: int) -> np.ndarray | None:
        if place == KEPT:
            return None
        if (place, full) not in axes:
            axes[place, full] = _read_positions(lists[place], full)
        return axes[place, full]

    def selection(found: Any, name: str) -> Selection:
        shape = structure.shapes[name]
        if found == ALL:
            return WHOLE
        key = f"{name} {found}"
        if key not in seen:
            if isinstance(found, dict):
                bits = np.unpackbits(np.frombuffer(lists[found["mask"]], np.uint8), count=int(np.prod(shape)))
                seen[key] = Mask(bits.astype(bool).reshape(shape))
            else:
                seen[key] = Indices(
                    tuple(axis(place, full) for place, full in zip(found, shape, strict=True))
                )
        return seen[key]

    def selections(found: Any) -> dict[str, Selection]:
        if isinstance(found, dict):
            return dict.fromkeys(found["whole"], WHOLE)
        each = found if isinstance(found, list) else [found] * len(structure.tensors)
        pairs = zip(structure.tensors, each, strict=True)
        return {name: selection(code, name) for name, code in pairs if code != ABSENT}

    def part(found: Mapping[str, Any]) -> Part:
        return Part(
            found["model"],
            selections(found["sent"]),
            selections(found["trained"]),
            found["label"],
            found["overhead"],
            tuple(part(inner) for inner in found["inner"]),
            selections(found["reported"]),
        )

    return tuple(part(found) for found in json.loads(text))


RANGE, BITS = b"r", b"b"


def _positions(kept: np.ndarray, full: int) -> bytes:
    """Encode positions along an axis, which must rise.

    >>> len(_positions(np.arange(3, 700), 1000)), len(_positions(np.array([0, 2, 5]), 1000))
    (9, 126)
    """
    if len(kept) and np.array_equal(kept, np.arange(kept[0], kept[0] + len(kept))):
        return RANGE + np.array([kept[0], kept[0] + len(kept)], "<u4").tobytes()
    bits = np.zeros(full, dtype=bool)
    bits[kept] = True
    if not np.array_equal(np.flatnonzero(bits), kept):
        raise ValueError("positions along an axis must rise")
    return BITS + _pack(bits)


def _read_positions(data: bytes, full: int) -> np.ndarray:
    if data[:1] == RANGE:
        first, last = np.frombuffer(data[1:], "<u4")
        return np.arange(int(first), int(last))
    return np.flatnonzero(np.unpackbits(np.frombuffer(data[1:], np.uint8), count=full))


def _pack(bits: np.ndarray) -> bytes:
    return np.packbits(bits).tobytes()
