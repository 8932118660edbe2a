"""Plans: which depth a device gets, how parts are matched to it, and depths that follow measured seconds."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fedpmt
from fedpmt import api, prices
from fedpmt.devices.fleet import Device, drifted, make_fleet
from fedpmt.pricing.matching import match_keep
from fedpmt.simulation.assemble import make_price, plan
from fedpmt.simulation.bookkeeping import clamp_seconds, fit_speed
from fedpmt.training.local import local_settings
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.pricing.plan_table import PlanTable
    from fedpmt.records import RunRecord


SMALL: dict[str, Any] = {
    "data": "synthetic",
    "devices": 6,
    "cohort": 6,
    "samples": 20,
    "rounds": 2,
    "eval_every": 2,
}


def depths(table: PlanTable) -> list[int]:
    return [row.depth for row in table.devices]


@pytest.mark.parametrize(
    ("levels", "expected", "seconds"),
    [
        # A full model takes 10 s at speed 1, and depths 1 to 4 take 0.419, 0.487, 0.636 and 1 of that.
        ("1", [4], 10.0),
        ("0.9,1", [3, 4], 10.0),
        ("1/2,1", [2, 4], 10.0),
        ("1/3,1", [1, 4], 12.6),
        # As before there was a second condition: what the slowest needs for its smallest depth.
        ("1/5,1/4,1/3,1/2,1", [1, 2, 3, 4, 4], 21.0),
    ],
)
def test_without_a_deadline_nobody_is_left_out_and_the_fastest_train_everything(
    levels: str, expected: list[int], seconds: float
) -> None:
    table = fedpmt.plan(levels=levels)
    assert depths(table) == expected
    assert table.deadline == pytest.approx(seconds, abs=0.05)
    assert all(row.fits for row in table.devices)
    assert (table.uncovered, table.note) == ((), None)


def test_devices_of_one_speed_train_as_fedavg_does() -> None:
    runs = [api.run(method, **SMALL, levels="1") for method in ("fedpmt", "fedavg")]
    fedpmt, fedavg = (run.result.weights_sha256 for run in runs if run.result is not None)
    assert fedpmt == fedavg


def test_without_a_deadline_memory_decides_who_trains_everything(tmp_path: Path) -> None:
    """Depths 1 to 4 take 2.5, 2.8, 3.8 and 6.2 MB; the board is the only one that holds the whole model."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("name,speed,memory_mib\nboard,1/2,64\nphone,1,3\n")
    table = fedpmt.plan(fleet=fleet)
    assert {row.name: row.depth for row in table.devices} == {"board": 4, "phone": 2}
    assert table.deadline == pytest.approx(20.0)
    fleet.write_text("name,speed,memory_mib\nboard,1/2,4\nphone,1,3\n")
    table = fedpmt.plan(fleet=fleet)
    assert {row.name: row.depth for row in table.devices} == {"board": 3, "phone": 2}
    assert table.uncovered == ("fc1",)
    assert "6.2 MB of memory, more than any device has" in str(table.note)


