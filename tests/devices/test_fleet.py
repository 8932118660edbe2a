"""Fleets: by levels, drawn, or as measured."""

from __future__ import annotations

import math
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fedpmt
from fedpmt.devices.fleet import Fleet, from_levels, make_fleet, read_fleet
from fedpmt.settings import resolve
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord


MILLION = 1_000_000


def sizes(fleet: Fleet) -> list[int]:
    return [len(members) for members in fleet.members]


def test_the_papers_fleet() -> None:
    """Speeds 1/5, 1/4, 1/3, 1/2, 1, evenly; 1/3 is a third, not 0.33."""
    fleet = make_fleet(resolve({"devices": 100}))
    assert fleet.level_speeds == (1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)
    assert sizes(fleet) == [20] * 5
    assert len(fleet) == 100
    for device in map(fleet.device, range(100)):
        assert device.speed == fleet.level_speeds[device.level - 1]
        assert (device.uplink, device.downlink, device.memory, device.name) == (
            math.inf,
            math.inf,
            math.inf,
            "",
        )


def test_levels_that_do_not_divide_the_fleet() -> None:
    """The slowest levels get one device more; none is lost."""
    assert sizes(from_levels("1/4,1/2,1", 11, seed=0)) == [4, 4, 3]
    assert sizes(from_levels("1/4,1/2,1", 2, seed=0)) == [1, 1, 0]


@pytest.mark.parametrize(
    ("spec", "speeds", "expected"),
    [
        ("1/4x3,1x7", (0.25, 1.0), [3, 7]),
        ("1/4x3,1", (0.25, 1.0), [3, 7]),
        ("1/4x3,1/2,1", (0.25, 0.5, 1.0), [3, 4, 3]),
        ("0.25 x 3 , 1X7", (0.25, 1.0), [3, 7]),
        ("1e-1,2.5", (0.1, 2.5), [5, 5]),
        ("1/4x10,1", (0.25, 1.0), [10, 0]),
        ("3", (3.0,), [10]),
    ],
)
def test_counts_per_level(spec: str, speeds: tuple[float, ...], expected: list[int]) -> None:
    """SPEEDxCOUNT fixes how many; levels without a count share the rest."""
    fleet = from_levels(spec, 10, seed=0)
    assert fleet.level_speeds == speeds
    assert sizes(fleet) == expected


def test_counted_levels_stand_at_random_places() -> None:
    """Fixed by the seed, and not by the device's number: partitions that run along it do not line up."""
    one, same, other = (from_levels("1/4x30,1x70", 100, seed=seed).levels for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, np.sort(one))


