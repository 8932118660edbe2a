"""The short one of the tests with real processes: a SuperLink, two SuperNodes, two rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from real_processes import digest, finished, left_of, simulated, written

from fedpmt.flower.loopback import Loopback, node_configs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.flower

RUN = {"method": "scaffold", "devices": 2, "samples": 20, "cohort": 2, "batch": 10, "rounds": 2, "lr": 0.1}
RUN |= {"levels": "1/2,1", "executor": "plain", "eval_every": 2}
RUN |= {"momentum": 0.5, "server_optimizer": "momentum", "server_lr": 0.3}


def test_a_deployment_has_the_bits_of_the_simulator_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(2, tmp_path / "nodes"):
            federation.start_node(config)
        assert len(left_of(federation.port)) >= 3
        deployed = finished(federation, federation.submit(written(tmp_path, RUN)), tmp_path)
    assert digest(deployed) == simulated(tmp_path, RUN)
    assert [one.outcome for step in deployed.rounds for one in step.devices] == ["arrived"] * 4
    assert all(one.seconds > 0 for step in deployed.rounds for one in step.devices)
    # What a device keeps is in its node's own folder: the accepted state and the one of the last round.
    for device in (0, 1):
        kept = sorted(path.name for path in (tmp_path / "nodes" / f"node-{device}").rglob("*.safetensors"))
        assert kept == [f"{device}-0.safetensors", f"{device}-1.safetensors"]
    assert left_of(federation.port) == []
