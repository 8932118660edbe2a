"""Plans: which depth a device gets, how parts are matched to it, and depths that follow measured seconds."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import fedpmt
from fedpmt import api
from fedpmt.cli.main import program
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
    assert "5.95 MiB of memory, more than any device has" in str(table.note)


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


@pytest.mark.parametrize(
    ("method", "given", "reason"),
    [
        ("fedpmt", {"deadline": 1.0}, r"^deadline must be >= 4.21, .* \(got 1\)$"),
        ("fedavg", {"deadline": 8.0}, r"^deadline must be >= 10, .* with fedavg"),
        ("fedpmt", {"deadline": 1.0, "budget": "time"}, r"^deadline must be >= 4.21"),
        ("fedpmt", {"fleet": [{"speed": 1, "count": 6, "memory_mib": 1}]}, "^memory_mib must be .*2.17 MiB"),
    ],
)
def test_a_deadline_or_memory_that_nobody_has_is_refused(
    method: str, given: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=reason):
        api.run(method, **SMALL, **given, out=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    if method == "fedpmt":
        with pytest.raises(SettingError, match=reason):
            fedpmt.plan(**given, samples=20)


def test_in_a_comparison_one_method_may_miss_the_deadline_with_all_devices() -> None:
    runs = fedpmt.compare(["fedpmt", "fedavg"], **SMALL, deadline=8.0)
    outcomes = [{one.outcome for step in run.rounds for one in step.devices} for run in runs]
    assert outcomes == [{"arrived", "late"}, {"late"}]
    with pytest.raises(SettingError, match=r"deadline must be >= 4\.21"):
        fedpmt.compare(["fedpmt", "fedavg"], **SMALL, deadline=1.0)


FLEET = [
    fedpmt.Device(name="slow", speed=0.01, count=2),
    fedpmt.Device(name="far", speed=0.2, count=3, uplink_mbps=0.2),
    fedpmt.Device(name="pi", speed=0.2, count=5),
    fedpmt.Device(name="small", speed=1, count=4, memory_mib=3),
    fedpmt.Device(name="fast", speed=1, count=6),
]


def test_a_plan_says_what_binds_whom_and_what_would_help() -> None:
    """Depth 1 takes 420 s on the slow ones and 21 s on the pi; depth 2 24.4 s there, and 13 s on the slow link."""
    table = fedpmt.plan(fleet=FLEET, deadline=30)
    assert {row.name: (row.fits, row.binds) for row in table.devices} == {
        "slow": (False, ("time",)),
        "far": (True, ("upload",)),
        "pi": (True, ("time",)),
        "small": (True, ("memory",)),
        "fast": (True, ()),
    }
    assert table.least_deadline == pytest.approx(420, rel=0.01)
    # 6 of 20 devices train depths 3 and 4, 15 depth 2, and 18 depth 1; two of them take no part.
    assert table.psi == pytest.approx(20 / 18 + 20 / 15 + 20 / 6 + 20 / 6)
    assert table.more_time is not None
    assert (table.more_time.name, table.more_time.devices, table.more_time.trains_from) == ("pi", 5, "fc2")
    better = fedpmt.plan(fleet=FLEET, deadline=table.more_time.amount)
    assert better.psi == pytest.approx(table.more_time.psi)
    assert fedpmt.plan(fleet=FLEET, deadline=0.999 * table.more_time.amount).psi == pytest.approx(table.psi)
    assert table.more_memory is not None
    assert (table.more_memory.name, table.more_memory.trains_from) == ("small", "fc2")
    more = [
        *FLEET[:3],
        fedpmt.Device(name="small", speed=1, count=4, memory_mib=table.more_memory.amount / 2**20),
    ]
    assert fedpmt.plan(fleet=[*more, FLEET[4]], deadline=30).psi == pytest.approx(table.more_memory.psi)
    text = " ".join(str(table).split())
    for said in (
        "2 of 20 devices take no part: slow (time).",
        "psi is 9.11, and 4 if every device trained every layer: in theory, the error after the same number of "
        "rounds is about 2.28 times as large.",
        f"With --deadline {math.ceil(10 * table.more_time.amount) / 10:g}, 5 of pi train from fc2 on",
        "With 3.56 MiB of memory on small, 4 of small train from fc2 on",
        "Speed 1 trains one epoch of the full model on 80 samples in 10 s.",
    ):
        assert said in text
    assert "kB of memory" not in text
    assert fedpmt.plan(fleet=FLEET, deadline=1e4).psi == 4.5
    assert "psi is 4, its smallest value" in str(fedpmt.plan(levels="1"))


def test_a_budget_binds_too_and_does_not_hide_the_deadline() -> None:
    table = fedpmt.plan(fleet=FLEET, deadline=30, budget="upload=0.2")
    assert {row.name: row.binds for row in table.devices if row.fits} == {
        "pi": ("upload",),
        "small": ("memory", "upload"),
        "fast": ("upload",),
    }
    assert {row.name: row.binds for row in table.devices if not row.fits} == {
        "slow": ("time",),
        "far": ("upload",),
    }
    assert table.more_time is None
    by_level = fedpmt.plan(levels="1/4,1/3,1/2,1", assign="level")
    assert [row.binds for row in by_level.devices] == [("level",)] * 3 + [()]


def test_without_a_deadline_an_own_models_plan_leaves_nobody_out() -> None:
    """Depths were once fitted to the two samples of the example."""
    net = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
    fleet = [{"speed": 0.1}, {"speed": 1, "uplink_mbps": 0.1}]
    table = fedpmt.plan(net, torch.zeros(2, 12), fleet=fleet, samples=80)
    assert all(row.fits for row in table.devices)
    assert table.deadline == pytest.approx(table.least_deadline)


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


@pytest.mark.parametrize(
    ("deadline", "said"),
    [
        (
            20,
            "Each trains the deepest part that leaves 50 % of its steps or more; one layer more would leave",
        ),
        (5, "30 devices have too little for that: they train the smallest part"),
        (
            1,
            "No device can train the deepest part that leaves 50 % of its steps or more: each trains the smallest",
        ),
    ],
)
def test_a_traded_plan_says_for_whom_it_leaves_the_share_of_the_steps(deadline: float, said: str) -> None:
    """And nothing of the theory's error, which is for equal steps."""
    table = fedpmt.plan(plan="traded", samples=240, batch=10, deadline=deadline)
    text = " ".join(str(table).split())
    assert said in text
    assert "in theory" not in text
    fewer = sum(row.devices for row in table.devices if row.steps < 12)
    assert ("too little" in text) == (0 < fewer < 50)


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