@pytest.mark.parametrize(
    "spec",
    [
        *("", ",", "1,", "0,1", "-1,1", "nan,1", "1,inf", "fast", "1/0", "1,1", "1,1/2"),
        *("1x", "1x0", "1x-2", "1x2.5", "1x²", "1/4x3,1x6", "1/4x11,1", "1/4x99999999999999999999"),
        *(
            "gauss:1",
            "lognormal:",
            "lognormal:0",
            "lognormal:-1",
            "lognormal:1,2",
            "lognormal:x",
            "lognormal:nan",
        ),
        *("uniform:1", "uniform:1,1", "uniform:2,1", "uniform:0,1", "uniform:1,inf", "lognormal:1000"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_levels_that_are_refused(spec: str) -> None:
    """One line that names the key."""
    with pytest.raises(SettingError, match=r"^levels = '") as refused:
        from_levels(spec, 10, seed=0)
    assert "\n" not in str(refused.value)


def test_lognormal_speeds() -> None:
    """log κ is normal with the deviation asked for; the fastest device has speed 1; five levels of one size."""
    fleet = from_levels("lognormal:0.5", 10_000, seed=3)
    assert fleet.speeds.max() == 1.0
    assert np.log(fleet.speeds).std() == pytest.approx(0.5, rel=0.05)
    assert sizes(fleet) == [2_000] * 5
    assert list(fleet.level_speeds) == sorted(fleet.level_speeds)
    for slow, fast in zip(fleet.members, fleet.members[1:], strict=False):
        assert fleet.speeds[slow].max() <= fleet.speeds[fast].min()


def test_uniform_speeds() -> None:
    """Between the two numbers, scaled so that the fastest has speed 1."""
    fleet = from_levels("uniform:1,4", 10_000, seed=3)
    assert fleet.speeds.max() == 1.0
    assert fleet.speeds.min() == pytest.approx(0.25, abs=0.01)
    assert fleet.speeds.mean() == pytest.approx(0.625, abs=0.01)
    assert not np.array_equal(fleet.speeds, from_levels("uniform:1,4", 10_000, seed=4).speeds)
    np.testing.assert_array_equal(fleet.speeds, from_levels("uniform:1,4", 10_000, seed=3).speeds)


def test_at_level() -> None:
    """A device on another level is as fast as that level, and keeps its id."""
    device = from_levels("1/4,1", 10, seed=0).at_level(0, 2)
    assert (device.id, device.level, device.speed) == (0, 2, 1.0)


def test_profiles() -> None:
    """One device per kind with the number of its like, slowest first; empty levels have none."""
    fleet = from_levels("1/4x3,1/2,1x7", 10, seed=0)
    assert [(device.level, device.speed, count) for device, count in fleet.profiles] == [
        (1, 0.25, 3),
        (3, 1.0, 7),
    ]


# CSV


def fleet_of(text: str, folder: Path, availability: float = 1.0) -> Fleet:
    path = folder / "fleet.csv"
    path.write_text(text, encoding="utf-8")
    return read_fleet(path, availability)


def test_a_measured_fleet(tmp_path: Path) -> None:
    """Links in megabits, memory in MiB, names, counts; an empty cell sets no limit."""
    fleet = fleet_of(
        "name,speed,count,uplink_mbps,downlink_mbps,memory_mib\n"
        "phone,1/4,2,8,80,512\n"
        '"board, old",0.1,1,,16,\n'
        "laptop,1,1,100,,2048\n",
        tmp_path,
    )
    assert len(fleet) == 4
    assert [fleet.device(index).name for index in range(4)] == ["phone", "phone", "board, old", "laptop"]
    assert [fleet.device(index).level for index in range(4)] == [2, 2, 1, 3]
    assert fleet.level_speeds == (0.1, 0.25, 1.0)
    phone, board, laptop = (fleet.device(index) for index in (1, 2, 3))
    assert (phone.speed, phone.uplink, phone.downlink, phone.memory) == (0.25, 1e6, 1e7, 512 * 2**20)
    assert (board.uplink, board.downlink, board.memory) == (math.inf, 2e6, math.inf)
    assert (laptop.uplink, laptop.downlink, laptop.memory) == (1.25e7, math.inf, 2**31)
    assert [(device.name, count) for device, count in fleet.profiles] == [
        ("board, old", 1),
        ("phone", 2),
        ("laptop", 1),
    ]


def test_only_speeds_are_needed(tmp_path: Path) -> None:
    """Columns in any order, blanks after commas, a byte order mark: all as spreadsheets write them."""
    fleet = fleet_of("\ufeffspeed, name\n1, a\n 1/2 , b\n", tmp_path)
    assert fleet.speeds.tolist() == [1.0, 0.5]
    assert fleet.uplinks is None
    assert fleet.memories is None
    assert fleet.availabilities is None
    assert [fleet.device(index).name for index in range(2)] == ["a", "b"]


def test_availability_of_a_measured_fleet(tmp_path: Path) -> None:
    """The column goes before the run's setting; an empty cell is "always"."""
    column = fleet_of("speed,availability\n1,0.5\n1,\n", tmp_path, availability=0.1)
    assert column.availabilities is not None
    assert column.availabilities.tolist() == [0.5, 1.0]
    setting = fleet_of("speed\n1\n1\n", tmp_path, availability=0.1)
    assert setting.availabilities is not None
    assert setting.availabilities.tolist() == [0.1, 0.1]


def test_many_measured_speeds_become_five_levels(tmp_path: Path) -> None:
    """Up to ten distinct speeds are levels of their own; more are grouped by rank."""
    ten = fleet_of("speed\n" + "".join(f"{speed}\n" for speed in range(1, 11)), tmp_path)
    assert ten.level_speeds == tuple(float(speed) for speed in range(1, 11))
    many = fleet_of("speed\n" + "".join(f"{speed}\n" for speed in range(100, 0, -1)), tmp_path)
    assert sizes(many) == [20] * 5
    assert many.level_speeds == (10.5, 30.5, 50.5, 70.5, 90.5)
    assert (many.device(99).level, many.device(0).level) == (1, 5)


def test_the_file_says_how_many_devices_there_are(tmp_path: Path) -> None:
    """A setting that says otherwise is refused."""
    path = tmp_path / "fleet.csv"
    path.write_text("speed,count\n1,3\n")
    assert len(make_fleet(resolve({"fleet": path, "devices": 3, "cohort": 1}))) == 3
    with pytest.raises(SettingError, match="lists 3 devices, but devices = 4"):
        make_fleet(resolve({"fleet": path, "devices": 4, "cohort": 1}))


# size


@pytest.mark.parametrize("spec", ["1/5,1/4,1/3,1/2,1", "1/4x250000,1", "lognormal:1", "uniform:1,10"])
def test_a_million_devices(spec: str) -> None:
    """Built in under two seconds, with its levels and its kinds."""
    begun = time.process_time()
    fleet = from_levels(spec, MILLION, seed=0, availability=0.5)
    assert sum(sizes(fleet)) == MILLION
    if ":" not in spec:
        assert sum(count for _, count in fleet.profiles) == MILLION
    assert time.process_time() - begun < 2


def test_a_million_measured_devices(tmp_path: Path) -> None:
    """By counts, from a file of a few lines."""
    begun = time.process_time()
    fleet = fleet_of("name,speed,count,uplink_mbps\nslow,1/4,600000,8\nfast,1,400000,\n", tmp_path)
    assert sizes(fleet) == [600_000, 400_000]
    assert [(device.name, count) for device, count in fleet.profiles] == [
        ("slow", 600_000),
        ("fast", 400_000),
    ]
    assert time.process_time() - begun < 6


def test_more_devices_than_there_are_numbers_for() -> None:
    """Refused before any memory is asked for."""
    with pytest.raises(SettingError, match="devices = 10000000000000000"):
        from_levels("1", 10**16, seed=0)


def test_kinds_of_drawn_speeds_are_made_when_they_are_looked_at() -> None:
    """A million kinds, slowest first, in a blink; together they are the fleet."""
    fleet = from_levels("lognormal:1", MILLION, seed=0)
    begun = time.process_time()
    kinds = fleet.profiles
    assert time.process_time() - begun < 2
    assert len(kinds) > 0.99 * MILLION
    assert (kinds[0][0].speed, kinds[-1][0].speed) == (fleet.speeds.min(), 1.0)
    first = [device.speed for device, _ in kinds[:100]]
    assert first == sorted(first)


def test_kinds_tell_devices_apart_by_all_they_have(tmp_path: Path) -> None:
    """Same speed with another link or memory is another kind; the same everything is one."""
    fleet = fleet_of(
        "speed,uplink_mbps,memory_mib\n1,8,\n1,16,\n1/2,,64\n1,8,\n1/2,,32\n1,8,128\n1/2,,64\n", tmp_path
    )
    found = [
        (device.speed, device.uplink / 1e6, device.memory / 2**20, count) for device, count in fleet.profiles
    ]
    assert found == [
        (0.5, math.inf, 32, 1),
        (0.5, math.inf, 64, 2),
        (1, 1, 128, 1),
        (1, 1, math.inf, 2),
        (1, 2, math.inf, 1),
    ]


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
