"""Which node is which device, and what it says of itself: asked once of each node that is new.

Flower's node ids are random, so whoever wants the same run twice goes by the partition id of the node config.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log

from fedpmt.devices.fleet import grouped
from fedpmt.flower.wire import NODE
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.serverapp import Grid

    from fedpmt.devices.fleet import Fleet

ANSWER_SECONDS = 60.0
"""How long a new node has to say who it is; Flower itself takes six to nine seconds."""

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Node:
    """A node as it described itself."""

    id: int
    device: int  # its partition id
    samples: int  # |D_k|
    label_counts: np.ndarray | None = None
    speed: float | None = None  # κ_k, where its node config says so
    memory: float | None = None  # bytes


@dataclass(frozen=True)
class Limits:
    """What a node may say."""

    devices: int
    samples: int
    classes: int | None
    labels: bool  # whether it is asked how many samples of each class it holds


class Roster:
    """The nodes that are there, by device."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._nodes: dict[int, Node] = {}  # device -> the node that speaks for it
        self._asked: set[int] = set()  # node ids
        self._online: frozenset[int] = frozenset()

    def of(self, device: int) -> Node:
        """The node of a device."""
        return self._nodes[device]

    def knows(self, device: int) -> bool:
        """Whether a node has ever spoken for this device."""
        return device in self._nodes

    def online(self) -> list[int]:
        """The devices whose node can be reached, in order."""
        return sorted(device for device, node in self._nodes.items() if node.id in self._online)

    def wait(self, grid: Grid, wanted: int, seconds: float) -> None:
        """Until so many devices are there, or until this much time has passed and somebody is."""
        end, told = time.monotonic() + seconds, -1
        while True:
            self.refresh(grid)
            there = len(self.online())
            if there >= wanted:
                return
            if time.monotonic() >= end:
                if there:
                    log(WARNING, "%s of %s devices are there; they begin", there, wanted)
                    return
                raise SettingError(f"no device is there after {seconds:g} seconds (wait-seconds)")
            if there != told:
                log(INFO, "waiting for devices: %s of %s are there", there, wanted)
                told = there
            time.sleep(POLL_SECONDS)

    def refresh(self, grid: Grid) -> None:
        """See who is there, and ask those that are new who they are."""
        self._online = frozenset(grid.get_node_ids())
        self._asked &= self._online  # who has been away may have come back as somebody else
        new = sorted(self._online - self._asked)
        if not new:
            return
        question = ConfigRecord({"labels": self.limits.labels})
        messages = [
            Message(RecordDict({NODE: question}), dst_node_id=node, message_type=MessageType.QUERY)
            for node in new
        ]
        for reply in grid.send_and_receive(messages, timeout=ANSWER_SECONDS):
            node = reply.metadata.src_node_id
            self._asked.add(node)
            if reply.has_error():
                log(WARNING, "node %s did not say who it is: %s", node, reply.error.reason)
                continue
            try:
                self._enter(described(node, reply.content.config_records[NODE], self.limits))
            except (KeyError, TypeError, ValueError) as error:
                log(WARNING, "node %s is not taken: %s", node, error)

    def _enter(self, node: Node) -> None:
        before = self._nodes.get(node.device)
        if before is not None and before.id != node.id:
            log(WARNING, "device %s: node %s takes the place of node %s", node.device, node.id, before.id)
        self._nodes[node.device] = node

    def fleet(self, fleet: Fleet) -> Fleet:
        """The fleet with what nodes say of themselves, and with those that cannot be reached left out of draws."""
        speeds = self._told(fleet.speeds, lambda node: node.speed)
        memories = self._told(
            np.full(len(fleet), math.inf) if fleet.memories is None else fleet.memories,
            lambda node: node.memory,
        )
        if speeds is not None:
            others = {name: getattr(fleet, name) for name in ("uplinks", "downlinks", "names")}
            fleet = grouped(speeds, memories=fleet.memories, **others)
        if memories is not None:
            fleet = replace(fleet, memories=memories)
        there = np.isin(np.arange(len(fleet)), self.online())
        return replace(fleet, availabilities=None if there.all() else there.astype(float))

    def _told(self, values: np.ndarray, of: Callable[[Node], float | None]) -> np.ndarray | None:
        told = {device: of(node) for device, node in self._nodes.items() if of(node) is not None}
        if not told:
            return None
        values = values.copy()
        values[list(told)] = list(told.values())
        return values


def described(node: int, said: Mapping[str, Any], limits: Limits) -> Node:
    """A node from its own words; what cannot be is refused."""
    device, samples = _whole("partition-id", said["device"]), _whole("samples", said["samples"])
    if not 0 <= device < limits.devices:
        raise ValueError(f"partition-id = {device} is not one of {limits.devices} devices")
    if not 1 <= samples <= limits.samples:
        raise ValueError(f"it claims {samples} samples; 1 to {limits.samples} are allowed")
    counts = None
    if limits.labels and limits.classes is not None and "labels" in said:
        counts = np.array([_whole("labels", count) for count in said["labels"]], dtype=np.int64)
        if counts.shape != (limits.classes,) or (counts < 0).any() or counts.sum() != samples:
            raise ValueError(
                f"its samples per class are not {limits.classes} numbers that add up to {samples}"
            )
    speed, memory = (_positive(key, said[key]) if key in said else None for key in ("speed", "memory-bytes"))
    return Node(node, device, samples, counts, speed, memory)


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} = '{value}' is not a whole number")
    return value


def _positive(key: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value > 0)
    ):
        raise ValueError(f"{key} = '{value}' is not a positive number")
    return float(value)
