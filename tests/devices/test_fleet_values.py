"""Fleets given in Python: whatever they are written in, they are the same rows; clients have their own devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedpmt
from fedpmt import Device, SettingError
from fedpmt.api import settings_of
from fedpmt.cli.main import program
from fedpmt.devices.fleet import Fleet, make_fleet, read_fleet
from fedpmt.devices.rows import read_devices, write_devices

if TYPE_CHECKING:
    from pathlib import Path

SPEEDS = [0.25, 0.25, 0.5, 1.0, 1.0]
CSV = "name,speed,count,uplink_mbps,memory_mib,availability\npi,1/5,2,10,512,0.5\nboard,1/2,1,,,\nfast,1,1,100,,\n"
ROWS = [
    Device(name="pi", speed=0.2, count=2, uplink_mbps=10, memory_mib=512, availability=0.5),
    Device(name="board", speed=0.5),
    Device(name="fast", speed=1, uplink_mbps=100),
]
DICTS: list[dict[str, Any]] = [
    {"speed": "1/5", "name": "pi", "count": 2, "uplink_mbps": 10.0, "memory_mib": 512, "availability": 0.5},
    {"speed": 0.5, "name": "board", "uplink_mbps": None},
    {"name": "fast", "speed": 1, "uplink_mbps": 100, "count": 1},
]
TINY: dict[str, Any] = {"rounds": 1, "samples": 10, "cohort": 3, "batch": 5, "data": "synthetic"}


def columns(fleet: Fleet) -> list[Any]:
    arrays = (
        fleet.speeds,
        fleet.levels,
        fleet.uplinks,
        fleet.downlinks,
        fleet.memories,
        fleet.availabilities,
    )
    return [*(None if array is None else array.tolist() for array in arrays), fleet.names]


@pytest.mark.parametrize(
    "source",
    [
        SPEEDS,
        tuple(SPEEDS),
        np.array(SPEEDS),
        torch.tensor(SPEEDS),
        pd.Series(SPEEDS),
        ["1/4", "1/4", "1/2", 1, 1],
        pd.DataFrame({"speed": SPEEDS}),
        [{"speed": speed} for speed in SPEEDS],
        [Device(speed=0.25, count=2), Device(speed=0.5), Device(speed=1, count=2)],
        [Device(speed="1/4", count=2), 0.5, {"speed": 1, "count": 2.0}],  # type: ignore[arg-type]
        "speed,count\n1/4,2\n0.5,\n1,2\n",
    ],
)
def test_speeds_in_any_form_are_one_fleet(source: Any) -> None:
    expected = Fleet(np.array(SPEEDS), np.array([1, 1, 2, 3, 3]), (0.25, 0.5, 1.0))
    assert columns(read_fleet(source)) == columns(expected)
    settings = settings_of({"fleet": source, "cohort": 3})
    assert settings.devices == 5
    assert columns(make_fleet(settings)) == columns(expected)


def test_a_csv_and_its_rows_are_one_fleet(tmp_path: Path) -> None:
    """Empty cells, counts and fractions too; the frame has them as missing values."""
    path = tmp_path / "fleet.csv"
    path.write_text(CSV)
    frame = pd.read_csv(path, converters={"speed": str})
    sources = [path, str(path), ROWS, DICTS, frame, frame.set_index("name"), write_devices(ROWS)]
    assert all(read_devices(source) == ROWS for source in sources)
    found = [columns(make_fleet(settings_of({"fleet": source, "cohort": 3}))) for source in sources]
    assert found[0][2] == [1.25e6, 1.25e6, float("inf"), 1.25e7]
    assert all(one == found[0] for one in found)


def test_the_same_fleet_gives_the_same_weights(tmp_path: Path) -> None:
    path = tmp_path / "fleet.csv"
    path.write_text("speed\n" + "".join(f"{speed}\n" for speed in SPEEDS))
    devices = [Device(speed=0.25, count=2), Device(speed=0.5), Device(speed=1, count=2)]
    runs = [fedpmt.run("fedpmt", fleet=fleet, **TINY) for fleet in (path, SPEEDS, devices)]
    assert len({run.result.weights_sha256 for run in runs if run.result is not None}) == 1
    assert all(run.rounds == runs[0].rounds for run in runs)


def test_a_fleet_of_values_belongs_to_the_run(tmp_path: Path) -> None:
    """It stands in the run's settings, however it was given; with another fleet the run is not resumed."""
    given: dict[str, Any] = {**TINY, "out": tmp_path / "run"}
    run = fedpmt.run("fedpmt", fleet=ROWS, **given)
    assert fedpmt.run("fedpmt", fleet=DICTS, resume=True, **given).result == run.result
    assert fedpmt.run("fedpmt", fleet=run.settings["fleet"], resume=True, **given).result == run.result
    assert program(["run", "--resume", "--out", str(given["out"])]) == 0
    with pytest.raises(
        SettingError, match=r"its fleet is 'speed,name,.* not 'speed \| 0.25 \| 0.25"
    ) as refused:
        fedpmt.run("fedpmt", fleet=SPEEDS[:4], resume=True, **given)
    assert "\n" not in str(refused.value)


