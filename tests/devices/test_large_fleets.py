"""A round costs what its cohort costs, however many devices there are."""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

import fedpmt

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord

MILLION = 1_000_000
COHORT = 6
PLENTY = 20.0


def timed(out: Path, **settings: Any) -> tuple[RunRecord, float]:
    begun = time.process_time()
    found = fedpmt.run("fedpmt", out=out, cohort=COHORT, samples=20, batch=10, rounds=2, **settings)
    return found, time.process_time() - begun


@pytest.mark.parametrize("sampling", ["stratified", "uniform", "fastest"])
def test_a_million_devices_with_data_of_their_own(sampling: str, tmp_path: Path) -> None:
    """A thousand times the devices: the same work, bytes and records, and seconds, not minutes."""
    small, _ = timed(tmp_path / "small", data="synthetic", devices=1_000, sampling=sampling)
    large, seconds = timed(tmp_path / "large", data="synthetic", devices=MILLION, sampling=sampling)
    assert seconds < PLENTY
    for one in (small, large):
        assert [len(record.devices) for record in one.rounds] == [COHORT] * 2
    assert max(device.device for record in large.rounds for device in record.devices) >= 1_000
    sizes = [
        sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file()) for run in (small, large)
    ]
    assert sizes[1] < 1.05 * sizes[0]


def test_a_million_devices_that_draw_from_one_data_set(tmp_path: Path) -> None:
    """`iid:replace`: shards are drawn when they are asked for."""
    found, seconds = timed(tmp_path / "run", partition="iid:replace", devices=MILLION)
    assert seconds < PLENTY
    assert [len(record.devices) for record in found.rounds] == [COHORT] * 2
    assert all(device.samples == 20 for record in found.rounds for device in record.devices)


def test_a_million_devices_of_different_speeds_out_of_reach_at_times(tmp_path: Path) -> None:
    """Drawn speeds and availability do not make a round look at everybody's data either."""
    found, seconds = timed(
        tmp_path / "run", data="synthetic", devices=MILLION, levels="lognormal:0.5", availability=0.5
    )
    assert seconds < PLENTY
    assert [len(record.devices) for record in found.rounds] == [COHORT] * 2


def test_a_million_devices_take_little_memory() -> None:
    """Arrays over the fleet, no objects: under 200 MB at the peak of building it."""
    from fedpmt.devices.fleet import from_levels

    tracemalloc.start()
    try:
        fleet = from_levels("1/5,1/4,1/3,1/2,1", MILLION, seed=0)
        assert len(fleet.members) == 5
        assert len(fleet.profiles) == 5
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
