"""Which node is which device, and what it says of itself. Nodes are asked when they are new or have gone wrong.

Flower's node ids are random. A run can only be repeated if devices go by the partition id of the node config.
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

from fedpmt.devices.fleet import SLOWEST, grouped
from fedpmt.flower.answers import Post, RefusedError, ask, read_answers
from fedpmt.flower.deployment import Stated
from fedpmt.flower.wire import NODE
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from flwr.serverapp import Grid

    from fedpmt.devices.fleet import Fleet
    from fedpmt.flower.answers import Missing

ANSWER_SECONDS = 60.0
"""How long a node has to say who it is; Flower itself takes six to nine seconds."""

AGAIN_SECONDS = 10 * ANSWER_SECONDS
"""After this time a node that could not say who it is is asked again."""

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
    """What is accepted of a node's description of itself."""

    devices: int
    samples: int
    classes: int | None
    labels: bool  # whether it is asked how many samples of each class it holds
    base: str | None = None  # the digest of the model's frozen weights, which nodes make themselves


@dataclass(frozen=True)
class Inquiry:
    """When a node was asked who it is, and when it is asked next."""

    asked: float
    due: float = math.inf  # never, once it has answered
    silences: int = 0  # in a row

    def postpone(self, now: float) -> Inquiry:
        """Ask a silent node again at once, and then less and less often: each time, everybody waits for it."""
        pause = min(AGAIN_SECONDS, ANSWER_SECONDS * (2 ** min(self.silences, 10) - 1))
        return Inquiry(now, now + pause, self.silences + 1)


class Roster:
    """The nodes of a run, by device."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._nodes: dict[int, Node] = {}  # device -> the node that speaks for it
        self._inquiries: dict[int, Inquiry] = {}  # by node id
        self._online: frozenset[int] = frozenset()
        self._post: Post[int] = Post()

    def of(self, device: int) -> Node:
        """The node of a device."""
        return self._nodes[device]

    def knows(self, device: int) -> bool:
        """Whether a node has ever described itself as this device."""
        return device in self._nodes

    def online(self) -> list[int]:
        """The devices whose node can be reached, in order."""
        return sorted(device for device, node in self._nodes.items() if node.id in self._online)

    def doubt(self, device: int) -> None:
        """Ask a device's node anew, since it has failed or was refused: it may have been restarted with other data."""
        node = self._nodes[device].id if device in self._nodes else None
        if node is not None and node in self._inquiries:
            last = self._inquiries[node]
            self._inquiries[node] = replace(last, due=min(last.due, last.asked + ANSWER_SECONDS))

    def wait(self, grid: Grid, wanted: int, seconds: float, devices: Collection[int] = ()) -> None:
        """Wait until enough devices are online, and these among them.

        Args:
            grid: Where the nodes are.
            wanted: How many devices are enough.
            seconds: How long to wait; then those that are online begin without the others.
            devices: Devices that must be among them.

        Raises:
            SettingError: No device is online after that time.
        """
        end, shown = time.monotonic() + seconds, -1
        while True:
            self.refresh(grid)
            online = self.online()
            there = len(online)
            if there >= wanted and set(devices) <= set(online):
                return
            if time.monotonic() >= end:
                if there:
                    log(WARNING, "%s of %s devices are there; they begin", there, wanted)
                    return
                raise SettingError(f"no device is there after {seconds:g} seconds (wait-seconds)")
            if there != shown:
                log(INFO, "waiting for devices: %s of %s are there", there, wanted)
                shown = there
            time.sleep(POLL_SECONDS)

    def refresh(self, grid: Grid) -> None:
        """Find out which nodes are online, and ask new ones who they are."""
        questions = dict.fromkeys(self._find_unknown(grid), self._question)
        self._take(*ask(grid, MessageType.QUERY, questions, ANSWER_SECONDS, self._read))

    def poll(self, grid: Grid) -> None:
        """Do the same without waiting: what nodes say of themselves is read when this is called again."""
        for node in self._find_unknown(grid):
            if node not in self._post.subjects:
                message = Message(self._question, node, MessageType.QUERY, ttl=ANSWER_SECONDS)
                self._post.send(grid, node, message, ANSWER_SECONDS)
        self._take(*read_answers(self._post.collect(grid), self._read))

    @property
    def _question(self) -> RecordDict:
        return RecordDict({NODE: ConfigRecord({"labels": self.limits.labels})})

    def _find_unknown(self, grid: Grid) -> list[int]:
        """Find out which nodes are online, and which of them are to be asked who they are."""
        self._online = frozenset(grid.get_node_ids())
        # A node that was away may have come back as another device.
        self._inquiries = {node: one for node, one in self._inquiries.items() if node in self._online}
        now = time.monotonic()
        settled = {node for node, one in self._inquiries.items() if one.due > now}
        return sorted(self._online - settled)

    def _take(self, found: Mapping[int, Node], missing: Mapping[int, Missing]) -> None:
        """Remember what nodes have said, and when those are asked again that have not."""
        now = time.monotonic()
        for node, said in found.items():
            self._enter(said)
            self._inquiries[node] = Inquiry(now)
        for node, (outcome, reason) in missing.items():
            log(WARNING, "node %s has not said who it is: %s", node, reason)
            if outcome == "late":
                self._inquiries[node] = self._inquiries.get(node, Inquiry(now)).postpone(now)
            else:
                self._inquiries[node] = Inquiry(now, now + AGAIN_SECONDS)

    def _read(self, node: int, content: RecordDict) -> Node:
        return parse_node(node, content.config_records[NODE], self.limits)

    def _enter(self, node: Node) -> None:
        before = self._nodes.get(node.device)
        if before is not None and before.id != node.id:
            log(WARNING, "device %s: node %s takes the place of node %s", node.device, node.id, before.id)
        # A node is one device: after a restart it may be another one than before.
        self._nodes = {device: other for device, other in self._nodes.items() if other.id != node.id}
        self._nodes[node.device] = node

    def fleet(self, fleet: Fleet, *, keep_levels: bool = False) -> Fleet:
        """Put what nodes say of themselves into a fleet; devices that are not online are never drawn.

        Levels are found anew from the speeds that nodes state; with `keep_levels` they stay, since each has its depth.
        """
        fleet = override(fleet, self.stated(), keep_levels=keep_levels)
        there = np.isin(np.arange(len(fleet)), self.online())
        return replace(fleet, availabilities=None if there.all() else there.astype(float))

    def stated(self) -> dict[int, Stated]:
        """What each device states of itself."""
        return {device: Stated(speed=one.speed, memory=one.memory) for device, one in self._nodes.items()}


