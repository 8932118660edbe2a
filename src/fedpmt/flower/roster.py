"""Which node is which device, and what it says of itself: asked of each node that is new, or that has gone wrong.

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

from fedpmt.devices.fleet import SLOWEST, grouped
from fedpmt.flower.answers import RefusedError, no_answer, reading
from fedpmt.flower.wire import NODE
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from flwr.serverapp import Grid

    from fedpmt.devices.fleet import Fleet
    from fedpmt.flower.answers import Loss

ANSWER_SECONDS = 60.0
"""How long a new node has to say who it is; Flower itself takes six to nine seconds."""

AGAIN_SECONDS = 10 * ANSWER_SECONDS
"""When a node is asked again that could not say who it is."""

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


@dataclass(frozen=True)
class Inquiry:
    """When a node was asked who it is, and when it is asked next."""

    asked: float
    due: float = math.inf  # never, once it has answered
    silences: int = 0  # in a row

    def silent(self, now: float) -> Inquiry:
        """No answer: it is asked again at once, and then less and less often, for each time it holds up everybody."""
        pause = min(AGAIN_SECONDS, ANSWER_SECONDS * (2 ** min(self.silences, 10) - 1))
        return Inquiry(now, now + pause, self.silences + 1)


class Roster:
    """The nodes that are there, by device."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._nodes: dict[int, Node] = {}  # device -> the node that speaks for it
        self._inquiries: dict[int, Inquiry] = {}  # by node id
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

    def doubt(self, device: int) -> None:
        """It has failed, or was refused: its node may have been started anew, as another device or with other data."""
        node = self._nodes[device].id
        if node in self._inquiries:
            last = self._inquiries[node]
            self._inquiries[node] = replace(last, due=min(last.due, last.asked + ANSWER_SECONDS))

    def wait(self, grid: Grid, wanted: int, seconds: float, devices: Collection[int] = ()) -> None:
        """Until so many are there, and these among them; or until this much time has passed and somebody is."""
        end, told = time.monotonic() + seconds, -1
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
            if there != told:
                log(INFO, "waiting for devices: %s of %s are there", there, wanted)
                told = there
            time.sleep(POLL_SECONDS)

    def refresh(self, grid: Grid) -> None:
        """See who is there, and ask those that are new who they are."""
        self._online = frozenset(grid.get_node_ids())
        # Who has been away may have come back as somebody else.
        self._inquiries = {node: one for node, one in self._inquiries.items() if node in self._online}
        now = time.monotonic()
        settled = {node for node, one in self._inquiries.items() if one.due > now}
        new = sorted(self._online - settled)
        if not new:
            return
        question = ConfigRecord({"labels": self.limits.labels})
        messages = [
            Message(
                RecordDict({NODE: question}),
                dst_node_id=node,
                message_type=MessageType.QUERY,
                ttl=ANSWER_SECONDS,
            )
            for node in new
        ]
        replies = list(grid.send_and_receive(messages, timeout=ANSWER_SECONDS))
        answers = {reply.metadata.reply_to_message_id: reply for reply in replies}
        now = time.monotonic()
        for node, message in zip(new, messages, strict=True):
            loss = self._heard(node, answers.get(message.metadata.message_id))
            if loss is None:
                self._inquiries[node] = Inquiry(now)
                continue
            log(WARNING, "node %s has not said who it is: %s", node, loss[1])
            before = self._inquiries.get(node, Inquiry(now))
            self._inquiries[node] = (
                before.silent(now) if loss[0] == "late" else Inquiry(now, now + AGAIN_SECONDS)
            )

    def _heard(self, node: int, answer: Message | None) -> Loss | None:
        """Take over what a node says of itself, or say why not."""
        loss = no_answer(answer, ANSWER_SECONDS, node)
        if loss is not None:
            return loss
        assert answer is not None
        try:
            with reading("what it says of itself"):
                self._enter(described(node, answer.content.config_records[NODE], self.limits))
        except RefusedError as error:
            return "refused", str(error)
        return None

    def _enter(self, node: Node) -> None:
        before = self._nodes.get(node.device)
        if before is not None and before.id != node.id:
            log(WARNING, "device %s: node %s takes the place of node %s", node.device, node.id, before.id)
        # A node is one device: what it was before its restart it is no more.
        self._nodes = {device: other for device, other in self._nodes.items() if other.id != node.id}
        self._nodes[node.device] = node

    def fleet(self, fleet: Fleet, *, keep_levels: bool = False) -> Fleet:
        """The fleet with what nodes say of themselves, and with those that cannot be reached left out of draws.

        Levels are found anew by what nodes say of their speeds, unless each level has its depth: those are kept.
        """
        speeds = self._told(fleet.speeds, lambda node: node.speed)
        memories = self._told(
            np.full(len(fleet), math.inf) if fleet.memories is None else fleet.memories,
            lambda node: node.memory,
        )
        if speeds is not None and keep_levels:
            fleet = replace(fleet, speeds=speeds)
        elif speeds is not None:
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
        raise RefusedError(f"partition-id = {device} is not one of {limits.devices} devices")
    if not 1 <= samples <= limits.samples:
        raise RefusedError(f"it claims {samples} samples; 1 to {limits.samples} are allowed")
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
