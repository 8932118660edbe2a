"""A user's own code, deployed: a model with a frozen base that nodes make themselves, and methods from outside."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from in_process import BITS, InProcessGrid, deploy, nodes_of, start
from torch import nn

from fedpmt import api
from fedpmt.flower import apps, node_problem
from fedpmt.flower.client import StoredOutputs
from fedpmt.flower.deployment import Deployment, write_config
from fedpmt.flower.wire import array_bytes
from fedpmt.models.lora import lora
from fedpmt.records import read_run
from fedpmt.training import loop
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.precision import Prefix
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


def adapted(seed: int = 0) -> nn.Module:
    """A base that is most of the model, with adapters in two of its layers."""
    torch.manual_seed(seed)
    wide = nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 8), nn.ReLU()
    hidden = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()
    return lora(nn.Sequential(*wide, *hidden, nn.Linear(8, 2)), rank=2, targets=["4", "6"])


def tuning(settings: Settings) -> Problem:
    inputs, targets = samples()
    return node_problem(
        settings,
        adapted(),
        test=(inputs, targets),
        shard=lambda device: (inputs[device::2], targets[device::2]),
    )


ADAPTER, CLASSIFIER = 4 * 2 * 2 * 8, 4 * (8 * 2 + 2)  # bytes
WHOLE = 2 * ADAPTER + CLASSIFIER
MODEL = 4 * (4 * 200 + 200 + 200 * 8 + 8 + 2 * (8 * 8 + 8)) + WHOLE


@pytest.mark.parametrize(
    ("method", "options", "down", "up"),
    [
        ("fedpmt", {}, [WHOLE, WHOLE], [CLASSIFIER + ADAPTER, WHOLE]),
        ("fedra", {"blocks": 1}, [CLASSIFIER + ADAPTER] * 2, [CLASSIFIER + ADAPTER] * 2),
        ("flexlora", {"rate": 0.5}, [CLASSIFIER + ADAPTER] * 2, [CLASSIFIER + ADAPTER] * 2),
    ],
)
def test_fine_tuning_sends_what_is_trained_and_has_the_bits_of_the_simulator(
    method: str, options: dict[str, Any], down: list[int], up: list[int], tmp_path: Path
) -> None:
    given = {**GIVEN, "method": method, "options": options, "levels": "1/2,1"}
    run, grid = deploy(tmp_path, given, apps=apps(tuning))
    settings = api.settings_of(given)
    simulated = api.start(
        api.Request(settings, api.method_of(settings), lambda: tuning(settings)), tmp_path / "simulated"
    )
    assert run.result is not None
    assert simulated.result is not None
    assert run.result.weights_sha256 == simulated.result.weights_sha256
    trained = [one for one in grid.traffic if one.kind == "train"]
    assert len(trained) == 6
    for exchange in trained:
        for records, sent in ((exchange.question, down), (exchange.reply, up)):
            arrays = sum(len(group) for group in records.array_records.values())
            assert array_bytes(records) - 128 * arrays in sent
        # Whole messages, with everything that Flower adds, are smaller than the model's weights.
        assert max(exchange.down, exchange.up) < MODEL
    # After the first round the simulator counts the same; before it each device downloads the base, once.
    assert [step.bytes_down for step in run.rounds] == [sum(down)] * 3
    base = MODEL - WHOLE
    assert [step.bytes_down for step in simulated.rounds] == [sum(down) + 2 * base, sum(down), sum(down)]


def test_a_node_keeps_what_its_base_made_of_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    keep = loop.keep

    def counted(prefix: Prefix, inputs: Any, count: int) -> Any:
        ran.append(prefix.cut)
        return keep(prefix, inputs, count)

    monkeypatch.setattr(loop, "keep", counted)
    run, _ = deploy(tmp_path, GIVEN, apps=apps(tuning))
    assert ran == [0, 0]  # once on each node, in three rounds
    files = sorted(tmp_path.glob("nodes/*/*/base-outputs.safetensors"))
    assert len(files) == 2
    # Without a folder it is made anew for each message; the bits are the same.
    server, client = apps(tuning)
    config = write_config(api.settings_of(GIVEN), Deployment(out=str(tmp_path / "bare"), wait_seconds=0.01))
    start(server, InProcessGrid(client, config, nodes_of(2)), config)
    assert len(ran) == 2 + 6
    bare = read_run(tmp_path / "bare")
    assert run.result is not None
    assert bare.result is not None
    assert bare.result.weights_sha256 == run.result.weights_sha256
    # The first round of each pays for it.
    assert run.rounds[0].operations - run.rounds[1].operations == 2 * 20 * (4 * 200 + 200 * 8)


def test_outputs_that_are_damaged_or_of_other_samples_are_made_anew(tmp_path: Path) -> None:
    made: list[int] = []

    def ask(digest: str) -> Any:
        def compute() -> Any:
            made.append(1)
            return {"0.0": torch.arange(3.0)}

        return StoredOutputs(tmp_path / "node", digest, torch.device("cpu")).get(0, compute)

    assert torch.equal(ask("one")["0.0"], ask("one")["0.0"])
    assert len(made) == 1
    ask("other")
    assert len(made) == 2
    file = next((tmp_path / "node").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    ask("other")
    ask("other")
    assert len(made) == 3


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
