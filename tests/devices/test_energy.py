"""Energy: what devices draw, in how many seconds, and a budget of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import fedpmt
from fedpmt import Device, SettingError, api
from fedpmt.devices.fleet import Watts, make_fleet, read_fleet
from fedpmt.devices.rows import read_devices, write_devices
from fedpmt.report.budgets import budgets
from fedpmt.report.page import write_page
from fedpmt.report.tables import first_reaching, summary, tidy
from fedpmt.simulation.assemble import plan

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.runs import Run

FAST = Device(name="fast", speed=1, watts_computing=4, watts_sending=1.5, watts_idle=0.5)
SLOW = Device(name="slow", speed=0.5, watts_computing=2, watts_idle=0.1)
TINY: dict[str, Any] = {"data": "synthetic", "samples": 20, "batch": 10, "cohort": 2, "rounds": 2}


def energy(run: Run) -> list[list[tuple[float | None, float | None]]]:
    return [[(one.joules, one.idle_joules) for one in step.devices] for step in run.rounds]


def test_a_round_by_hand() -> None:
    """FedAvg takes 10 s at speed 1: 4 W x 10 s, then 0.5 W for the 10 s until the other, 2 W x 20 s, is there."""
    run = fedpmt.run("fedavg", fleet=[FAST, SLOW], **TINY)
    assert energy(run) == [[(40.0, 5.0), (40.0, 0.0)]] * 2
    assert [step.joules for step in run.rounds] == [85.0, 85.0]
    assert run.result is not None
    assert run.result.joules == 170.0


def test_who_is_late_stops_at_the_deadline() -> None:
    run = fedpmt.run("fedavg", fleet=[FAST, SLOW], deadline=15, **{**TINY, "rounds": 1})
    assert [one.outcome for one in run.rounds[0].devices] == ["arrived", "late"]
    assert energy(run) == [[(40.0, 2.5), (30.0, 0.0)]]
    assert run.rounds[0].joules == 72.5


def test_links_take_energy_both_ways() -> None:
    linked = Device(speed=1, watts_computing=4, watts_sending=1.5, uplink_mbps=1, downlink_mbps=2)
    run = fedpmt.run("fedavg", fleet=[linked, FAST], **TINY)
    device = run.rounds[0].devices[0]
    seconds = device.bytes_up / 125_000 + device.bytes_down / 250_000
    assert device.transfer_seconds == pytest.approx(seconds)
    assert device.joules == pytest.approx(40 + 1.5 * seconds)
    waiting = run.rounds[0].devices[1].idle_joules
    assert waiting == pytest.approx(0.5 * seconds)


def test_nobody_waits_on_a_clock_of_events() -> None:
    """The fast device ends at 10, 20 and 30 s; at 20 s the slow one does, too."""
    run = fedpmt.run(
        "fedavg", fleet=[FAST, SLOW], clock="events", buffer=1, concurrency=2, **{**TINY, "rounds": 3}
    )
    ended = [(one.level, one.joules, one.idle_joules) for step in run.rounds for one in step.devices]
    assert sorted(ended) == [(1, 40.0, 0.0), (2, 40.0, 0.0), (2, 40.0, 0.0)]


def test_without_watts_there_is_no_energy_anywhere(tmp_path: Path) -> None:
    run = fedpmt.run("fedavg", fleet=[1, "1/2"], **TINY)
    assert energy(run) == [[(None, None)] * 2] * 2
    assert [step.joules for step in run.rounds] == [None, None]
    assert run.result is not None
    assert run.result.joules is None
    assert not any("joules" in column for column in tidy([run])[0])
    assert "energy" not in summary([run])[0].texts()
    assert "energy" not in write_page([run], tmp_path / "page.html")[0].read_text().lower()
    assert "energy" not in str(fedpmt.plan(fleet=[1, "1/2"]))


@pytest.mark.parametrize("budget", ["energy", "energy=30J", "energy=0.7"])
@pytest.mark.parametrize("method", ["fedpmt", "heterofl", "fedprox"])
def test_a_budget_is_kept_by_every_device(method: str, budget: str) -> None:
    run = fedpmt.run(method, fleet=[FAST, SLOW], deadline=15, budget=budget, **TINY)
    for device in (one for step in run.rounds for one in step.devices):
        assert device.used is not None
        assert device.budget is not None
        assert device.used > 0
        assert not device.over_budget
        if budget == "energy=30J":
            assert device.budget == 30.0
        if budget == "energy=0.7":
            assert device.budget == pytest.approx(28.0)
        if device.outcome == "arrived":
            assert device.joules == pytest.approx(device.used)


def test_fiarse_is_as_large_as_its_energy_would_pay_for() -> None:
    """As if products with zeros were free: at half of the energy, half of the model."""
    run = fedpmt.run("fiarse", fleet=[FAST, SLOW], budget="energy=0.5", **TINY)
    assert {one.part for one in run.rounds[0].devices} == {"size 0.5"}


def test_a_dry_run_predicts_what_a_run_takes(tmp_path: Path) -> None:
    given = {"fleet": [FAST, SLOW], **TINY}
    predicted = api.predict(api.make_request("fedpmt", given), tmp_path)
    run = fedpmt.run("fedpmt", **given)
    assert run.result is not None
    assert predicted["joules"] == pytest.approx(run.result.joules)


def test_a_report_tells_of_energy(tmp_path: Path) -> None:
    run = fedpmt.run("fedpmt", fleet=[FAST, SLOW], budget="energy=30J", **TINY)
    (row,) = summary([run])
    assert run.result is not None
    assert row.joules is not None
    assert row.joules.mean == run.result.joules
    assert row.texts()["energy"].endswith(" J")
    first, last = tidy([run])
    assert first["joules"] == first["total_joules"] == run.rounds[0].joules
    assert last["total_joules"] == pytest.approx(run.result.joules)
    reached = first_reaching(run, 0.0)
    assert reached is not None
    assert reached.joules == run.rounds[0].joules
    assert all(row.texts()["budget"] == "30 J" for row in budgets([run]))
    page = write_page([run], tmp_path / "page.html")[0].read_text()
    assert "By energy" in page
    assert ">energy<" in page


def test_a_plan_tells_of_energy() -> None:
    """Fifteen seconds let the slow device train a part; whatever it is, it draws 2 W meanwhile."""
    table = fedpmt.plan(fleet=[FAST, SLOW], deadline=15)
    slow, fast = table.devices
    assert slow.joules == pytest.approx(2 * slow.seconds)
    assert fast.joules == pytest.approx(40.0)
    assert "40.0 J" in str(table)
    assert max(map(len, str(table).splitlines()[:5])) <= 80


def test_watts_are_columns_of_a_fleet() -> None:
    text = "name,speed,count,watts_computing,watts_sending,watts_idle\nfast,1,2,4,1.5,1/2\nslow,1/2,1,2,,0\n"
    rows = read_devices(text)
    assert read_devices(write_devices(rows)) == rows
    fleet = read_fleet(text)
    watts = [fleet.device(index).watts for index in range(3)]
    assert watts == [Watts(4.0, 1.5, 0.5), Watts(4.0, 1.5, 0.5), Watts(2.0, 0.0, 0.0)]
    assert [count for _, count in fleet.profiles] == [1, 2]
    own = read_fleet([FAST, SLOW]).ordered(["slow", "fast"])
    assert [own.device(index).watts for index in range(2)] == [Watts(2.0, 0.0, 0.1), Watts(4.0, 1.5, 0.5)]
    drawn = read_fleet("speed,watts_computing,count\n1,3,2\n1,4,1\n")
    assert [(device.watts, count) for device, count in drawn.profiles] == [
        (Watts(3.0, 0.0, 0.0), 2),
        (Watts(4.0, 0.0, 0.0), 1),
    ]


def test_of_very_many_kinds_the_weakest_is_that_with_the_most_joules() -> None:
    """2000 speeds: none with watts of its own but one, which is not the slowest and takes the most for its work."""
    rows = [Device(speed=(number + 1000) / 3000, watts_computing=5) for number in range(2000)]
    rows[700] = Device(speed=1700 / 3000, watts_computing=50)
    settings = api.settings_of({"fleet": rows, "budget": "energy=30J", "method": "prunefl"})
    fleet = make_fleet(settings)
    planner = plan(settings, api.unfilled_problem(settings), fleet)
    assert planner.weakest(fleet, settings.samples).meter.device.watts == Watts(50.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([FAST, {"speed": 1}], r"fleet\[1\]: watts_computing must be stated for all devices"),
        ([{"speed": 1, "watts_idle": 2}], r"fleet\[0\]: watts_computing must be stated"),
        (
            [{"speed": 1, "watts_computing": 0}],
            "watts_computing = '0' must be a number or a fraction, more than 0",
        ),
        (
            [{"speed": 1, "watts_computing": 1, "watts_idle": -1}],
            "watts_idle = '-1' must be a number or a fraction, 0 or more",
        ),
        ([{"speed": 1, "watts": 1}], "column = 'watts' is unknown"),
    ],
)
def test_watts_that_cannot_be_used_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_fleet(rows)


@pytest.mark.parametrize("fleet", [None, [1, "1/2"]])
def test_a_budget_of_energy_needs_watts(fleet: list[Any] | None) -> None:
    given: dict[str, Any] = {} if fleet is None else {"fleet": fleet}
    for ask in (
        lambda: fedpmt.run("fedpmt", budget="energy=5J", **given),
        lambda: fedpmt.plan(budget="energy", **given),
    ):
        with pytest.raises(
            SettingError, match=r"budget = 'energy.*' needs a fleet that states watts_computing"
        ):
            ask()
