"""Same seed, same bits: the simulator's plain executor and Flower's apps, message by message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from in_process import deploy

from fedpmt import api
from fedpmt.methods.registry import METHODS

if TYPE_CHECKING:
    from pathlib import Path

RUN: dict[str, Any] = {
    "devices": 4,
    "samples": 20,
    "cohort": 3,
    "batch": 10,
    "rounds": 5,
    "lr": 0.1,
    "levels": "1/4,1/3,1/2,1",
    "executor": "plain",
    "eval_every": 5,
    "partition": "classes:3",
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_bits_of_the_simulator(method: str, tmp_path: Path) -> None:
    simulated = api.run(method, out=tmp_path / "simulated", **RUN)
    deployed, _ = deploy(tmp_path, {**RUN, "method": method})
    assert simulated.result is not None
    assert deployed.result is not None
    assert deployed.result.weights_sha256 == simulated.result.weights_sha256
    assert deployed.result.accuracy == simulated.result.accuracy
    for ours, theirs in zip(deployed.rounds, simulated.rounds, strict=True):
        assert [one.part for one in ours.devices] == [one.part for one in theirs.devices]
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        assert all(one.outcome == "arrived" for one in ours.devices)