@pytest.mark.parametrize(
    ("method", "given", "layers", "advice"),
    [
        ("fedpmt", {"deadline": 8.0}, "trains fc1, ", "set --deadline to 10 or more"),
        ("fedpmt", {"budget": "operations=0.5"}, "trains fc1 and fc2, ", "allow more with --budget"),
        ("fedpmt", {"deadline": 8.0, "splitting": "device"}, "trains fc1, ", "set --deadline to 10 or more"),
        ("fedpmt", {"deadline": 10.0}, "", ""),
        ("fedpmt", {"deadline": 30.0, "level_draw": "round"}, "", ""),
        ("heterofl", {"deadline": 21.0}, "", ""),
    ],
)
def test_a_run_says_which_layers_nobody_trains(
    method: str, given: dict[str, Any], layers: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedpmt"):
        run = api.run(method, **SMALL, **given)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(layers)
    assert all(layers in line and advice in line for line in said)
    # As the records of the rounds have it.
    never = [name for name in run.rounds[0].layers if not any(step.layers[name] for step in run.rounds)]
    assert all(name in layers for name in never)
    assert bool(never) == bool(layers)


@pytest.mark.parametrize(("method", "deadline", "needed"), [("fedpmt", 1.0, "4.3"), ("fedavg", 8.0, "10")])
def test_a_deadline_that_nobody_meets_is_refused(
    method: str, deadline: float, needed: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=f"deadline must be >= {needed}, .* with {method}"):
        api.run(method, **SMALL, deadline=deadline, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_memory_that_nobody_has_is_refused() -> None:
    with pytest.raises(SettingError, match="no device has the memory for what fedavg lets it train"):
        api.run(
            "fedavg",
            **{**SMALL, "devices": 2, "cohort": 2},
            fleet=[{"speed": 1, "memory_mib": 1, "count": 2}],
        )


# Depths 1 to 4 of FCNN-MNIST take 0.419, 0.487, 0.636 and 1 of the full model's operations.
TRADED = [
    # Level 1 has 10 s x 0.419 x 5 = 21 s, which is 0.42 of the full model's steps and 0.66 of depth 3's.
    (0.5, [3, 4, 4, 4, 4], [15, 12, 16, 24, 24]),
    (0.7, [2, 3, 3, 4, 4], [20, 19, 24, 24, 24]),
    (1.0, [1, 2, 3, 4, 4], [24, 24, 24, 24, 24]),
    (0.0, [4, 4, 4, 4, 4], [10, 12, 16, 24, 24]),
]


@pytest.mark.parametrize(("share", "depth", "steps"), TRADED)
def test_a_traded_plan_is_the_deepest_part_that_leaves_a_share_of_the_steps(
    share: float, depth: list[int], steps: list[int]
) -> None:
    table = fedpmt.plan(plan="traded", samples=240, batch=10, options={"share": share})
    assert depths(table) == depth
    assert [row.steps for row in table.devices] == steps
    assert all(row.all_steps == 24 and row.fits and row.steps >= share * 24 for row in table.devices)
    # One layer more would leave too few of them.
    assert all(row.deeper_steps is None or row.deeper_steps < share * 24 for row in table.devices)
    assert table.round_seconds <= fedpmt.plan(samples=240, batch=10).round_seconds * (1 + 1e-9)


def traded(**given: Any) -> RunRecord:
    return api.run("fedpmt", **{**SMALL, "plan": "traded", "batch": 5, **given})


def hashes(*runs: RunRecord) -> set[str]:
    return {run.result.weights_sha256 for run in runs if run.result is not None}


def test_traded_plans_reduce_to_the_papers_and_to_fedavg() -> None:
    """With all steps or none to lose, or devices that can do everything, there is nothing to trade."""
    paper = api.run("fedpmt", **SMALL, batch=5, budget="operations")
    assert len(hashes(paper, traded(options={"share": 1.0}, budget="operations"))) == 1
    assert len(hashes(paper, traded(budget="operations"))) == 2
    assert len(hashes(api.run("fedavg", **SMALL, batch=5), traded(levels="1"))) == 1


@pytest.mark.parametrize("plan", ["traded", "rotated"])
@pytest.mark.parametrize("budget", ["operations", "time", "operations=0.3", "memory=4MB"])
def test_no_device_exceeds_its_budget(plan: str, budget: str) -> None:
    run = traded(plan=plan, budget=budget, epochs=2, options={"every": 2} if plan == "rotated" else {})
    devices = [device for step in run.rounds for device in step.devices]
    assert devices
    assert not any(device.over_budget for device in devices)


def test_a_device_too_slow_for_anything_takes_part_with_fewer_samples() -> None:
    """Its smallest part takes 21 s; within 6 s it takes one step of four, and arrives."""
    given: dict[str, Any] = {"levels": "1/5,1", "deadline": 6.0}
    late, counted = api.run("fedpmt", **SMALL, batch=5, **given), traded(**given)
    outcomes = [{one.level: one.outcome for one in run.rounds[0].devices} for run in (late, counted)]
    assert outcomes == [{1: "late", 2: "arrived"}, {1: "arrived", 2: "arrived"}]
    assert {one.part for one in counted.rounds[0].devices if one.level == 1} == {"depth 1, 1 of 4 steps"}


def test_a_rotated_plan_trains_all_layers_as_often_as_it_says() -> None:
    run = traded(plan="rotated", budget="operations", rounds=100, levels="1/5,1", options={"every": 3})
    parts = [device.part for step in run.rounds for device in step.devices if device.level == 1]
    share = sum(part.startswith("depth 4") for part in parts) / len(parts)
    assert share == pytest.approx(1 / 3, abs=0.07)


def test_fewer_steps_cost_what_they_compute() -> None:
    """Kept outputs of frozen layers are made once for the samples that are seen, whatever the number of steps."""
    settings = api.settings_of({**SMALL, "epochs": 4, "batch": 5, "prefix": "cache", "method": "fedpmt"})
    planner = plan(settings, api.paper_problem_of(settings), make_fleet(settings))
    part, price = planner.depths[0], planner.price
    meter, cost = planner.meter(Device(0, 1, 1.0), 20), price(part)
    batches, rest = 4, cost.operations - cost.prefix
    for steps in (1, 4, 8, 16):
        expected = min(steps, batches) * cost.prefix + steps * rest
        assert meter.usage(part, steps).operations == pytest.approx(expected)


@pytest.mark.parametrize(
    ("method", "given", "reason"),
    [
        ("fedavg", {"plan": "traded"}, "plan = 'traded' is FedPMT's; fedavg has no plan"),
        ("fedpmt", {"plan": "traded", "splitting": "device"}, "needs speeds that the server does not know"),
        ("fedpmt", {"plan": "deep"}, "plan"),
        ("fedpmt", {"plan": "traded", "options": {"share": 2}}, "share must be >= 0 and <= 1"),
        ("fedpmt", {"plan": "rotated", "options": {"every": 0}}, "every must be >= 1"),
        ("fedpmt", {"score_on": "validation"}, "needs validation data"),
    ],
)
def test_plans_that_cannot_be(method: str, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        api.run(method, **{**SMALL, **given})


def test_in_a_comparison_a_plan_is_for_those_that_have_one() -> None:
    runs = fedpmt.compare(["fedpmt", "fedavg"], **{**SMALL, "plan": "traded", "batch": 5})
    assert {run.settings["method"]: run.settings["plan"] for run in runs} == {
        "fedpmt": "traded",
        "fedavg": "paper",
    }


def test_scores_of_validation_data_are_not_of_the_test_set() -> None:
    given: dict[str, Any] = {**SMALL, "data": "embedded", "validation": 0.2, "samples": 20}
    tested, validated = (api.run("fedavg", **given, score_on=one) for one in ("test", "validation"))
    assert len(hashes(tested, validated)) == 1
    assert tested.result is not None
    assert validated.result is not None
    assert validated.result.score is not None
    assert tested.result.score != validated.result.score
    # A fifth of 4,000 images.
    assert (validated.result.score * 800) % 1 == pytest.approx(0, abs=1e-6)


def test_many_kinds_are_shown_by_level_and_counted_one_by_one() -> None:
    given: dict[str, Any] = {"levels": "lognormal:0.7", "devices": 5000, "deadline": 30}
    settings, table = api.settings_of(given), fedpmt.plan(**given)
    assert sum(row.devices for row in table.devices) == 5000
    assert len(table.devices) < 30
    problem = api.paper_problem_of(settings.model_copy(update={"data": "synthetic"}))
    planner = plan(settings, problem, make_fleet(settings))
    fleet = make_fleet(settings)
    depths = [
        planner.depths.index(planner.depth(fleet.device(device), 80)) + 1 for device in range(0, 5000, 50)
    ]
    assert depths == planner.depths_of(fleet, 80)[::50].tolist()
    shares = np.bincount(planner.depths_of(fleet, 80) - 1, minlength=4) / 5000
    assert table.psi == pytest.approx(sum(1 / shares[depth:].sum() for depth in range(4)))


def test_frozen_layers_outputs_are_kept_where_they_are_used_again() -> None:
    """`prefix = auto`: training, prices and profiles all ask the settings."""
    kept = {
        (prefix, epochs): api.settings_of({"prefix": prefix, "epochs": epochs}).keeps_prefix
        for prefix in ("auto", "cache", "recompute")
        for epochs in (1, 2)
    }
    assert [case for case, keeps in kept.items() if keeps] == [("auto", 2), ("cache", 1), ("cache", 2)]
    assert api.settings_of({}).prefix == "auto"
    for epochs, word in ((1, "recompute"), (2, "cache")):
        settings = api.settings_of({"epochs": epochs, "data": "synthetic"})
        assert local_settings(settings).prefix == word
        assert make_price(settings, api.paper_problem_of(settings)).cached == (word == "cache")


def test_a_measured_machine_agrees_with_the_plan() -> None:
    """One way through the settings: what `fedpmt profile` measures and what `fedpmt plan` says."""
    given: dict[str, Any] = {"data": "synthetic", "samples": 100, "epochs": 2}
    settings, measured = api.settings_of(given), prices.profile(**given, repeat=1)["depths"]
    planner = plan(settings, api.paper_problem_of(settings), make_fleet(settings))
    priced = [planner.price(part).memory_bytes for part in planner.depths]
    assert priced == pytest.approx([row["peak_bytes"] for row in measured], rel=0.02)


def test_agrees_with_a_search_over_the_whole_grid() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        power, budget = rng.uniform(1, 3), rng.uniform(0, 1200)
        costs = {step / 100: 1000 * (step / 100) ** power for step in range(10, 101)}
        keep, fits = match_keep(lambda rate, power=power: 1000 * rate**power, budget)  # type: ignore[misc]
        assert abs(costs[keep] - budget) == min(abs(cost - budget) for cost in costs.values())
        assert fits == (costs[0.1] <= budget)


def test_asks_for_few_prices() -> None:
    asked: list[float] = []
    match_keep(lambda keep: asked.append(keep) or keep, 0.777)  # type: ignore[func-returns-value]
    assert len(asked) <= 8


def test_of_two_equally_near_rates_takes_the_cheaper() -> None:
    assert match_keep(lambda keep: round(100 * keep), 33.5) == (0.33, True)


def test_ends_of_the_grid() -> None:
    assert match_keep(lambda keep: keep, math.inf) == (1.0, True)
    assert match_keep(lambda keep: keep, 0.1) == (0.1, True)
    assert match_keep(lambda keep: keep, 0.0999) == (0.1, False)


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
