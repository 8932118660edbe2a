"""Without rounds: nodes that answer in any order, and the simulator that plays the same order once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from deployments import BITS, ScrambledGrid, deploy, digest, nodes_of
from flwr.app import Error, Message

from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.flower import events, replay
from fedpmt.flower.deployment import FILE
from fedpmt.records import CHECKPOINT, ROUNDS, read_run
from fedpmt.simulation.checkpoint import read_value
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from fedpmt.records import DeviceRecord, RunRecord

GIVEN: dict[str, Any] = {
    **BITS,
    "method": "fedpmt",
    "devices": 6,
    "cohort": 4,
    "clock": "events",
    "buffer": 2,
    "rounds": 6,
    "eval_every": 6,
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_SECONDS", 0.001)


class KilledError(BaseException):
    """As `kill -9` ends a process, as far as one can be in it."""


def replies(run: RunRecord) -> list[DeviceRecord]:
    return [one for step in run.rounds for one in step.devices]


def replayed(folder: Path) -> str:
    return digest(replay(folder / "run", folder / "replayed"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "fedbuff", "server_optimizer": "adam", "server_lr": 0.02},
        {"method": "fedasync"},
        {"splitting": "device", "speeds": "stated"},
        {"speeds": "measured", "deadline": 1000.0, "full_seconds": 1000.0},
        {"method": "heterofl", "mean": "median", "buffer": 3},
    ],
    ids=["fedpmt", "fedbuff", "fedasync", "option II", "measured", "median"],
)
def test_the_simulator_plays_the_recorded_order_to_the_same_bits(given: dict[str, Any], tmp_path: Path) -> None:
    run, grid = deploy(tmp_path, {**GIVEN, **given}, kind=ScrambledGrid)
    buffer = run.settings["buffer"]
    for step in run.rounds:
        assert sum(one.outcome == "arrived" for one in step.devices) == buffer
        assert all(one.staleness == step.round - 1 - (one.version or 0) for one in step.devices)
    assert max(one.staleness or 0 for one in replies(run)) >= 1
    assert len({(one.version, one.turn, one.device) for one in replies(run)}) == len(replies(run))
    assert len({one.digest for one in replies(run)}) == len(replies(run))
    # Nobody is waited for: at any time as many are at work as there are places.
    trained = sum(one.kind == "train" for one in grid.traffic)
    assert len(replies(run)) <= trained <= len(replies(run)) + run.settings["concurrency"]
    assert replayed(tmp_path) == digest(run)
