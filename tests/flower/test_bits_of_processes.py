"""Same seed, same bits: the simulator's plain executor, Ray, and a SuperLink with four SuperNodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from in_process import BITS
from real_processes import METHODS, digest, finished, left_of, simulated, written

from fedpmt.flower.loopback import Loopback, node_configs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.flower


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("deployment")
    with Loopback(folder / "processes") as federation:
        for config in node_configs(4, folder / "nodes"):
            federation.start_node(config)
        yield federation
    assert left_of(federation.port) == []


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("ray")
    with Loopback(folder / "processes", simulation=True) as federation:
        yield federation
    assert left_of(federation.port) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_deployment_has_the_bits_of_the_simulator(method: str, deployed: Loopback, tmp_path: Path) -> None:
    given = {**BITS, "method": method}
    run = finished(deployed, deployed.submit(written(tmp_path, given)), tmp_path)
    assert digest(run) == simulated(tmp_path, given)
    assert all(one.outcome == "arrived" for step in run.rounds for one in step.devices)


@pytest.mark.parametrize("method", METHODS)
def test_ray_has_the_bits_of_the_simulator(method: str, on_ray: Loopback, tmp_path: Path) -> None:
    given = {**BITS, "method": method}
    app = written(tmp_path, given, state_dir=str(tmp_path / "nodes"))
    nodes = {"num-supernodes": 4, "client-resources-num-cpus": 1, "init-args-num-cpus": 2}
    run = finished(on_ray, on_ray.submit(app, federation_config=nodes), tmp_path)
    assert digest(run) == simulated(tmp_path, given)
    assert all(one.outcome == "arrived" for step in run.rounds for one in step.devices)