@pytest.mark.slow
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
    able = planner.fits_of(fleet, planner.depths[0], 80)
    shares = np.bincount(planner.depths_of(fleet, 80)[able] - 1, minlength=4) / 5000
    assert 0 < shares.sum() < 1
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


def test_a_measured_machine_agrees_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One way through the settings: what `fedpmt profile` measures and what `fedpmt plan` says.

    The plan reads the rows as they were written, and its seconds are those that were measured.
    """
    given: dict[str, Any] = {"data": "synthetic", "samples": 100, "epochs": 2}
    flags, path = ["--data", "synthetic", "--samples", "100", "--epochs", "2"], tmp_path / "fleet.csv"
    for name in ("pi", "phone"):
        add = ["profile", *flags, "--repeat", "1", "--name", name, "--out", str(path), "--json"]
        assert program(add) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    (row,) = (one for one in fedpmt.plan(fleet=path, deadline=1e6, **given).devices if one.name == "pi")
    measured = found["depths"]
    assert row.seconds == pytest.approx(2 * 100 * measured[-1]["seconds_per_sample"], rel=1e-5)
    assert program(add) == 2
    assert f"name must not be in '{path}' yet (got 'phone')" in capsys.readouterr().err
    with pytest.raises(SettingError, match="the speed of 'pi' was measured for 'fcnn-mnist: 100 samples"):
        fedpmt.plan(fleet=path, **{**given, "samples": 80})
    assert path.read_text().count("\n") == 3
    settings = api.settings_of(given)
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
