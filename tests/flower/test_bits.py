"""Same seed, same bits: the simulator's plain executor and Flower's apps, message by message."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from deployments import BITS, CARRIED, NOT_CARRIED, deploy
from flwr.app import Error, Message

from fake_cuda import pretended
from fedpmt import api
from fedpmt.api import paper_problem_of
from fedpmt.flower import apps
from fedpmt.flower.wire import array_bytes
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.models.layered import layered
from fedpmt.training.server import Momentum, Yogi, server_settings
from fedpmt.types import SettingError
from support import kinds_fast

if TYPE_CHECKING:
    from pathlib import Path

    from deployments import InProcessGrid

    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem

FRAMING = 3_000
"""Bytes of a message other than its tensors and their headers: names, shapes, the part, ids of objects."""
PER_TENSOR = 700
"""A NumPy header (128), and what Flower writes for an array and its chunks."""


def assert_same_bits(deployed: RunRecord, simulated: RunRecord) -> None:
    assert simulated.result is not None
    assert deployed.result is not None
    assert deployed.result.weights_sha256 == simulated.result.weights_sha256
    assert deployed.result.accuracy == simulated.result.accuracy


def assert_bytes(deployed: RunRecord, grid: InProcessGrid) -> None:
    """What travelled is what the records say, and Flower's framing."""
    trained = [one for one in grid.traffic if one.kind == "train"]
    travelled = {
        (one.question.config_records["task"]["round"], one.question.config_records["task"]["device"]): one
        for one in trained
    }
    assert len(travelled) == len(trained) == sum(len(step.devices) for step in deployed.rounds)
    for step in deployed.rounds:
        for record in step.devices:
            one = travelled[step.round - 1, record.device]
            for measured, accounted, more, records in (
                (one.down, record.bytes_down, step.overhead_bytes, one.question),
                (one.up, record.bytes_up, 0, one.reply),
            ):
                tensors = sum(len(group) for group in records.array_records.values())
                assert array_bytes(records) == accounted + 128 * tensors
                stated = accounted + more + FRAMING + PER_TENSOR * tensors
                assert accounted < measured <= 1.05 * stated, (measured, stated)


@pytest.mark.parametrize("method", kinds_fast(CARRIED))
def test_every_method_has_the_bits_of_the_simulator_and_its_bytes(method: str, tmp_path: Path) -> None:
    simulated = api.run(method, out=tmp_path / "simulated", **BITS)
    deployed, grid = deploy(tmp_path, {**BITS, "method": method})
    assert_same_bits(deployed, simulated)
    assert_bytes(deployed, grid)
    for ours, theirs in zip(deployed.rounds, simulated.rounds, strict=True):
        assert [one.part for one in ours.devices] == [one.part for one in theirs.devices]
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        assert all(one.outcome == "arrived" for one in ours.devices)


def test_steps_and_draws_have_the_bits_of_the_simulator(tmp_path: Path) -> None:
    """The server counts what it asked for, and what it could have: neither comes back with a reply."""
    given = {**BITS, "method": "fedpmt", "plan": "rotated", "options": {"every": 2, "normalise": "draws"}}
    simulated = api.run(out=tmp_path / "simulated", **given)
    deployed, _ = deploy(tmp_path, given)
    assert_same_bits(deployed, simulated)
    plain = api.run(out=tmp_path / "plain", **{**given, "options": {"every": 2}})
    assert plain.result is not None
    assert simulated.result is not None
    assert simulated.result.weights_sha256 != plain.result.weights_sha256


def test_unequal_devices_have_the_bits_of_the_simulator(tmp_path: Path) -> None:
    """The server plans by what nodes report, and weighs by it; what they keep for their own test is not trained on."""
    given = {**BITS, "method": "fedpmt", "partition": "iid", "amounts": "lognormal:1", "held_out": 0.2}
    simulated = api.run(out=tmp_path / "simulated", **given)
    deployed, _ = deploy(tmp_path, given)
    assert_same_bits(deployed, simulated)
    held = [
        [(one.samples, one.part) for step in run.rounds for one in step.devices]
        for run in (simulated, deployed)
    ]
    assert held[0] == held[1]
    assert len({samples for samples, _ in held[0]}) > 3


@pytest.mark.parametrize(
    "method",
    [FedPMT(server=Momentum(0.9, lr=0.3)), HeteroFL(server=Yogi(lr=0.02, beta1=0.8, beta2=0.9, tau=0.01))],
    ids=["fedpmt-momentum", "heterofl-yogi"],
)
def test_a_server_optimizer_has_the_bits_of_the_simulator(method: Any, tmp_path: Path) -> None:
    """It travels in the run config as the settings that make it."""
    simulated = api.run(method, out=tmp_path / "simulated", **BITS)
    named = {"method": type(method).__name__.lower(), **server_settings(method.server)}
    deployed, _ = deploy(tmp_path / "deployed", {**BITS, **named})
    assert_same_bits(deployed, simulated)
    plain = api.run(named["method"], out=tmp_path / "plain", **BITS)
    assert plain.result is not None
    assert simulated.result is not None
    assert simulated.result.weights_sha256 != plain.result.weights_sha256