def test_compare_and_plan_take_values() -> None:
    runs = fedpmt.compare(["fedpmt", "fedavg"], fleet=ROWS, **TINY)
    assert [run.settings["devices"] for run in runs] == [4, 4]
    table = fedpmt.plan(fleet=ROWS, deadline=1000)
    assert [(row.name, row.devices) for row in table.devices] == [("pi", 2), ("board", 1), ("fast", 1)]


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        ([], "fleet lists no device"),
        (3, r"fleet must be the path of a CSV, a list of rows or a data frame \(got int\)"),
        ({"a": 1.0}, r"got dict"),
        ([1.0, 0.0], r"fleet\[1\]: speed = '0.0'"),
        ([1.0, True], r"fleet\[1\]: speed = 'True'"),
        ([float("nan")], r"fleet\[0\]: speed = 'nan'"),
        ([[1.0, 2.0]], r"fleet\[0\] must be a dict of columns"),
        ([{"name": "pi"}], r"fleet has no column 'speed' \(its columns: name\)"),
        ([1.0, {"name": "pi"}], r"fleet\[1\]: speed = ''"),
        ([{"speed": 1, "uplink": 8}], r"fleet: column = 'uplink' is unknown; did you mean 'uplink_mbps'\?"),
        ([{"speed": 1, "count": 2.5}], r"fleet\[0\]: count = '2.5'"),
        ([{"speed": 1, "count": float("inf")}], r"fleet\[0\]: count = 'inf'"),
        ([{"speed": 1, "availability": 1.5}], r"fleet\[0\]: availability is a chance, at most 1 \(got 1.5\)"),
        (pd.DataFrame({"speed": [1.0, None]}), r"fleet\[1\]: speed = ''"),
        (pd.DataFrame([[1, 2]], columns=["speed", "speed"]), "column 'speed' appears twice"),
        (SPEEDS[:2], "fleet lists 2 devices, but devices = 3"),
        (
            [{"speed": 1, "name": "pi"}, {"speed": 1, "name": "a"}, {"speed": 2, "name": "pi"}],
            r"fleet\[2\]: name must differ from that of fleet\[0\] \(got 'pi'\); several devices of a kind are one row",
        ),
        ("name,speed\npi,1\nb,1\npi,1\n", "line 4: name must differ from that of line 2"),
        (
            "name,speed,scale\npi,2,cnn-mnist: 60 samples in batches of 10 in 10 s\n",
            "the speed of 'pi' was measured for 'cnn-mnist: 60 samples .* here speed 1 means 'fcnn-mnist: 10 samples",
        ),
    ],
)
def test_fleets_that_are_refused(fleet: Any, reason: str, tmp_path: Path) -> None:
    devices = {"devices": 3} if isinstance(fleet, list) and len(fleet) == 2 else {}
    with pytest.raises(SettingError, match=reason) as refused:
        fedpmt.run("fedpmt", fleet=fleet, out=tmp_path / "new", **{**TINY, **devices, "cohort": 1})
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "new").exists()


