"""Depths that follow measured seconds, against a virtual fleet whose speeds drift."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fedpmt import api
from fedpmt.devices.fleet import Device, drifted
from fedpmt.pricing.adaptive import clamp_seconds, fit_speed
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord

RUN: dict[str, Any] = {
    "method": "fedpmt",
    "data": "synthetic",
    "task": "fcnn-mnist",
    "devices": 5,
    "cohort": 5,
    "samples": 20,
    "batch": 20,
    "rounds": 40,
    "eval_every": 40,
    "levels": "1/5,1/4,1/3,1/2,1",
    "deadline": 75.0,
    "full_seconds": 10.0,
}


def late(run: RunRecord, first: int = 0) -> int:
    return sum(one.outcome == "late" for step in run.rounds[first:] for one in step.devices)


def test_the_newest_measurement_counts_by_its_weight() -> None:
    """10 s and then 20 s for the same work: 15 s at half weight, so two thirds of the speed."""
    assert fit_speed(1.0, 0.5, 0.5) == pytest.approx(2 / 3)
    speed = 1.0
    for _ in range(30):
        speed = fit_speed(speed, 0.2, 0.5)
    assert speed == pytest.approx(0.2)


def test_speeds_swing_around_what_is_stated() -> None:
    speeds = [drifted(Device(3, 1, 0.5), (2.0, 20.0), round_index, seed=0).speed for round_index in range(20)]
    assert max(speeds) == pytest.approx(1.0, rel=0.02)
    assert min(speeds) == pytest.approx(0.25, rel=0.02)


def test_true_speeds_are_found_where_stated_ones_are_wrong(tmp_path: Path) -> None:
    """The swing is so slow that speeds stand still, at other values than stated."""
    given = {**RUN, "drift": "3,100000", "rounds": 15, "eval_every": 15}
    stated = api.run(**given, out=tmp_path / "stated")
    adaptive = api.run(**given, speeds="measured", out=tmp_path / "measured")
    assert late(stated, 10) > 0
    assert late(adaptive, 10) == 0


def test_drift_is_followed(tmp_path: Path) -> None:
    given = {**RUN, "drift": "2.5,40", "rounds": 40, "eval_every": 40}
    stated = api.run(**given, out=tmp_path / "stated")
    adaptive = api.run(**given, speeds="measured", speed_weight=0.8, out=tmp_path / "measured")
    assert late(adaptive, 5) < 0.4 * late(stated, 5)
    # The slowest device trains everything while it is fast, and less while it is slow.
    parts = {one.part for step in adaptive.rounds for one in step.devices if one.device == 0}
    assert len(parts) > 1
    assert "depth 4" in parts


def test_a_resume_remembers_what_was_measured(tmp_path: Path) -> None:
    given = {
        **RUN,
        "drift": "2,10",
        "speeds": "measured",
        "rounds": 6,
        "eval_every": 1,
        "checkpoint_seconds": 0,
    }
    whole = api.run(**given, out=tmp_path / "whole")

    def stop(record: Any) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.run(**given, out=tmp_path / "part", on_round=stop)
    resumed = api.run(**given, out=tmp_path / "part", resume=True)
    assert [[one.part for one in step.devices] for step in resumed.rounds] == [
        [one.part for one in step.devices] for step in whole.rounds
    ]
    assert resumed.result is not None
    assert whole.result is not None
    assert resumed.result.weights_sha256 == whole.result.weights_sha256


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"drift": "0.5,10"}, "a factor of at least 1"),
        ({"drift": "2"}, "write FACTOR,ROUNDS"),
        ({"speeds": "measured", "splitting": "device"}, "needs a server that fits depths"),
        ({"speed_weight": 0}, "speed-weight = '0' is refused"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        api.settings_of(given)


@pytest.mark.parametrize("late", [None, 120.0])
@pytest.mark.parametrize("seconds", [5e-324, 1.0, 1.79e308])
def test_speeds_stay_numbers_to_plan_with_whatever_seconds_are_reported(
    seconds: float, late: float | None
) -> None:
    speed = fit_speed(1.0, 10.0 / clamp_seconds(seconds, late), 1.0)
    assert 1e-9 < speed < 1e9
    assert clamp_seconds(1.0, late) == 1.0
