"""Same seed, same bits: the simulator's plain executor and Flower's apps, message by message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from in_process import BITS, CARRIED, NOT_CARRIED, deploy

from fedpmt import api
from fedpmt.api import paper_problem_of
from fedpmt.flower import apps
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem


@pytest.mark.parametrize("method", CARRIED)
def test_every_method_has_the_bits_of_the_simulator(method: str, tmp_path: Path) -> None:
    simulated = api.run(method, out=tmp_path / "simulated", **BITS)
    deployed, _ = deploy(tmp_path, {**BITS, "method": method})
    assert simulated.result is not None
    assert deployed.result is not None
    assert deployed.result.weights_sha256 == simulated.result.weights_sha256
    assert deployed.result.accuracy == simulated.result.accuracy
    for ours, theirs in zip(deployed.rounds, simulated.rounds, strict=True):
        assert [one.part for one in ours.devices] == [one.part for one in theirs.devices]
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        assert all(one.outcome == "arrived" for one in ours.devices)


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