def test_kinds_of_equal_speed_stay_apart(tmp_path: Path) -> None:
    """By their names; and files of several machines may be put together as they are, headings included."""
    path = tmp_path / "fleet.csv"
    path.write_text("name,speed,count\nphone,1/2,3\nname,speed,count\nboard,1/2,2\nfast,1,1\n")
    table = fedpmt.plan(fleet=path, deadline=30)
    assert [(row.name, row.devices) for row in table.devices] == [("phone", 3), ("board", 2), ("fast", 1)]
    assert all(f"\n{name}" in str(table) for name in ("phone", "board", "fast"))
    # Of many speeds five levels are made, which may divide a kind; it is still one row.
    many = [Device(name=f"kind {number}", speed=1 + number / 10, count=7) for number in range(12)]
    assert [row.devices for row in fedpmt.plan(fleet=many, deadline=30).devices] == [7] * 12


@pytest.mark.parametrize(
    "wrong",
    [{"speed": 0}, {"speed": -1}, {"count": 0}, {"memory_mib": 0}, {"availability": 0}, {"uplink_mbps": "x"}],
)
def test_a_device_is_checked_when_it_is_made(wrong: dict[str, Any]) -> None:
    (key,) = wrong
    with pytest.raises(SettingError, match=f"^{key} = "):
        Device(**{"speed": 1, **wrong})


# Clients' own devices


def named(*names: str, count: int = 1) -> Fleet:
    return read_fleet(
        [
            Device(name=name, speed=number + 1, uplink_mbps=8 * (number + 1), count=count)
            for number, name in enumerate(names)
        ]
    )


def test_each_client_has_the_device_of_its_name() -> None:
    fleet = named("bob", "carol", "ann").ordered(["ann", "bob", "carol"])
    assert fleet.names == ("ann", "bob", "carol")
    assert fleet.speeds.tolist() == [3, 1, 2]
    assert fleet.levels.tolist() == [3, 1, 2]
    assert fleet.uplinks is not None
    assert fleet.uplinks.tolist() == [3e6, 1e6, 2e6]
    assert fleet.device(0).name == "ann"


def test_kinds_of_devices_are_nobodys_own() -> None:
    """Nor are devices without names, and clients without names have none."""
    kinds, bare = named("pi", "phone", count=2), read_fleet([1.0, 0.5])
    assert kinds.ordered(["a", "b", "c", "d"]) is kinds
    assert bare.ordered(["a", "b"]) is bare
    assert named("bob").ordered([]).names == ("bob",)
    assert named("phone", "laptop").ordered(["0", "1"]).names == ("phone", "laptop")
    assert named("1", "0").ordered(["0", "1"]).speeds.tolist() == [2, 1]


def people(*names: str) -> dict[str, Any]:
    """Samples of people who own 10, 20, ... of them, and a model for these."""
    rng = np.random.default_rng(0)
    sizes = {name: 10 * (number + 1) for number, name in enumerate(names)}
    clients = {
        name: (rng.normal(size=(size, 4)).astype(np.float32), rng.integers(3, size=size))
        for name, size in sizes.items()
    }
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return {
        "model": net,
        "clients": clients,
        "test": clients[names[0]],
        "rounds": 1,
        "cohort": 3,
        "batch": 10,
    }


def test_people_train_on_their_own_devices(tmp_path: Path) -> None:
    """By name, whatever the order of the rows; and a trace names them too."""
    fleet = [Device(name=name, speed=speed) for name, speed in (("carol", 1), ("ann", 0.5), ("bob", 0.25))]
    trace = "client,start,end\ncarol,0,1000\nann,0,1000\nbob,0,1\n"
    given = people("ann", "bob", "carol")
    run = fedpmt.run("fedavg", fleet=fleet, availability_trace=trace, **given)
    found = [(one.samples, one.speed, one.outcome) for one in run.rounds[0].devices]
    assert found == [(10, 0.5, "arrived"), (20, 0.25, "failed"), (30, 1.0, "arrived")]
    wrong = [*fleet[:2], Device(name="bop", speed=1)]
    with pytest.raises(SettingError, match="has none named 'bob'"):
        fedpmt.run("fedavg", fleet=wrong, out=tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        (named("ann", "bob", "eve"), "has none named 'carol'"),
        (named("x", "y", "z"), "has none named 'ann'"),
        (
            read_fleet([Device(name="ann", speed=1), Device(name="bob", speed=1, count=2)]),
            "has 2 named 'bob'",
        ),
        (named("ann", "bob", "carol", "eve"), "has a device named 'eve', and no client is called that"),
    ],
)
def test_a_client_without_a_device_is_named(fleet: Fleet, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        fleet.ordered(["ann", "bob", "carol"])