@pytest.mark.parametrize(
    "given",
    [
        {"method": "fedavg", "optimizer": "adam", "lr": 0.002, "schedule": "cosine", "warmup": 1},
        {"method": "fedpmt", "optimizer": "adamw", "lr": 0.002, "weight_decay": 0.1, "clip_norm": 0.5},
        {"method": "fedpmt", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "lr": 0.02},
        {"method": "fedpmt", "precision": "bf16", "frozen_precision": "int8", "epochs": 2},
        {"method": "fedpmt", "prefix_tolerance": 0.05, "epochs": 2},
        {"method": "fedpmt", "plan": "traded", "server_optimizer": "momentum", "server_lr": 0.3},
        {"method": "fedpmt", "plan": "rotated", "options": {"every": 2}},
    ],
    ids=["adam", "adamw", "nesterov", "precision", "tolerance", "traded", "rotated"],
)
def test_what_devices_train_with_reaches_the_nodes(given: dict[str, Any], tmp_path: Path) -> None:
    simulated = api.run(out=tmp_path / "simulated", **{**BITS, "rounds": 3, **given})
    deployed, _ = deploy(tmp_path / "deployed", {**BITS, "rounds": 3, **given})
    assert_same_bits(deployed, simulated)
    assert [one.operations for one in deployed.rounds] == [one.operations for one in simulated.rounds]


@pytest.mark.parametrize("method", ["fedpmt", "scaffold"])
def test_a_model_of_sixteen_bits_has_the_bits_of_the_simulator_and_its_bytes(
    method: str, tmp_path: Path
) -> None:
    def problem(settings: Settings) -> Problem:
        found = paper_problem_of(settings)
        return replace(found, model=layered(found.model.module.to(torch.bfloat16)))

    given = {**BITS, "method": method, "rounds": 3}
    settings = api.settings_of(given)
    request = api.Request(settings, api.method_of(settings), lambda: problem(settings))
    simulated = api.start(request, tmp_path / "simulated")
    deployed, grid = deploy(tmp_path / "deployed", given, apps=apps(problem))
    assert_same_bits(deployed, simulated)
    assert_bytes(deployed, grid)


def test_server_adam_has_the_same_bits_where_devices_fail(tmp_path: Path) -> None:
    """The same devices fail as in the simulator: entries that nobody trained keep their moments."""
    given = {**BITS, "method": "fedpmt", "server_optimizer": "adam", "server_lr": 0.02}
    simulated = api.run(out=tmp_path / "simulated", failure=0.4, **given)
    failed = {
        (step.round - 1, one.device)
        for step in simulated.rounds
        for one in step.devices
        if one.outcome == "failed"
    }
    uncovered = [set(step.layers.values()) for step in simulated.rounds]
    assert any(0 in counts and counts != {0} for counts in uncovered)

    def failing(question: Message, answer: Message) -> Message:
        if question.metadata.message_type != "train":
            return answer
        task = question.content.config_records["task"]
        gone = (task["round"], task["device"]) in failed
        return Message(Error(2, "battery is empty"), reply_to=question) if gone else answer

    deployed, _ = deploy(tmp_path / "deployed", given, failing)
    assert_same_bits(deployed, simulated)
    assert [step.layers for step in deployed.rounds] == [step.layers for step in simulated.rounds]


def test_a_server_optimizer_is_refused_where_there_is_no_server_step(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match=r"^server-optimizer = 'adam' cannot be combined with prunefl[^\n]*$"
    ):
        deploy(tmp_path, {**BITS, "method": "prunefl", "server_optimizer": "adam"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", NOT_CARRIED)
def test_nets_that_stay_on_devices_are_refused_in_one_line(method: str, tmp_path: Path) -> None:
    reason = f"^method = '{method}' is refused on Flower: its devices keep nets of their own[^\n]*$"
    with pytest.raises(SettingError, match=reason):
        deploy(tmp_path, {**BITS, "method": method})
    assert not (tmp_path / "run").exists()


def test_public_samples_that_the_server_does_not_have_are_refused(tmp_path: Path) -> None:
    def problem(settings: Settings) -> Problem:
        found = paper_problem_of(settings)
        found.data.public = None
        return found

    with pytest.raises(SettingError, match="'feddf' is refused: the server's data has no public samples"):
        deploy(tmp_path, {**BITS, "method": "feddf"}, apps=apps(problem))


@pytest.mark.parametrize("method", ["fedpmt", "scaffold"])
def test_tensors_that_arrive_are_put_on_the_device(method: str, tmp_path: Path) -> None:
    """On a pretended accelerator, see `fake_cuda`; SCAFFOLD's devices keep tensors between rounds."""
    given = {**BITS, "method": method, "rounds": 2}
    simulated = api.run(out=tmp_path / "simulated", **given)
    with pretended():
        deployed, _ = deploy(tmp_path, {**given, "device": "cuda"})
    assert_same_bits(deployed, simulated)
