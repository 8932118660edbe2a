"""The node's side: the simulator's local work on this node's data, with what it keeps in a folder of its own."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.common.logger import log

from fedpmt.api import method_of
from fedpmt.flower.deployment import read_config
from fedpmt.flower.wire import NODE, read_order, write_masked, write_reply
from fedpmt.records import write_atomically
from fedpmt.simulation.assemble import assembled
from fedpmt.simulation.assignment import choose
from fedpmt.simulation.checkpoint import DeviceStore
from fedpmt.training.privacy import NOISE
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.app import Context, RecordDict

    from fedpmt.devices.fleet import Device
    from fedpmt.flower.wire import Order
    from fedpmt.settings import Settings
    from fedpmt.simulation.loop import Federation
    from fedpmt.simulation.problem import Problem
    from fedpmt.training.local import Rng
    from fedpmt.training.messages import Reply

MIB = 2**20


class Worker:
    """One node. Problems are kept between messages, for in a simulation one process serves many of them."""

    def __init__(self, problem: Callable[[Settings], Problem]) -> None:
        self._make = problem
        self._problems: dict[str, Problem] = {}

    def describe(self, records: RecordDict, context: Context) -> dict[str, Any]:
        """Who this node is; how many samples of each class it holds only where it is asked."""
        settings, deployment = read_config(context.run_config)
        data, device = self._problem(node_settings(settings, context.node_config)).data, partition(context)
        said: dict[str, Any] = {"device": device, "samples": data.samples(device)}
        counts = data.label_counts(device) if records.config_records[NODE]["labels"] else None
        if counts is not None:
            said["labels"] = [int(count) for count in counts]
        if deployment.secagg and settings.splitting == "device":
            return said  # what its choice follows from is as secret as the choice
        if "speed" in context.node_config:
            said["speed"] = float(context.node_config["speed"])
        if "memory-mib" in context.node_config:
            said["memory-bytes"] = float(context.node_config["memory-mib"]) * MIB
        return said

    def train(self, records: RecordDict, context: Context) -> RecordDict:
        """One local round."""
        settings, deployment = read_config(context.run_config)
        settings = node_settings(settings, context.node_config)
        problem, method = self._problem(settings), method_of(settings)
        order = read_order(records, problem.model.structure)
        if order.device != partition(context):
            raise SettingError(f"this node is device {partition(context)}, not {order.device}")
        # Depths are fitted to the server's deadline: a node that is told its depth has nothing to price.
        settings = settings.model_copy(update={"deadline": order.deadline})
        with assembled(settings, problem, method, Path()) as simulator:
            federation = simulator
            if simulator.keeps_state or settings.dp_clip is not None:
                folder = folder_of(order.run, context, deployment.state_dir)
                federation = replace(simulator, store=DeviceStore(folder))
                if settings.dp_clip is not None:
                    spend(folder, settings.rounds)
            reply = local_round(federation, order, context.node_config)
            if not deployment.secagg:
                return write_reply(order, reply)
            return masked_reply(records, context, order, reply, federation, deployment.secagg_range)

    def _problem(self, settings: Settings) -> Problem:
        key = settings.model_dump_json()
        if key not in self._problems:
            self._problems[key] = self._make(settings)
        return self._problems[key]


def local_round(federation: Federation, order: Order, node_config: Mapping[str, Any]) -> Reply:
    """Choose a part, train it, keep what is to be kept: provisional until a later task names this round."""
    samples = federation.problem.data.samples(order.device)
    device = own_device(federation, order.device, node_config)
    part = choose(federation, device, order.task, samples)
    if federation.keeps_state:
        federation.store.confirm(order.device, order.task.accepted_round, before=order.round)
    unit = federation.unit(order.device, order.task, part, samples, order.round)
    if federation.settings.dp_clip is not None:
        unit = replace(unit, rng=partial(secret, unit.rng))
    begun = time.perf_counter()
    ((reply, own),) = federation.executor.train(federation.method.local, [unit])
    seconds = time.perf_counter() - begun
    if federation.keeps_state:
        federation.store.write(order.device, order.round, own)
    return replace(reply, seconds=seconds)


def masked_reply(
    records: RecordDict, context: Context, order: Order, reply: Reply, federation: Federation, reach: float
) -> RecordDict:
    """The reply under masks, for a sum; nothing else of it leaves this node."""
    from fedpmt.flower.fixed_point import Scale
    from fedpmt.flower.layer_vector import encode, weight_of
    from fedpmt.flower.secure_node import SECURE, put_masks_on

    structure = federation.problem.model.structure
    said: Mapping[str, Any] = records.config_records.get(SECURE, {})
    if not said:
        raise SettingError("secure aggregation is refused by this node: the task does not belong to a sum")
    changes = reply.update  # Δ_k
    for name, change in changes.items():
        if not bool(change.isfinite().all()):
            raise SettingError(f"secure aggregation is refused by this node: '{name}' is no longer finite")
        cut = int((change.abs() > reach).sum())
        if cut:
            log(WARNING, "%s entries of '%s' have changed by more than secagg-range = %g", cut, name, reach)
    weight = weight_of(federation.method, reply.samples)
    scale = Scale(reach, int(said["devices"]), float(said["unit"]))
    if not 0 < weight <= scale.unit or scale.devices < 2:
        raise SettingError("secure aggregation is refused by this node: its weight does not fit into the sum")
    groups = put_masks_on(records, context, encode(structure, reply.part, changes, weight, scale))
    return write_masked(order, reply, groups, hidden=federation.settings.splitting == "device")


def secret(rng: Rng, purpose: str) -> np.random.Generator:
    """The server knows every seeded generator: noise that hides something from it must come from this machine."""
    return np.random.default_rng() if purpose == NOISE else rng(purpose)


def spend(folder: Path, allowed: int) -> None:
    """Count a reply before it is made, also one that is asked for again; a device sends no more than it promised."""
    path = folder / "releases.json"
    spent = int(json.loads(path.read_bytes())["releases"]) if path.exists() else 0
    if spent >= allowed:
        raise SettingError(f"this device has sent the {allowed} replies that its privacy was promised for")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"releases": spent + 1}).encode())


def own_device(federation: Federation, index: int, node_config: Mapping[str, Any]) -> Device:
    """What this node knows of itself: its node config, else its place in the fleet of the settings."""
    device = federation.fleet.device(index)
    if "speed" in node_config:
        device = replace(device, speed=float(node_config["speed"]))
    if "memory-mib" in node_config:
        device = replace(device, memory=float(node_config["memory-mib"]) * MIB)
    return device


def node_settings(settings: Settings, node_config: Mapping[str, Any]) -> Settings:
    """The run's settings as they hold on a node: files of the server's machine are not there."""
    changes: dict[str, Any] = {"workers": 1}
    if settings.fleet is not None:
        changes |= {"fleet": None, "levels": "1", "assign": "deadline"}
    if "data-dir" in node_config:
        changes["data_dir"] = Path(str(node_config["data-dir"]))
    return settings.model_copy(update=changes)


def partition(context: Context) -> int:
    """Which device of the fleet this node is."""
    if "partition-id" not in context.node_config:
        raise SettingError("the node config has no partition-id, which says which device this is")
    return int(context.node_config["partition-id"])


def folder_of(run: str, context: Context, fallback: str) -> Path:
    """Where this node keeps what a run gives it to keep; below a shared folder each node has one of its own."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,200}", run):  # it comes from the network
        raise SettingError(f"run = '{run[:100]}' is not a run's name")
    own = str(context.node_config.get("state-dir", ""))
    if not own and not fallback:
        raise SettingError("this run keeps state on devices: name a folder with state-dir in the node config")
    return (Path(own) if own else Path(fallback) / f"node-{partition(context)}") / run
