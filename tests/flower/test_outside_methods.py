"""Methods that live outside of the package, on Flower: nodes find them by what the run's settings say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from in_process import BITS, deploy

from fedpmt import api

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "methods"))


@pytest.mark.parametrize("method", ["blocks:Blocks", "fednova:FedNova"])
def test_the_bits_are_those_of_the_simulator(method: str, tmp_path: Path) -> None:
    settings = {**BITS, "method": method, "rounds": 3}
    deployed, _ = deploy(tmp_path / "deployed", settings)
    simulated = api.run(out=tmp_path / "simulated", **settings)
    assert deployed.result is not None
    assert simulated.result is not None
    assert deployed.result.weights_sha256 == simulated.result.weights_sha256
    outcomes = {device.outcome for step in deployed.rounds for device in step.devices}
    assert outcomes == {"arrived"}
