"""Numbers computed by hand from runs whose rounds last 10 s and send 100 bytes up and 200 down."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import SETTINGS, comparison, device, run, step, wrap

from fedpmt.report import (
    Spread,
    default_targets,
    first_reaching,
    group_runs,
    run_labels,
    summary,
    tidy,
    time_to_target,
    write_csv,
)
from fedpmt.report.groups import common_settings, differing_settings
from fedpmt.report.quantities import bytes_unit, count_unit, percent_unit, show, split, time_unit
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_target_counts_from_the_first_evaluation_at_or_above_it() -> None:
    """0.5 is met exactly in round 3 after 30 s and 300 bytes; the fall in round 4 changes nothing."""
    [row] = time_to_target([run([0.2, None, 0.5, 0.4, 0.9])], [0.5])
    assert (row.reached, row.runs) == (1, 1)
    assert row.rounds == Spread(3, 0, 3, 3, 1)
    assert row.seconds == Spread(30, 0, 30, 30, 1)
    assert row.bytes_up == Spread(300, 0, 300, 300, 1)
    assert row.texts() == {
        "run": "fedpmt", "target": "50 %", "reached": "1 of 1", "round": "3",
        "virtual time": "30 s", "uploaded": "300 B",
    }  # fmt: skip


def test_a_target_never_met_is_none_and_shown_as_a_dash() -> None:
    [row] = time_to_target([run([0.2, 0.4])], [0.5])
    assert (row.rounds, row.seconds, row.bytes_up, row.reached) == (None, None, None, 0)
    assert {row.texts()[name] for name in ("round", "virtual time", "uploaded")} == {"-"}
    assert first_reaching(run([]), 0.5) is None


def test_seeds_are_one_group_with_mean_and_sample_deviation() -> None:
    """Rounds 2 and 4: mean 3, deviation sqrt(((2-3)^2 + (4-3)^2) / 1) = 1.414; the third seed never gets there."""
    runs = [run([0.1, 0.6], seed=0), run([0.1, 0.1, 0.1, 0.6], seed=1), run([0.1], seed=2)]
    [row] = time_to_target(runs, [0.6])
    assert (row.reached, row.runs) == (2, 3)
    assert row.rounds is not None
    assert (row.rounds.mean, row.rounds.low, row.rounds.high, row.rounds.count) == (3, 2, 4, 2)
    assert row.rounds.deviation == pytest.approx(math.sqrt(2))
    assert row.seconds is not None
    assert row.seconds.mean == 30


@pytest.mark.parametrize("target", [0.0, -0.1, 1.5, 90.0, math.nan])
def test_a_target_that_is_no_accuracy_is_refused(target: float) -> None:
    with pytest.raises(SettingError, match="target must be > 0 and <= 1 for an accuracy"):
        time_to_target([run([0.5])], [target])


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        (0.97, (0.7, 0.8, 0.85, 0.9, 0.95)),
        (0.9, (0.6, 0.7, 0.8, 0.85, 0.9)),
        (0.63, (0.4, 0.5, 0.6)),
        (0.31, (0.2, 0.3)),
        (0.05, ()),
    ],
)
def test_default_targets_are_round_reached_and_few(best: float, expected: tuple[float, ...]) -> None:
    assert default_targets([run([0.01, best]), run([None], method="fedavg")]) == expected


def test_default_targets_without_any_accuracy() -> None:
    assert default_targets([run([None, None]), run([])]) == ()


def test_summary_adds_up() -> None:
    """Two rounds of 100 bytes up, 200 down and 1000 operations, 250 of them wasted; 3 of 4 replies counted."""
    steps = (
        step(1, 0.7, loss=1.0),
        step(2, 0.6, loss=0.8, wasted_operations=250.0, devices=(device(1), device(2, "late"))),
    )
    [row] = summary([wrap(steps, SETTINGS, "run")])
    assert (row.runs, row.finished) == (1, 1)
    found = {
        name: getattr(row, name).mean for name in ("rounds", "score", "best_score", "loss", "virtual_seconds")
    }
    assert found == {"rounds": 2, "score": 0.6, "best_score": 0.7, "loss": 0.8, "virtual_seconds": 20}
    sums = {
        name: getattr(row, name).mean
        for name in ("bytes_up", "bytes_down", "operations", "wasted_share", "counted_share")
    }
    assert sums == {
        "bytes_up": 200,
        "bytes_down": 400,
        "operations": 2000,
        "wasted_share": 0.125,
        "counted_share": 0.75,
    }
    assert row.texts()["replies counted"] == "75.0 %"


def test_summary_of_a_run_without_rounds() -> None:
    [row] = summary([run([], finished=False)])
    assert (row.score, row.counted_share, row.finished) == (None, None, 0)
    assert row.texts()["accuracy"] == "-"
    assert row.texts()["runs"] == "1 (0 finished)"


def test_summary_falls_back_to_the_result_where_rounds_are_lost() -> None:
    whole = run([0.5, 0.9])
    [row] = summary([whole.model_copy(update={"rounds": ()})])
    assert row.score is not None
    assert row.bytes_up is not None
    assert (row.score.mean, row.bytes_up.mean) == (0.9, 200)


def test_labels_name_only_what_differs() -> None:
    assert run_labels([run([0.5])]) == ["fedpmt"]
    assert run_labels([run([0.5], method=name) for name in ("fedpmt", "fedavg")]) == ["fedpmt", "fedavg"]
    assert run_labels([run([0.5], seed=seed) for seed in (0, 3)]) == ["fedpmt · seed 0", "fedpmt · seed 3"]
    runs = [run([0.5], partition=name, deadline=end) for name in ("iid", "classes:2") for end in (20.0, None)]
    assert run_labels(runs) == [
        "fedpmt · deadline 20 · iid",
        "fedpmt · no deadline · iid",
        "fedpmt · deadline 20 · classes:2",
        "fedpmt · no deadline · classes:2",
    ]


def test_what_a_panel_or_a_method_brings_with_it_stays_out_of_labels() -> None:
    runs = [
        run([0.5], data="embedded", batch=10),
        run([0.5], data="mnist", batch=12),
        run([0.5], data="mnist", batch=12, method="feddrop", options={"scale": True}),
    ]
    assert run_labels(runs) == ["fedpmt · embedded", "fedpmt · mnist", "feddrop · mnist"]
    runs.append(run([0.5], data="mnist", batch=12, method="feddrop", options={"scale": False}))
    assert run_labels(runs)[2:] == ["feddrop · scale yes · mnist", "feddrop · scale no · mnist"]


def test_equal_runs_are_told_apart_by_folder_and_then_by_place() -> None:
    assert run_labels([run([0.5], "a"), run([0.5], "b")]) == ["fedpmt · a", "fedpmt · b"]
    assert run_labels([run([0.5], "a"), run([0.5], "a")]) == ["fedpmt · a · run 1", "fedpmt · a · run 2"]


def test_how_a_run_was_computed_parts_no_groups() -> None:
    assert len(group_runs([run([0.5], workers=1), run([0.5], workers=4)])) == 1
    assert differing_settings([run([0.5], workers=1), run([0.5], workers=4)]) == []


def test_an_unset_and_an_absent_setting_are_the_same() -> None:
    older = {key: value for key, value in SETTINGS.items() if key != "depths"}
    assert len(group_runs([run([0.5]), run([0.5], settings=older)])) == 1


def test_common_settings_are_those_of_all() -> None:
    common = common_settings([run([0.5], seed=0), run([0.5], seed=1)])
    assert "seed" not in common
    assert common["deadline"] == "26.5"


@settings(max_examples=25)
@given(st.permutations(range(8)))
def test_each_run_is_in_exactly_one_group(order: list[int]) -> None:
    runs = [
        run([0.5], method=method, partition=partition, seed=seed)
        for method in ("fedpmt", "fedavg")
        for partition in ("iid", "classes:2")
        for seed in (0, 1)
    ]
    groups = group_runs([runs[place] for place in order])
    assert len(groups) == 4
    assert sorted(id(one) for group in groups for one in group.runs) == sorted(map(id, runs))
    assert len({group.label for group in groups}) == 4


def test_tidy_has_totals_and_the_same_columns_in_every_row() -> None:
    other = wrap(
        (step(1, 0.4, layers={"conv": 3}, metrics={"norm": 1.5}, score_by_class={"0": 0.4}),),
        {**SETTINGS, "method": "x"},
        "b",
    )
    rows = tidy([run([0.1, None, 0.3], "a"), other])
    assert len(rows) == 4
    assert len({tuple(row) for row in rows}) == 1
    assert [row["total_bytes_up"] for row in rows] == [100, 200, 300, 100]
    assert [row["total_operations"] for row in rows] == [1000, 2000, 3000, 1000]
    assert [row["accuracy"] for row in rows] == [0.1, None, 0.3, 0.4]
    assert [row["layer:conv"] for row in rows] == [None, None, None, 3]
    assert [row["metric:norm"] for row in rows] == [None, None, None, 1.5]
    assert (rows[0]["asked"], rows[0]["arrived"], rows[0]["late"], rows[0]["layer:fc2"]) == (2, 2, 0, 2)


def test_csv_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.csv"
    write_csv(comparison(rounds=3), path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 2 * 3
    assert {row["method"] for row in rows} == {"fedpmt", "fedavg", "feddrop"}
    assert [path.name for path in path.parent.iterdir()] == ["table.csv"]


def test_csv_without_rounds_is_a_header(tmp_path: Path) -> None:
    write_csv([run([], finished=False)], tmp_path / "table.csv")
    [header] = (tmp_path / "table.csv").read_text().splitlines()
    assert header.startswith("run,folder,method")


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="cannot be written"):
        write_csv([run([0.5])], tmp_path / "file" / "table.csv")


def test_tables_load_neither_matplotlib_nor_torch() -> None:
    code = "import sys, fedpmt.report; sys.exit(bool({'matplotlib', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_read_well() -> None:
    assert show(8.4, time_unit) == "8.40 s"
    assert show(7500.0, time_unit) == "2.08 h"
    assert show(1_234_567.0, bytes_unit) == "1.23 MB"
    assert show(15.9e9, count_unit) == "15.9 G"
    assert show(1.0, percent_unit) == "100.0 %"
    assert show(Spread.of([60.0, 60.0])) == "60"
    assert show(Spread.of([120.0, 126.0]), bytes_unit) == "123 ± 4 B"
    assert split(None) == ("-", "", "")
    assert show(math.inf) == "-"
    assert Spread.of([None, math.nan]) is None
