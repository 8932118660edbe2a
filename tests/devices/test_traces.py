"""Traces: who can be reached when, how fast devices are, and what the clock makes of it."""

from __future__ import annotations

import math
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import fedpmt
from fedpmt import Device, SettingError, api
from fedpmt.devices.fleet import read_fleet
from fedpmt.devices.traces import make_traces, read_availability, read_speeds
from fedpmt.settings import resolve
from fedpmt.simulation.assemble import assemble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedpmt.devices.traces import Traces
    from fedpmt.records import RunRecord
    from fedpmt.simulation.loop import Federation

TWO: dict[str, Any] = {
    "data": "synthetic",
    "levels": "1",
    "devices": 2,
    "cohort": 2,
    "samples": 10,
    "batch": 10,
    "full_seconds": 10.0,
    "rounds": 8,
    "eval_every": 8,
}
"""Each device takes 10 s for the whole model."""

SHIFTS = "client,start,end\n0,0,15\n0,40,60\n1,0,25\n"


def outcomes(run: RunRecord) -> list[dict[int, str]]:
    return [{one.device: one.outcome for one in step.devices} for step in run.rounds]


def clock(run: RunRecord) -> list[float]:
    return [step.virtual_seconds for step in run.rounds]


# The clock, by hand


def test_devices_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    """Each round takes 10 s. From 10 on, device 0 has 5 s left and fails; from 20 on device 1 has; at 30 nobody can be
    reached, so that time jumps to 40; device 0 then finishes twice, the second time at the very end, 60."""
    run = fedpmt.run("fedavg", availability_trace=SHIFTS, **TWO)
    assert clock(run) == pytest.approx([10, 20, 30, 50, 60])
    assert outcomes(run) == [
        {0: "arrived", 1: "arrived"},
        {0: "failed", 1: "arrived"},
        {1: "failed"},
        {0: "arrived"},
        {0: "arrived"},
    ]
    assert [step.round_seconds for step in run.rounds] == pytest.approx([10] * 5)
    assert run.result is not None
    assert (run.result.stopped, run.result.rounds) == ("unreachable", 5)
    assert run.result.score is not None  # the last round is evaluated, though eval_every is 8
    assert "no device can be reached any more after 60 virtual seconds" in caplog.text


def test_a_deadline_ends_the_wait_for_devices_that_went_away() -> None:
    """At half speed a device takes 20 s, over the deadline of 12: late, or failed if it went away before."""
    fleet = [Device(name="slow", speed=0.5), Device(name="fast", speed=1)]
    trace = "client,start,end\nslow,0,30\nfast,0,100\n"
    given = {**TWO, "rounds": 3, "devices": None}
    run = fedpmt.run("fedavg", fleet=fleet, availability_trace=trace, deadline=12, **given)
    assert clock(run) == pytest.approx([12, 24, 36])
    assert [one[0] for one in outcomes(run)] == ["late", "failed", "failed"]


def test_over_selection_makes_up_for_devices_that_went_away() -> None:
    """Three are asked and two wanted: nobody waits for the one that fails."""
    fleet = [Device(name="slow", speed=0.5), Device(name="fast", speed=1, count=2)]
    trace = "client,start,end\nslow,0,5\nfast,0,100\n"
    given = {**TWO, "rounds": 1, "devices": None}
    run = fedpmt.run("fedavg", fleet=fleet, availability_trace=trace, over_select=1.5, **given)
    assert outcomes(run) == [{0: "failed", 1: "arrived", 2: "arrived"}]
    assert clock(run) == pytest.approx([10])


def test_the_clock_follows_the_traced_speed_at_the_rounds_start() -> None:
    """10 s at speed 1, then 20 s at a half, although the trace is back at 1 after 25 s; then 10 s again."""
    trace = "client,time,speed\n0,0,1\n0,5,1/2\n0,25,1\n1,0,1\n"
    run = fedpmt.run("fedavg", speed_trace=trace, **{**TWO, "rounds": 3})
    assert clock(run) == pytest.approx([10, 30, 40])
    assert [step.devices[0].speed for step in run.rounds] == [1, 0.5, 1]


