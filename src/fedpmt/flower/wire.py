"""Tasks and replies as Flower's records: tensors by group, and one config record that says what they are."""

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

    from fedpmt.flower.fixed_point import Words
    from fedpmt.models.structure import Structure
    from fedpmt.training.messages import Reply
    from fedpmt.types import Payload, Tensors

TASK, REPLY, METRICS, NODE = "task", "reply", "metrics", "node"
MASKED = "masked"
NONE = -1
"""Stands for "not said" where a record needs a whole number."""


@dataclass(frozen=True)
class Order:
    """A task for one device, and what it belongs to."""

    run: str
    round: int
    device: int
    task: Task
    deadline: float  # what depths are fitted to; a device that chooses its own needs it


def write_order(order: Order, structure: Structure) -> RecordDict:
    """What the server sends."""
    task = order.task
    text, lists = encode_parts(task.offer, structure)
    said: dict[str, Any] = {
        "run": order.run,
        "round": order.round,
        "device": order.device,
        "deadline": order.deadline,
        "offer": text,
        "lists": lists,
        "scalars": json.dumps(dict(task.scalars)),
        "steps": NONE if task.steps is None else task.steps,
        "epochs": NONE if task.epochs is None else task.epochs,
        "accepted": NONE if task.accepted_round is None else task.accepted_round,
    }
    return RecordDict({TASK: ConfigRecord(said), **_arrays(task.tensors)})


def read_order(records: RecordDict, structure: Structure) -> Order:
    """What a node was sent."""
    said: Mapping[str, Any] = records.config_records[TASK]

    def number(key: str) -> int | None:
        return None if said[key] == NONE else int(said[key])

    task = Task(
        decode_parts(said["offer"], said["lists"], structure),
        {group: tensors(arrays) for group, arrays in records.array_records.items()},
        json.loads(said["scalars"]),
        number("steps"),
        number("accepted"),
        number("epochs"),
    )
    return Order(said["run"], said["round"], said["device"], task, said["deadline"])


def write_reply(order: Order, reply: Reply) -> RecordDict:
    """What a node sends: the tensors that were trained, with the depth, the round and the run they belong to."""
    said = _reply_said(order, reply)
    metrics: dict[str, Any] = {name: float(value) for name, value in reply.metrics.items()}
    return RecordDict({REPLY: ConfigRecord(said), METRICS: MetricRecord(metrics), **_arrays(reply.tensors)})


def _reply_said(order: Order, reply: Reply) -> dict[str, Any]:
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


def write_masked(order: Order, reply: Reply, groups: Sequence[Words], *, hidden: bool) -> RecordDict:
    """What a node sends to a secure sum: a masked vector, and what it belongs to; its own choice stays its own."""
    said = _reply_said(order, reply)
    for key in ("scalars", *(("part", "label", "seconds") if hidden else ())):
        del said[key]
    arrays = {str(group): Array(words) for group, words in enumerate(groups)}
    return RecordDict({REPLY: ConfigRecord(said), MASKED: ArrayRecord(arrays)})


def tensors(arrays: Mapping[str, Array]) -> Tensors:
    """The tensors of one group; they own their memory."""
    return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}


def array_bytes(records: RecordDict) -> int:
    """The bytes of all arrays as they are serialised."""
    return sum(len(array.data) for group in records.array_records.values() for array in group.values())


def npy_bytes(shape: tuple[int, ...], item: int) -> int:
    """How long a serialised array may be: its numbers and a header."""
    return item * math.prod(shape) + HEADER


HEADER = 256
"""NumPy's header is 128 bytes for any shape a layer has."""


def _arrays(payload: Payload) -> dict[str, ArrayRecord]:
    return {
        group: ArrayRecord(
            {name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in named.items()}
        )
        for group, named in payload.items()
    }
