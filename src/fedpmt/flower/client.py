"""The node's side: the simulator's local work on this node's data; what the device keeps is in its own folder."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.api import method_of
from fedpmt.flower.deployment import read_config
from fedpmt.flower.secure.node import mask_reply
from fedpmt.flower.wire import NODE, read_order, write_reply
from fedpmt.models.trees import tensors_in, weights_sha256
from fedpmt.records import write_atomically
from fedpmt.simulation.assemble import assemble
from fedpmt.simulation.checkpoint import DeviceStore, read_value, write_value
from fedpmt.simulation.cohort import choose
from fedpmt.training.batches import compute_device
from fedpmt.training.kept import BASE, KeptOutputs
from fedpmt.training.privacy import NOISE
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from flwr.app import Context, RecordDict

    from fedpmt.devices.fleet import Device
    from fedpmt.flower.wire import Order
    from fedpmt.settings import Settings
    from fedpmt.simulation.loop import Federation
    from fedpmt.simulation.problem import Problem
    from fedpmt.training.local import Rng
    from fedpmt.training.messages import Reply
    from fedpmt.types import Arrays, Examples


MIB = 2**20


class Worker:
    """Answers for one node. Problems are kept between messages: in a simulation one process serves many nodes."""

    def __init__(self, problem: Callable[[Settings], Problem]) -> None:
        self._make = problem
        self._problems: dict[str, Problem] = {}

    def describe(self, records: RecordDict, context: Context) -> dict[str, Any]:
        """Say which device this node is and what it holds; samples of each class only where that is asked."""
        settings, deployment = read_config(context.run_config)
        problem, device = self._problem(node_settings(settings, context.node_config)), device_id(context)
        data, base = problem.data, base_digest(problem)
        found: dict[str, Any] = {"device": device, "samples": data.samples(device)}
        if base is not None:
            found["base"] = base
        counts = data.label_counts(device) if records.config_records[NODE]["labels"] else None
        if counts is not None:
            found["labels"] = [int(count) for count in counts]
        if deployment.secagg and settings.splitting == "device":
            return found  # what its choice of a part follows from is as secret as the choice
        if "speed" in context.node_config:
            found["speed"] = float(context.node_config["speed"])
        if "memory-mib" in context.node_config:
            found["memory-bytes"] = float(context.node_config["memory-mib"]) * MIB
        return found

    def train(self, records: RecordDict, context: Context) -> RecordDict:
        """Do one local round."""
        settings, deployment = read_config(context.run_config)
        settings = node_settings(settings, context.node_config)
        problem, method = self._problem(settings), method_of(settings)
        compute = compute_device(settings.device)
        order = read_order(records, problem.model.structure, compute)
        if order.device != device_id(context):
            raise SettingError(f"this node is device {device_id(context)}, not {order.device}")
        # A node that chooses its own depth fits it to the server's deadline.
        settings = settings.model_copy(update={"deadline": order.deadline})
        with assemble(settings, problem, method, Path()) as simulator:
            federation = simulator
            if simulator.keeps_state or settings.dp_clip is not None:
                folder = state_folder(order.run, context, deployment.state_dir)
                federation = replace(simulator, store=DeviceStore(folder, compute))
                if settings.dp_clip is not None:
                    spend(folder, settings.rounds)
            keeps = order.keeps_base or settings.prefix_tolerance is not None
            if keeps and (deployment.state_dir or "state-dir" in context.node_config):
                folder = state_folder(order.run, context, deployment.state_dir)
                federation = keep_outputs(federation, order, folder)
            reply = local_round(federation, order, context.node_config)
            if not deployment.secagg:
                return write_reply(order, reply)
            return mask_reply(records, context, order, reply, federation, deployment.secagg_range)

    def _problem(self, settings: Settings) -> Problem:
        key = settings.model_dump_json()
        if key not in self._problems:
            self._problems[key] = self._make(settings)
        return self._problems[key]


def base_digest(problem: Problem) -> str | None:
    """One number for all bits of the model's frozen weights, which don't travel; None where it has none."""
    base = problem.model.base()
    return weights_sha256(base) if base else None


def local_round(federation: Federation, order: Order, node_config: Mapping[str, Any]) -> Reply:
    """Choose a part and train it. What the device keeps is provisional until a later task names this round."""
    samples = federation.problem.data.samples(order.device)
    device = own_device(federation, order.device, node_config)
    offer = order.task.offer
    part = offer[0] if len(offer) == 1 else choose(federation, device, order.task, samples)
    if federation.keeps_state:
        federation.store.confirm(order.device, order.task.accepted_round, before=order.round)
    unit = federation.unit(order.device, order.task, part, samples, order.round, order.turn)
    unit = replace(unit, settings=replace(unit.settings, keeps_base=order.keeps_base))
    if federation.settings.dp_clip is not None:
        unit = replace(unit, rng=partial(secret_noise, unit.rng))
    begun = time.perf_counter()
    ((reply, own),) = federation.executor.train(federation.method.local, [unit])
    seconds = time.perf_counter() - begun
    if federation.keeps_state:
        federation.store.write(order.device, order.round, own)
    return replace(reply, seconds=seconds)


def keep_outputs(federation: Federation, order: Order, folder: Path) -> Federation:
    """Let this node find what its base, or its frozen layers, made of its samples in an earlier round, in a folder."""
    samples, settings = federation.data.shard(order.device), federation.settings
    digest = outputs_digest(federation.problem, samples, settings.frozen_precision)
    kept = StoredOutputs(folder, digest, compute_device(settings.device))
    executor: Any = federation.executor  # with one worker it is a plain one
    return replace(federation, executor=replace(executor, kept=kept))


def secret_noise(rng: Rng, purpose: str) -> np.random.Generator:
    """The seeded generators, which the server knows too, except for noise that must hide something from it."""
    return np.random.default_rng() if purpose == NOISE else rng(purpose)


def spend(folder: Path, allowed: int) -> None:
    """Count a reply before it is made, a repeated one too; a device sends no more than its privacy allows."""
    path = folder / "releases.json"
    spent = int(json.loads(path.read_bytes())["releases"]) if path.exists() else 0
    if spent >= allowed:
        raise SettingError(f"this device has sent the {allowed} replies that its privacy was promised for")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"releases": spent + 1}).encode())


def own_device(federation: Federation, index: int, node_config: Mapping[str, Any]) -> Device:
    """This device as its node config describes it, else as the fleet of the settings does."""
    device = federation.fleet.device(index)
    if "speed" in node_config:
        device = replace(device, speed=float(node_config["speed"]))
    if "memory-mib" in node_config:
        device = replace(device, memory=float(node_config["memory-mib"]) * MIB)
    return device


def node_settings(settings: Settings, node_config: Mapping[str, Any]) -> Settings:
    """The run's settings on a node, where files of the server's machine do not exist."""
    changes: dict[str, Any] = {"workers": 1}
    if settings.fleet is not None:
        changes |= {"fleet": None, "levels": "1", "assign": "deadline"}
    if "data-dir" in node_config:
        changes["data_dir"] = Path(str(node_config["data-dir"]))
    return settings.model_copy(update=changes)


def device_id(context: Context) -> int:
    """Which device of the fleet this node is."""
    if "partition-id" not in context.node_config:
        raise SettingError("the node config has no partition-id, which says which device this is")
    return int(context.node_config["partition-id"])


def state_folder(run: str, context: Context, fallback: str) -> Path:
    """The folder in which this node keeps state of a run; inside a shared folder each node has its own."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,200}", run):  # it comes from the network
        raise SettingError(f"run = '{run[:100]}' is not a run's name")
    own = str(context.node_config.get("state-dir", ""))
    if not own and not fallback:
        raise SettingError("this run keeps state on devices: name a folder with state-dir in the node config")
    return (Path(own) if own else Path(fallback) / f"node-{device_id(context)}") / run


class StoredOutputs(KeptOutputs):
    """Outputs of one node in its folder; made anew where its samples, its base or the precision are others."""

    def __init__(self, folder: Path, digest: str, device: torch.device) -> None:
        super().__init__(limit=0)
        self._folder, self._digest, self._device = folder, digest, device

    def get(self, device: int, compute: Callable[[], Arrays], digest: str = "", kind: str = BASE) -> Arrays:
        """What the file holds, or else is computed now and written to it."""
        path, made_of = self._folder / f"{kind}-outputs.safetensors", self._digest + digest
        try:
            found, outputs = read_value(path, self._device)
        except SettingError:
            found, outputs = "", None  # not there yet, or damaged
        if found != made_of:
            outputs = compute()
            self._folder.mkdir(parents=True, exist_ok=True)
            write_value(path, (made_of, outputs))
        return outputs


def outputs_digest(problem: Problem, samples: Examples, precision: str) -> str:
    """One number for all that the outputs are made of."""
    inputs = {f"input {place}": one for place, one in enumerate(tensors_in(samples.inputs))}
    return f"{precision} {weights_sha256({**problem.model.base(), **inputs})}"