def test_depths_are_fitted_to_stated_speeds_or_to_what_was_measured() -> None:
    """Both devices are stated to be fast enough for everything, and one never is."""
    trace = pd.DataFrame({"client": [0, 1], "time": [0, 0], "speed": [0.25, 1]})
    given = {**TWO, "rounds": 4, "deadline": 35, "speed_trace": trace}
    stated, measured = (fedpmt.run("fedpmt", speeds=known, **given) for known in ("stated", "measured"))
    assert {(one[0], one[1]) for one in outcomes(stated)} == {("late", "arrived")}
    assert outcomes(measured)[-1] == {0: "arrived", 1: "arrived"}


def test_waiting_counts_against_the_time_budget() -> None:
    """At 30 s nobody can be reached before 40."""
    run = fedpmt.run("fedavg", availability_trace=SHIFTS, time_budget=35, **TWO)
    assert run.result is not None
    assert run.result.stopped == "time-budget"
    assert run.result.virtual_seconds == pytest.approx(30)


# Identities


def test_a_trace_in_which_nothing_happens_changes_nothing() -> None:
    given: dict[str, Any] = {**TWO, "devices": 6, "cohort": 3, "rounds": 2, "levels": "1/4,1/2,1"}
    plain = fedpmt.run("fedpmt", **given)
    speeds = plain_speeds(given)
    traced = fedpmt.run(
        "fedpmt",
        availability_trace=[{"client": device, "start": 0, "end": 1e9} for device in range(6)],
        speed_trace=[{"client": device, "time": 0, "speed": speed} for device, speed in enumerate(speeds)],
        **given,
    )
    assert traced.rounds == plain.rounds
    assert traced.result is not None
    assert plain.result is not None
    assert traced.result.weights_sha256 == plain.result.weights_sha256


def plain_speeds(settings: dict[str, Any]) -> list[float]:
    from fedpmt.devices.fleet import make_fleet

    speeds: list[float] = make_fleet(resolve(settings)).speeds.tolist()
    return speeds


def test_a_resume_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """The trace is part of the run: a changed file is noticed."""
    path = tmp_path / "trace.csv"
    path.write_text(SHIFTS)
    speeds = "client,time,speed\n0,0,1\n0,12,1/4\n1,0,1\n"
    given: dict[str, Any] = {
        **TWO,
        "availability_trace": path,
        "speed_trace": speeds,
        "checkpoint_seconds": 0,
        "eval_every": 1,
    }
    whole = fedpmt.run("fedavg", out=tmp_path / "whole", **given)

    def stop(record: Any) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedpmt.run("fedavg", out=tmp_path / "part", on_round=stop, **given)
    resumed = fedpmt.run("fedavg", out=tmp_path / "part", resume=True, **given)
    assert resumed.rounds == whole.rounds
    assert resumed.result is not None
    assert whole.result is not None
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    path.write_text(SHIFTS.replace("60", "61"))
    with pytest.raises(SettingError, match="digest"):
        fedpmt.run("fedavg", out=tmp_path / "part", resume=True, **given)


# Properties over random traces

gaps = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=5)


