"""Every bad reply, as a node really sends it: three of four nodes are bad, each round in another way."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.app import Message

GOOD, NODES = 0, 4
RUN: dict[str, Any] = {
    "method": "fedpmt",
    "devices": NODES,
    "samples": 20,
    "cohort": NODES,
    "batch": 10,
    "lr": 0.1,
    "levels": "1/4x3,1",
    "executor": "plain",
}


LIARS = (2, 5)


def lie(factor: float) -> Callable[[Message, Message], Message]:
    """Two of ten nodes send their update times this factor, which is shorter than the limit."""

    def tamper(question: Message, answer: Message) -> Message:
        trains = question.metadata.message_type == "train"
        if trains and question.content.config_records["task"]["device"] in LIARS:
            arrays = answer.content.array_records["update"]
            for name, array in list(arrays.items()):
                arrays[name] = Array(np.float32(factor) * array.numpy())
        return answer

    return tamper


def said(**changes: Any) -> Callable[[RecordDict], None]:
    def change(records: RecordDict) -> None:
        records["reply"] = ConfigRecord({**records.config_records["reply"], **changes})

    return change


def last(records: RecordDict) -> tuple[ArrayRecord, str]:
    arrays = records.array_records["update"]
    return arrays, list(arrays)[-1]


def values(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordDict], None]:
    def apply(records: RecordDict) -> None:
        arrays, name = last(records)
        arrays[name] = Array(change(arrays[name].numpy()))

    return apply


def data(change: Callable[[bytes], bytes]) -> Callable[[RecordDict], None]:
    """Other bytes behind a header that is right."""

    def apply(records: RecordDict) -> None:
        arrays, name = last(records)
        true = arrays[name]
        arrays[name] = Array(true.dtype, true.shape, true.stype, change(true.data))

    return apply


EMPTY_ZIP = b"PK\x05\x06" + bytes(18)
"""What NumPy reads as a file of arrays, and no array."""


def endless(true: bytes) -> bytes:
    """A header of more numbers than there are."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30},)}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def filled(value: float) -> Callable[[RecordDict], None]:
    return values(lambda array: np.full_like(array, value))


def renamed(records: RecordDict) -> None:
    arrays, name = last(records)
    arrays["other"] = arrays.pop(name)


def missing(records: RecordDict) -> None:
    arrays, name = last(records)
    del arrays[name]


def more_layers(records: RecordDict) -> None:
    records.array_records["update"]["extra"] = Array(np.zeros((2, 2), np.float32))


def more_groups(records: RecordDict) -> None:
    records["control"] = ArrayRecord({"x": Array(np.zeros(3, np.float32))})


def weights(records: RecordDict) -> None:
    """As nodes replied before replies carried differences."""
    records["model"] = records.array_records.pop("update")


def metrics(found: Mapping[str, float]) -> Callable[[RecordDict], None]:
    def apply(records: RecordDict) -> None:
        records["metrics"] = MetricRecord(dict(found))

    return apply


def more_metrics(records: RecordDict) -> None:
    records["diary"] = MetricRecord({"day": 1})


def nothing(records: RecordDict) -> None:
    for key in list(records):
        del records[key]


KINDS: list[tuple[Callable[[RecordDict], None], str]] = [
    (said(run="other"), "it names run 'other'"),
    (said(round=-3), "it names round '-3'"),
    (said(device=0), "it names device '0'"),
    (said(part=3), "it trained part '3' of 1 on offer"),
    (said(part=-1), "it trained part '-1'"),
    (said(part="0"), "it trained part '0'"),
    (said(label="depth 9"), "it trained 'depth 9'"),
    (said(samples=10**9), "it trained on 1000000000 samples, not 20"),
    (said(samples=0), "it trained on 0 samples"),
    (said(seconds=math.nan), "its training time 'nan'"),
    (said(seconds=-1.0), "its training time '-1.0'"),
    (said(scalars="[1]"), "its scalars are not a table"),
    (said(scalars="{"), "its scalars are not JSON"),
    (said(scalars=json.dumps({"a": math.inf})), "scalar 'a' is not a finite number"),
    (said(scalars=" " * 10**5), "its scalars are not a short text"),
    (renamed, "with other"),
    (missing, "tensors of update without"),
    (more_layers, "with extra"),
    (more_groups, "groups with control"),
    (weights, "groups without update and with model"),
    (values(lambda array: array[:-1]), "has shape (9,), not (10,)"),
    (values(lambda array: array.astype(np.float64)), "is of type float64, not float32"),
    (filled(math.nan), "holds values that are not finite"),
    (filled(-math.inf), "holds values that are not finite"),
    (filled(1e6), "above the limit"),
    (data(lambda true: Array(np.zeros(3, np.float64)).data), "is not what its header says"),
    (data(lambda true: true + bytes(10_000)), "bytes, where"),
    (data(lambda true: b"\x80\x04garbage"), "update cannot be read"),
    (data(lambda true: b"PK\x03\x04junk"), "update cannot be read: BadZipFile"),
    (data(lambda true: EMPTY_ZIP), "update cannot be read"),
    (data(endless), "update cannot be read"),
    (said(scalars=f'{{"a": 1{"0" * 400}}}'), "it cannot be read: OverflowError"),
    (said(scalars="[" * 9999), "it cannot be read: RecursionError"),
    (said(seconds=1.79e308), "its training time '1.79e+308'"),
    (said(label="x" * 10**6), "it trained 'xxxx"),
    (said(label="\x1b[2Jall is well"), r"it trained '\x1b[2Jall is well'"),
    (said(diary="much"), "what it says with diary"),
    (more_metrics, "metric records with diary"),
    (metrics({}), "metrics without train_loss"),
    (metrics({"train_loss": math.nan}), "metric 'train_loss' is not a finite number"),
    (nothing, "config records without reply"),
]
ROUNDS = -(-len(KINDS) // (NODES - 1))


def kind(device: int, round_index: int) -> tuple[Callable[[RecordDict], None], str]:
    """What a bad node does in a round."""
    return KINDS[(round_index * (NODES - 1) + device - 1) % len(KINDS)]


def spoil(question: RecordDict, answer: RecordDict) -> None:
    """Change what a bad node answers to its task."""
    task: Mapping[str, Any] = question.config_records["task"]
    if task["device"] != GOOD:
        kind(task["device"], task["round"])[0](answer)
