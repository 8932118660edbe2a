"""Kills, late nodes and bad ones, as real processes: the weights are those of the replies that counted."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import bad_replies
import pytest
from deployments import (
    HERE,
    deploy,
    digest,
    finished,
    left_of,
    processes,
    rounds_done,
    simulated,
    until,
    written,
)

from fedpmt.flower import replay
from fedpmt.flower.loopback import Loopback, node_configs

if TYPE_CHECKING:
    from pathlib import Path

    from flwr.app import Message

    from fedpmt.records import RunRecord

pytestmark = pytest.mark.flower

RUN: dict[str, Any] = {
    "method": "scaffold",
    "devices": 3,
    "samples": 20,
    "cohort": 3,
    "batch": 10,
    "rounds": 3,
}
RUN |= {"levels": "1/3,1/2,1", "executor": "plain", "lr": 0.1, "server_optimizer": "adam", "server_lr": 0.02}


def replayed(folder: Path, given: dict[str, Any], run: RunRecord) -> str:
    """The weights of a run in which exactly the replies are lost that did not count in this one."""
    counted = {
        (step.round - 1, one.device)
        for step in run.rounds
        for one in step.devices
        if one.outcome == "arrived"
    }

    def lost(question: Message, answer: Message) -> Message | None:
        if question.metadata.message_type != "train":
            return answer
        task = question.content.config_records["task"]
        return answer if (task["round"], task["device"]) in counted else None

    return digest(deploy(folder / "replayed", given, lost)[0])


def test_a_supernode_killed_in_a_round(tmp_path: Path) -> None:
    given = {**RUN, "deadline": 75.0}
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(3, tmp_path / "nodes"):
            federation.start_node(config)
        run = federation.submit(written(tmp_path, given))
        until(lambda: rounds_done(tmp_path) >= 1)
        federation.nodes[2].kill()
        deployed = finished(federation, run, tmp_path)
    outcomes = {(step.round, one.device): one.outcome for step in deployed.rounds for one in step.devices}
    assert all(outcomes[number, device] == "arrived" for number in (1, 2, 3) for device in (0, 1))
    assert outcomes[2, 2] in ("late", "failed")
    assert digest(deployed) == replayed(tmp_path, given, deployed)


def test_a_superlink_killed_and_started_again_with_its_database(tmp_path: Path) -> None:
    with Loopback(tmp_path / "processes", database=True) as federation:
        for config in node_configs(3, tmp_path / "nodes"):
            federation.start_node(config)
        app = written(tmp_path, RUN)
        federation.submit(app)
        until(lambda: rounds_done(tmp_path) >= 1)
        assert federation.link is not None
        federation.link.kill()
        federation.start_link()
        run = federation.submit(app, {"resume": True})
        deployed = finished(federation, run, tmp_path)
    assert digest(deployed) == simulated(tmp_path, RUN)
    assert [step.round for step in deployed.rounds] == [1, 2, 3]


def test_a_serverapp_killed_and_resumed(tmp_path: Path) -> None:
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(3, tmp_path / "nodes"):
            federation.start_node(config)
        app = written(tmp_path, RUN)
        federation.submit(app)
        until(lambda: rounds_done(tmp_path) >= 1)
        ours = processes(f"flwr-serverapp --runtime-api-address 127.0.0.1:{federation.port}")
        assert len(ours) == 1
        for one in ours:
            os.kill(one, signal.SIGKILL)
        run = federation.submit(app, {"resume": True})
        deployed = finished(federation, run, tmp_path)
    assert digest(deployed) == simulated(tmp_path, RUN)
    assert [step.round for step in deployed.rounds] == [1, 2, 3]


def test_a_server_that_waits_for_nobody_survives_the_kill_of_a_node_and_its_own(tmp_path: Path) -> None:
    """Device 2 takes twenty seconds longer than the others; device 1 is killed after the ServerApp was."""
    given = {**RUN, "method": "fedpmt", "clock": "events", "buffer": 2, "rounds": 8, "eval_every": 4}
    app = written(tmp_path, given)
    shutil.copy(HERE / "troubled_app.py", app / "fedpmt_app.py")
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(3, tmp_path / "nodes", speeds=[1.0, 1 / 2, 1 / 3]):
            federation.start_node({**config, "slow-seconds": 20 if config["partition-id"] == 2 else 0})
        federation.submit(app)
        until(lambda: rounds_done(tmp_path) >= 2)
        (server,) = processes(f"flwr-serverapp --runtime-api-address 127.0.0.1:{federation.port}")
        os.kill(server, signal.SIGKILL)
        run = federation.submit(app, {"resume": True})
        before = rounds_done(tmp_path)
        until(lambda: rounds_done(tmp_path) >= before + 2)
        federation.nodes[1].kill()
        deployed = finished(federation, run, tmp_path)
    arrived = [one for step in deployed.rounds for one in step.devices if one.outcome == "arrived"]
    lost = [one for step in deployed.rounds for one in step.devices if one.outcome != "arrived"]
    assert len(arrived) == 16
    assert all((one.device, one.outcome) == (1, "failed") for one in lost)
    assert len(lost) <= 1  # Flower may find it gone only after the last step
    # Nobody waited for the slow device, and what it sent was folded nevertheless.
    counts = [sum(one.device == device for one in arrived) for device in range(3)]
    assert counts[0] > counts[2] > 0
    assert max(one.staleness or 0 for one in arrived if one.device == 2) >= 1
    assert {(one.device, one.part) for one in arrived} == {(0, "depth 4"), (1, "depth 2"), (2, "depth 1")}
    assert all(one.device != 1 for one in deployed.rounds[-1].devices if one.outcome == "arrived")
    assert digest(deployed) == digest(replay(tmp_path / "run", tmp_path / "replayed"))
    assert left_of(federation.port) == []


def test_nodes_that_are_late_or_send_what_they_should_not(tmp_path: Path) -> None:
    """Three of four nodes send every bad reply there is, one after another."""
    given = {**bad_replies.RUN, "rounds": bad_replies.ROUNDS, "eval_every": bad_replies.ROUNDS}
    app = written(tmp_path, given)
    shutil.copy(HERE / "troubled_app.py", app / "fedpmt_app.py")
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(4, tmp_path / "nodes"):
            federation.start_node({**config, "bad": config["partition-id"] != bad_replies.GOOD})
        deployed = finished(federation, federation.submit(app), tmp_path, seconds=900)
    for step in deployed.rounds:
        assert [one.outcome for one in step.devices] == ["arrived", "refused", "refused", "refused"]
        for one in step.devices[1:]:
            assert bad_replies.kind(one.device, step.round - 1)[1] in one.reason
    assert digest(deployed) == replayed(tmp_path, given, deployed)


def test_a_node_that_answers_after_the_deadline(tmp_path: Path) -> None:
    given = {**RUN, "rounds": 2, "deadline": 60.0}
    app = written(tmp_path, given)
    shutil.copy(HERE / "troubled_app.py", app / "fedpmt_app.py")
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(3, tmp_path / "nodes"):
            federation.start_node({**config, "slow-seconds": 70 if config["partition-id"] == 1 else 0})
        deployed = finished(federation, federation.submit(app), tmp_path)
    for step in deployed.rounds:
        assert [one.outcome for one in step.devices] == ["arrived", "late", "arrived"]
        assert step.devices[1].reason == "no reply within 60 seconds"
        assert step.round_seconds >= 60
    assert digest(deployed) == replayed(tmp_path, given, deployed)