def intervals(lengths: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Gaps and lengths as intervals; a gap of 0 continues the one before."""
    ends = np.cumsum([number for pair in lengths for number in pair])
    return [(float(start), float(end)) for start, end in ends.reshape(-1, 2)]


@contextmanager
def federation(**settings: Any) -> Iterator[Federation]:
    resolved = api.settings_of({"method": "fedavg", "workers": 1, **TWO, **settings})
    with (
        tempfile.TemporaryDirectory() as folder,
        assemble(
            resolved, api.paper_problem_of(resolved), api.method_of(resolved), Path(folder)
        ) as assembled,
    ):
        yield assembled


def traces_of(clients: list[list[tuple[float, float]]]) -> Traces:
    rows = [
        {"client": client, "start": start, "end": end}
        for client, own in enumerate(clients)
        for start, end in own
    ]
    text = api.settings_of({**TWO, "devices": len(clients), "cohort": 1, "availability_trace": rows})
    found = make_traces(text, read_fleet([1.0] * len(clients)))
    assert found is not None
    return found


@given(st.lists(gaps, min_size=1, max_size=4), st.integers(0, 200))
@hypothesis_settings(max_examples=60, deadline=None)
def test_steps_are_what_the_intervals_say(lengths: list[list[tuple[int, int]]], now: int) -> None:
    clients = [intervals(own) for own in lengths]
    traces = traces_of(clients)
    open_ = [any(start <= now < end for start, end in own) for own in clients]
    reachable = traces.reachable(now)
    assert reachable is not None
    assert reachable.tolist() == open_
    later = [start for own in clients for start, _ in own if start > now]
    assert traces.next_start(now) == (now if any(open_) else min(later, default=math.inf))
    for client, own in enumerate(clients):
        first = min((start for start, end in own if end > now), default=math.inf)
        assert traces.next_start(now, [client]) == max(now, first)


@pytest.fixture(scope="module")
def fleet_of_four() -> Iterator[Federation]:
    with federation(devices=4, cohort=2, over_select=1.5, levels="1/2,1", deadline=18, rounds=50) as found:
        yield found


@given(st.lists(gaps, min_size=4, max_size=4))
@hypothesis_settings(max_examples=40, deadline=None)
def test_nobody_is_asked_or_counted_out_of_reach(
    fleet_of_four: Federation, lengths: list[list[tuple[int, int]]]
) -> None:
    """Rounds without training: who is asked can be reached then, who arrives can be until it has finished, and the
    clock never stands still or runs back."""
    clients = [intervals(own) for own in lengths]
    playing = replace(fleet_of_four, traces=traces_of(clients))
    progress = playing.start()
    while playing.ended(progress) is None:
        started = playing.wait(progress)
        now = started.virtual_seconds
        assert now >= progress.virtual_seconds
        round_, assignments = playing.open(started)
        verdict = playing.settle(assignments, round_)
        assert 1 <= len(assignments) <= 3
        for one, outcome in zip(assignments, verdict.outcomes, strict=True):
            assert any(start <= now < end for start, end in clients[one.device.id])
            there = joined_end(clients[one.device.id], now) >= now + one.seconds - 1e-6
            assert there == (outcome != "failed")
        assert verdict.round_seconds > 0
        progress = replace(started, rounds=started.rounds + 1, virtual_seconds=now + verdict.round_seconds)
    assert playing.ended(progress) == "unreachable"
    assert progress.virtual_seconds >= max(end for own in clients for _, end in own)


def joined_end(own: list[tuple[float, float]], now: float) -> float:
    """How long a device can be reached from now on, over intervals that touch."""
    end = now
    for start, until in own:
        end = until if start <= end < until else end
    return end


class Choosy(fedpmt.FedAvg):
    """Asks one device, always the same."""

    def cohort(self, state: Any, round: Any) -> list[int]:
        return [1]


def test_a_device_that_the_method_chose_is_waited_for(fleet_of_four: Federation) -> None:
    """Although others can be reached; once it never can be any more, rounds without it go on."""
    always = [(0.0, 100.0)]
    traces = traces_of([always, [(20.0, 60.0)], always, always])
    playing = replace(fleet_of_four, method=Choosy(), traces=traces)
    started = playing.wait(playing.start())
    assert started.virtual_seconds == 20
    assert [one.device.id for one in playing.open(started)[1]] == [1]
    gone = replace(started, virtual_seconds=70.0)
    assert playing.wait(gone) == gone
    assert playing.open(gone)[1] == []


# Names and refusals


def test_clients_go_by_their_name_their_devices_name_or_number() -> None:
    fleet = read_fleet([Device(name="pi", speed=1, count=2), Device(speed=1), Device(speed=1)])
    given = {"devices": 4, "cohort": 1, "speed_trace": "client,time,speed\npi,0,1\nann,0,2\n3,0,3\n"}
    traces = make_traces(resolve(given), fleet, ["bob", "carol", "ann", "dave"])
    assert traces is not None
    assert traces.speed is not None
    assert traces.speed.at(0.0).tolist() == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("", "has no rows"),
        ("0,5,5\n", "line 2: end must be > start"),
        ("0,5,4\n", "line 2: end must be > start"),
        ("0,5,9\n0,8,12\n", "line 3: start must be >= 9, where the interval before ends"),
        ("0,5,9\n1,0,9\n0,1,4\n", "line 4: start must be >= 9"),
        ("0,nan,9\n", "line 2: start must be a finite number >= 0 .got 'nan'"),
        ("0,0,inf\n", "line 2: end must be a finite number"),
        ("0,-1,9\n", "line 2: start must be a finite number >= 0"),
        ("0,,9\n", "line 2: start must be a finite number"),
        (",0,9\n", "line 2: client is empty"),
        ("0,0,9\n", "has no row for device 1"),
        ("0,0,9\n1,0,9\n2,0,9\n", "client = '2' is unknown"),
        ("0,0,9\n1,0,9\nzoe,0,9\n", "client = 'zoe' is unknown"),
        ("0,0,9,7\n", "line 2: '7' stands in no column"),
    ],
)
def test_availability_traces_that_are_refused(rows: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,start,end\n" + rows)
    refuse({"availability_trace": path}, f"^availability-trace = '{path}'.*{reason}", tmp_path)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("0,1,1\n", "line 2: the first time of '0' must be 0 .got 1"),
        ("0,0,1\n0,9,1\n0,8,2\n", "line 4: time must be > 9, the one before"),
        ("0,0,1\n0,0,2\n", "line 3: time must be > 0"),
        ("0,0,0\n", "line 2: speed = '0'"),
        ("0,0,-1\n", "line 2: speed = '-1'"),
        ("0,0,inf\n", "line 2: speed = 'inf'"),
        ("0,0,1\n", "has no row for device 1"),
    ],
)
def test_speed_traces_that_are_refused(rows: str, reason: str, tmp_path: Path) -> None:
    refuse({"speed_trace": "client,time,speed\n" + rows}, f"^speed-trace.*{reason}", tmp_path)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"speed_trace": "client,time,speed\n0,0,1\n", "drift": "2,10"}, "drift = '2,10' cannot be combined"),
        (
            {"speed_trace": "client,time,speed\n0,0,1\n", "level_draw": "round"},
            "level-draw = 'round' cannot be combined",
        ),
        ({"availability_trace": SHIFTS, "availability": 0.5}, "availability = 0.5 cannot be combined"),
        (
            {"availability_trace": SHIFTS, "fleet": [{"speed": 1, "count": 2, "availability": 0.5}]},
            "cannot be combined with availability, which the fleet states",
        ),
        (
            {"availability_trace": "none.csv"},
            "availability-trace = 'none.csv' cannot be read: .*No such file",
        ),
        ({"speed_trace": "client,when,speed\n0,0,1\n"}, "column = 'when' is unknown"),
        ({"speed_trace": "client,speed\n0,1\n"}, "has no column 'time'"),
    ],
)
def test_traces_that_do_not_go_with_the_rest(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    refuse(given, reason, tmp_path)


def refuse(given: dict[str, Any], reason: str, folder: Path) -> None:
    with pytest.raises(SettingError, match=reason) as refused:
        fedpmt.run("fedavg", out=folder / "new", **{**TWO, **given})
    assert "\n" not in str(refused.value)
    assert not (folder / "new").exists()


def test_readers_say_where_a_trace_is_wrong() -> None:
    """Rows given in Python go by their position."""
    with pytest.raises(SettingError, match=r"^availability-trace\[1\]: end must be"):
        read_availability([{"client": 0, "start": 0, "end": 1}, {"client": 0, "start": 2, "end": 2}])
    with pytest.raises(SettingError, match=r"^speed-trace\[0\]: speed = ''"):
        read_speeds(pd.DataFrame({"client": ["a"], "time": [0.0], "speed": [None]}))
