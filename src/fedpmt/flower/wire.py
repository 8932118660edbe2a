"""Tasks and replies as Flower's records: tensors by group, and a config record that describes them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedpmt.flower.parts import decode_parts, encode_parts
from fedpmt.training.messages import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from fedpmt.flower.secure.fixed_point import Words
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


def write_order(order: Order, structure: Structure) -> RecordDict:
    """Encode a task."""
    task = order.task
    text, lists = encode_parts(task.offer, structure)
    record: dict[str, Any] = {
        "run": order.run,
        "round": order.round,
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
        record["run"], record["round"], record["device"], task, record["deadline"], record["keeps-base"]
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
