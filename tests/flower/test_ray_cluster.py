"""Flower's simulation on a Ray cluster of two nodes has the bits of the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deployments import BITS, digest, left_of, simulated, written

from benchmarks.ray_cluster import RayCluster
from fedpmt.flower.loopback import FINISHED, Loopback
from fedpmt.records import read_run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.flower

METHODS = ("fedpmt", "heterofl")
NODES = {"num-supernodes": 4, "client-resources-num-cpus": 1}
"""Of Flower's simulation; the CPUs are those of the cluster."""


def test_two_ray_nodes_have_the_bits_of_the_simulator(tmp_path: Path) -> None:
    """Each node has one CPU and each client needs one, so both nodes must work for two clients at a time."""
    with RayCluster(tmp_path / "ray") as cluster:
        with Loopback(tmp_path / "processes", simulation=True) as federation:
            for method in METHODS:
                folder, given = tmp_path / method, {**BITS, "method": method}
                app = written(folder, given, state_dir=str(folder / "nodes"))
                run = federation.submit(app, federation_config=NODES)
                seen: set[tuple[int, ...]] = set()
                while not (status := federation.status(run)).startswith(FINISHED):
                    seen.add(tuple(map(len, cluster.workers())))
                assert status == "finished:completed", federation.log(run)[-3000:]
                record = read_run(folder / "run")
                assert digest(record) == simulated(folder, given)
                assert all(one.outcome == "arrived" for step in record.rounds for one in step.devices)
                assert (1, 1) in seen, seen
        assert left_of(federation.port) == []
        port = cluster.port
    assert left_of(port) == []
