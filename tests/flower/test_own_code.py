"""A user's own code, deployed: a model with a frozen base that nodes make themselves, and methods from outside."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from in_process import BITS, deploy
from torch import nn

from fedpmt import api
from fedpmt.flower import apps, node_problem
from fedpmt.flower.wire import array_bytes
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem


GIVEN: dict[str, Any] = {
    "method": "fedpmt",
    "devices": 2,
    "samples": 20,
    "cohort": 2,
    "batch": 10,
    "rounds": 3,
    "lr": 0.1,
    "levels": "1/2,1",
    "depths": 2,
    "executor": "plain",
}
HEAD = 4 * (8 * 8 + 8 + 8 * 2 + 2)  # bytes of what is trained


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 2


def net(seed: int = 0) -> nn.Module:
    """A frozen layer with its norm, and two layers that are trained."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    module[:2].requires_grad_(False)
    return module


def problems(*seeds: int) -> Callable[[Settings], Problem]:
    """Make the problem with the base of the next seed: the server's first, then the nodes'."""
    left = list(seeds)

    def make(settings: Settings) -> Problem:
        inputs, targets = samples()
        module = net(left.pop(0) if len(left) > 1 else left[0])
        return node_problem(
            settings,
            module,
            test=(inputs, targets),
            shard=lambda device: (inputs[device::2], targets[device::2]),
        )

    return make


def test_only_what_is_trained_travels(tmp_path: Path) -> None:
    run, grid = deploy(tmp_path, GIVEN, apps=apps(problems(0)))
    assert all(one.outcome == "arrived" for step in run.rounds for one in step.devices)
    for exchange in grid.traffic:
        if exchange.kind == "train":
            assert array_bytes(exchange.question) == HEAD + 128 * 4  # four tensors, with NumPy's header
    assert [step.bytes_down for step in run.rounds] == [2 * HEAD] * 3
    # In the simulator the base is downloaded, once; all else is the same.
    settings = api.settings_of(GIVEN)
    request = api.Request(settings, api.method_of(settings), lambda: problems(0)(settings))
    simulated = api.start(request, tmp_path / "simulated")
    base = 4 * (4 * 8 + 8 + 4 * 8)
    assert [step.bytes_down for step in simulated.rounds] == [2 * (HEAD + base), 2 * HEAD, 2 * HEAD]
    assert run.result is not None
    assert simulated.result is not None
    assert run.result.weights_sha256 == simulated.result.weights_sha256


def test_a_node_with_another_base_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="flwr"),
        pytest.raises(SettingError, match="no device is there"),
    ):
        deploy(tmp_path, GIVEN, apps=apps(problems(0, 1)))
    assert "its frozen weights are not the server's" in caplog.text


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