def override(fleet: Fleet, stated: Mapping[int, Stated], *, keep_levels: bool = False) -> Fleet:
    """Put what devices state of themselves into a fleet; see `Roster.fleet`."""
    speeds = {device: one.speed for device, one in stated.items() if one.speed is not None}
    memories = {device: one.memory for device, one in stated.items() if one.memory is not None}
    if speeds and keep_levels:
        fleet = replace(fleet, speeds=_put(speeds, fleet.speeds))
    elif speeds:
        others = {
            name: getattr(fleet, name) for name in ("memories", "uplinks", "downlinks", "names", "watts")
        }
        fleet = grouped(_put(speeds, fleet.speeds), **others)
    if memories:
        before = np.full(len(fleet), math.inf) if fleet.memories is None else fleet.memories
        fleet = replace(fleet, memories=_put(memories, before))
    return fleet


def _put(stated: Mapping[int, float], values: np.ndarray) -> np.ndarray:
    """The values with these in their places."""
    values = values.copy()
    values[list(stated)] = list(stated.values())
    return values


def parse_node(node: int, said: Mapping[str, Any], limits: Limits) -> Node:
    """Read how a node describes itself. Raises `RefusedError` where that cannot be right."""
    device, samples = _whole("partition-id", said["device"]), _whole("samples", said["samples"])
    if not 0 <= device < limits.devices:
        raise RefusedError(f"partition-id = {device} is not one of {limits.devices} devices")
    if not 1 <= samples <= limits.samples:
        raise RefusedError(f"it claims {samples} samples; 1 to {limits.samples} are allowed")
    if said.get("base") != limits.base:
        raise RefusedError(
            "its frozen weights are not the server's: the app must make the same ones on every node"
        )
    counts = None
    if limits.labels and limits.classes is not None and "labels" in said:
        counts = np.array([_whole("labels", count) for count in said["labels"]], dtype=np.int64)
        if counts.shape != (limits.classes,) or (counts < 0).any() or counts.sum() != samples:
            raise RefusedError(
                f"its samples per class are not {limits.classes} numbers that add up to {samples}"
            )
    speed, memory = (_positive(key, said[key]) if key in said else None for key in ("speed", "memory-bytes"))
    if speed is not None and not SLOWEST <= speed <= 1 / SLOWEST:
        raise RefusedError(f"speed = '{speed}' is too far from 1 for a clock")
    return Node(node, device, samples, counts, speed, memory)


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedError(f"{key} = '{value}' is not a whole number")
    return value


def _positive(key: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value > 0)
    ):
        raise RefusedError(f"{key} = '{value}' is not a positive number")
    return float(value)
