"""What the page's script gets to draw, and what a run says of itself."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from report_samples import SETTINGS, comparison, device, run, step, wrap

from fedpmt import records
from fedpmt.api import settings_of
from fedpmt.cli.main import program
from fedpmt.records import ClientScores, SessionRecord
from fedpmt.report.chart_data import BARS, chart_data
from fedpmt.report.markup import Material
from fedpmt.report.page import page
from fedpmt.simulation.repeat import repeat_command

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord


def data_of(runs: list[RunRecord]) -> dict[str, Any]:
    return chart_data(Material.of(runs))


def curve_of(data: dict[str, Any], key: str, group: int = 0) -> dict[str, list[float]]:
    """A curve with its lists."""
    found = data["groups"][group]["curves"][key]
    return {
        **{axis: data["lists"][position] for axis, position in found["x"].items()},
        **{name: data["lists"][found[name]] for name in ("mean", "low", "high") if name in found},
    }


def test_curves_are_means_and_ranges_over_seeds() -> None:
    """Accuracies 0.2, 0.4 and 0.4, 0.8 after 10 and 20 s, 100 and 200 bytes."""
    data = data_of([run([0.2, 0.4], seed=0), run([0.4, 0.8], seed=1)])
    assert curve_of(data, "score") == {
        "rounds": [1, 2],
        "seconds": [10, 20],
        "bytes": [100, 200],
        "mean": [0.3, 0.6],
        "low": [0.2, 0.4],
        "high": [0.4, 0.8],
    }
    assert [axis["key"] for axis in data["axes"]] == ["rounds", "seconds", "bytes"]
    assert "low" not in curve_of(data_of([run([0.2])]), "score")


def test_loss_privacy_energy_and_fairness_are_there_where_they_are_recorded() -> None:
    clients = ClientScores(count=9, mean=0.5, spread=0.1, worst_tenth=0.3)
    metrics = {"train_loss": 2.0, "epsilon": 1.5}
    steps = tuple(
        step(number, 0.5, loss=1.0, joules=7.0, clients=clients, metrics=metrics, scores={"f1": 0.4})
        for number in (1, 2)
    )
    data = data_of([wrap(steps, SETTINGS, "run")])
    keys = {one["key"]: one["unit"] for one in data["measures"]}
    assert keys == {
        "score": "percent",
        "loss": "plain",
        "score:f1": "plain",
        "training": "plain",
        "epsilon": "plain",
        "energy": "joules",
        "mean": "percent",
        "worst": "percent",
        "spread": "percent",
    }
    assert curve_of(data, "energy")["mean"] == [7, 14]
    assert curve_of(data, "epsilon")["mean"] == [1.5, 1.5]
    assert curve_of(data, "worst")["mean"] == [0.3, 0.3]
    assert curve_of(data, "score")["joules"] == [7, 14]
    assert [one["key"] for one in data_of([run([0.5])])["measures"]] == ["score"]


def test_rounds_are_carried_with_their_devices() -> None:
    late = device(3, "late", level=2, seconds=9.0, transfer_seconds=2.0, part="depth 2")
    steps = (step(1, 0.5), step(2, 0.6, devices=(late, device(1))))
    busy = data_of([wrap(steps, SETTINGS, "run")])["busy"]
    assert busy["numbers"] == [1, 2]
    [panel] = busy["panels"]
    assert panel["deadline"] == 26.5
    second = panel["rounds"][1]
    assert (second["round"], second["seconds"]) == (2, 10)
    first, last = second["bars"]
    assert first == [1, 1, 1, 0, 0, 5, 0, 0]
    assert last[:2] == [3, 2]
    assert (busy["parts"][last[3]], last[5:7], busy["outcomes"][last[7]]) == ("depth 2", [9, 2], "late")


def test_a_page_carries_as_many_rounds_as_it_can() -> None:
    crowd = tuple(device(number) for number in range(BARS // 4))
    steps = tuple(step(number, 0.5, devices=crowd) for number in range(1, 101))
    busy = data_of([wrap(steps, SETTINGS, "run")])["busy"]
    assert busy["numbers"] == [1, 34, 67, 100]
    huge = tuple(device(number) for number in range(BARS + 1))
    one = data_of([wrap((step(1, 0.5), step(2, 0.5, devices=huge)), SETTINGS, "run")])["busy"]
    assert one["numbers"] == [2]


def test_the_page_embeds_the_data_and_the_policy_knows_the_script() -> None:
    text = page(comparison(rounds=2, seeds=1, partitions=("iid",)), "table.csv")
    [embedded] = re.findall(
        r'<script type="application/json" id="chart-data">(.*?)</script>', text, re.DOTALL
    )
    assert [group["line"] for group in json.loads(embedded)["groups"]] == ["fedpmt", "fedavg", "feddrop"]
    assert "connect-src" not in text
    assert "Permission is hereby granted" in text  # uPlot's licence goes wherever uPlot goes


def test_the_page_says_when_by_what_and_how_again() -> None:
    session = SessionRecord(
        version="9.8.7", started="2026-01-02T03:04:05Z", command="fedpmt run x", seconds=90
    )
    runs = [run([0.5]).model_copy(update={"session": session}), run([0.6], method="fedavg")]
    text = page(runs, "table.csv")
    for words in ("2026-01-02", "90 s", "fedpmt 9.8.7", "<code>fedpmt run x</code>", "repeat the runs (1)"):
        assert words in text
    assert "repeat the runs" not in page([run([0.5])], "table.csv")


GIVEN: tuple[dict[str, Any], ...] = (
    {"method": "fedavg", "seed": 3, "rounds": 2},
    {"method": "feddrop", "options": {"scope": "all"}, "server_cap": "none", "deadline": 30.5},
    {"method": "fedpmt", "splitting": "device", "partition": "classes:2", "lr": 0.01, "levels": "1/2x3,1x47"},
    {"method": "fedbuff", "clock": "events", "buffer": 3, "staleness": "hinge:1,2"},
    {"method": "fedpmt", "task": "cnn-mnist", "momentum": 0.9, "nesterov": True, "workers": 1},
    {"method": "feddf", "server_optimizer": "none", "dp_clip": 2.0, "public": "holdout:0.2"},
)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: given["method"])
def test_the_command_repeats_the_settings(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_of(given)
    command = repeat_command(settings)
    assert command is not None
    assert program([*shlex.split(command)[1:], "--dry-run", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["settings"]
    wanted = settings.identity()
    assert {key: again[key] for key in wanted} == wanted


def test_a_run_that_only_python_can_start_has_no_command() -> None:
    settings = settings_of({"method": "fedavg"})
    for change in ({"task": "own"}, {"optimizer": "custom"}, {"fleet": "speed\n1\n"}, {"method": "mine"}):
        assert repeat_command(settings.model_copy(update=change)) is None


def test_a_run_records_its_session(tmp_path: Path) -> None:
    flags = ["run", "--method", "fedavg", "--out", str(tmp_path / "run"), "--json"]
    assert program([*flags, "--rounds", "1"]) == 0
    first = records.read_run(tmp_path / "run").session
    assert first is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first.started)
    assert first.seconds > 0
    assert program([*flags, "--rounds", "2", "--resume"]) == 0
    second = records.read_run(tmp_path / "run").session
    assert second is not None
    assert (second.started, second.seconds > first.seconds) == (first.started, True)
    assert second.command == "fedpmt run --method fedavg --task fcnn-mnist --data embedded --rounds 2"
    (tmp_path / "run" / records.SESSION).write_text("damaged")
    assert records.read_run(tmp_path / "run").session is None


@pytest.mark.parametrize("out", [".", "/", "..", "page", "page.csv"])
def test_a_page_needs_the_name_of_a_file(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / records.CONFIG).write_text(json.dumps({"format": 1, "settings": SETTINGS}))
    monkeypatch.chdir(tmp_path)
    assert program(["report", str(folder), "--out", out]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"fedpmt: out must be the name of a file that ends in .html (got '{out}')"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
