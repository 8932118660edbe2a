"""Secure aggregation with real processes: four nodes of depths 4, 4, 2, 2, one of which dies in a round."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from flwr.app import Error, Message
from in_process import deploy
from real_processes import HERE, digest, finished, until, written
from secagg_run import NARROW, PARTS, RUN, assert_close, model_of

from fedpmt.flower.loopback import Loopback, node_configs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.flower

LOST = NARROW[0]


def test_four_nodes_and_then_a_narrow_one_dies_while_it_trains(tmp_path: Path) -> None:
    """It has dealt its secrets and never sends its vector: the others take its masks out of the sum."""
    given = {**RUN, "rounds": 2}
    app, stuck = written(tmp_path, given, secagg=True, wait_seconds=600.0), tmp_path / "stuck"
    shutil.copy(HERE / "troubled_app.py", app / "fedpmt_app.py")
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(4, tmp_path / "nodes"):
            troubled = {"stuck-file": str(stuck)} if config["partition-id"] == LOST else {}
            federation.start_node({**config, **troubled})
        run = federation.submit(app)
        until(stuck.exists, seconds=900)
        federation.nodes[LOST].kill()
        deployed = finished(federation, run, tmp_path, seconds=900)

    def lost(question: Message, answer: Message) -> Message:
        if question.metadata.message_type != "train":
            return answer
        task = question.content.config_records["task"]
        gone = (task["round"], task["device"]) == (1, LOST)
        return Message(Error(2, "gone"), reply_to=question) if gone else answer

    first, second = deployed.rounds
    assert [one.part for one in first.devices] == PARTS
    assert [one.outcome for one in first.devices] == ["arrived"] * 4
    assert [one.outcome for one in second.devices] == ["arrived", "failed", "arrived", "arrived"]
    assert list(first.layers.values()) == [2, 2, 4, 4, 4]
    assert list(second.layers.values()) == [2, 2, 3, 3, 3]
    replayed, _ = deploy(tmp_path / "replayed", given, lost, secagg=True)
    assert digest(deployed) == digest(replayed)
    deploy(tmp_path / "plain", given, lost)
    assert_close(model_of(tmp_path), model_of(tmp_path / "plain"), rounds=2)
