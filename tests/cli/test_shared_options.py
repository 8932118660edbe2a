"""Options for several methods at once: `--budget`, options in a file, and a comparison that is only predicted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from command_line import TINY, call, table_rows

import fedpmt
from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.methods.feddrop import FedDrop
from fedpmt.methods.fedmp import FedMP
from fedpmt.records import ROUNDS, read_run
from fedpmt.report.budgets import budgets
from fedpmt.report.page import page

if TYPE_CHECKING:
    from pathlib import Path


LEVELS = ("--levels", "1/4,1/3,1/2,1", "--assign", "level", "--devices", "8", "--cohort", "8")
SMALL: dict[str, Any] = {
    **{"devices": 8, "samples": 20, "cohort": 8, "rounds": 2, "batch": 10},
    **{"levels": "1/4,1/3,1/2,1", "assign": "level"},
}


@pytest.mark.parametrize("budget", ["operations", "upload=0.1,0.2,0.5,1"])
def test_compare_prints_what_was_used_on_each_level(
    tmp_path: Path, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    methods = ("fedpmt", "heterofl", "fedavg", "fedprox")
    called = call("compare", *methods, *TINY, *LEVELS, "--budget", budget, "--out", tmp_path)
    assert called.code == 0, called.err
    rows = table_rows(called.out, f"Budget: {budget.partition('=')[0]}")
    assert [row[0] for row in rows] == [name for name in methods for _ in range(4)]
    assert [row[1] for row in rows] == ["1", "2", "3", "4"] * 4
    acts = {row[0]: row[3] for row in rows}
    works = "on the steps" if budget == "operations" else "not at all"
    assert acts == {
        **{"fedpmt": "on each device", "heterofl": "on each device"},
        **{"fedavg": "not at all", "fedprox": works},
    }
    over = {(row[0], row[1]) for row in rows if row[7] != "-"}
    assert over >= {("fedavg", "1"), ("fedavg", "2"), ("fedavg", "3")}
    assert not {place for place in over if place[0] == "heterofl"}
    for run in (read_run(tmp_path / f"{name}-seed0") for name in methods):
        assert run.settings["budget"] == budget
        assert run.result is not None
        assert run.result.budget == budget


def test_json_has_the_same_rows(tmp_path: Path) -> None:
    called = call(
        "compare", "fedpmt", "fedavg", *TINY, *LEVELS, "--budget", "time", "--json", "--out", tmp_path
    )
    rows = called.json["budget"]
    assert [(row["method"], row["level"]) for row in rows] == [
        (name, level) for name in ("fedpmt", "fedavg") for level in range(1, 5)
    ]
    assert [row["used"] for row in rows[:4]] == pytest.approx([row["budget"] for row in rows[:4]])
    assert rows[4]["over"] == rows[4]["asked"] > 0
    without = call("compare", "fedpmt", *TINY, "--json", "--out", tmp_path / "without")
    assert "budget" not in without.json


def test_a_dry_run_shows_how_much_of_its_budget_a_part_takes() -> None:
    called = call("compare", "fedpmt", "fedavg", *TINY, *LEVELS, "--budget", "memory=0.5", "--dry-run")
    assert called.code == 0, called.err
    assert called.out.count("budget memory=0.5: acts") == 2
    assert "of its budget" in called.out
    assert "(over)" in called.out


def test_methods_are_set_as_a_budget_needs_them_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    chosen = api.settings_of({"method": "feddrop", "budget": "operations"}).options
    assert chosen == {"scope": "all", "match": "within"}
    assert api.settings_of({"method": "feddrop"}).options == {}
    kept = api.settings_of({"method": "fedmp", "budget": "time", "options": {"bandit": "true"}}).options
    assert kept == {"bandit": True}
    runs = fedpmt.compare([FedMP(), FedDrop(scaling=True)], budget="operations", out=tmp_path, **SMALL)
    assert [run.settings["options"].get("bandit") for run in runs] == [False, None]
    assert runs[1].settings["options"]["scope"] == "all"
    assert not any(device.over_budget for run in runs for step in run.rounds for device in step.devices)


def test_a_run_is_the_same_from_its_record_and_after_an_interrupt(tmp_path: Path) -> None:
    """The budget stands in the settings, and what was used of it in the rounds."""

    def interrupt(record: fedpmt.RoundRecord) -> None:
        raise KeyboardInterrupt

    budget = "upload=50kB"
    whole = fedpmt.run("feddrop", budget=budget, out=tmp_path / "whole", **SMALL)
    with pytest.raises(KeyboardInterrupt):
        fedpmt.run("feddrop", budget=budget, out=tmp_path / "parts", on_round=interrupt, **SMALL)
    fedpmt.run("feddrop", budget=budget, out=tmp_path / "parts", resume=True, **SMALL)
    stored = json.loads((tmp_path / "whole" / "config.json").read_bytes())["settings"]
    again = api.start(api.request_of(api.settings_of(stored)), tmp_path / "again")
    texts = {(tmp_path / name / ROUNDS).read_bytes() for name in ("whole", "parts", "again")}
    assert len(texts) == 1
    assert again.result is not None
    assert whole.result is not None
    assert again.result.weights_sha256 == whole.result.weights_sha256
    assert {device.budget for step in whole.rounds for device in step.devices} == {50_000.0}
    with pytest.raises(fedpmt.SettingError, match="its budget is 'upload=50kB'"):
        fedpmt.run("feddrop", budget="upload", out=tmp_path / "whole", resume=True, **SMALL)


def test_option_two_keeps_to_the_budget_too(tmp_path: Path) -> None:
    small = {**SMALL, "assign": "deadline"}
    run = fedpmt.run("fedpmt", splitting="device", budget="upload=100kB", out=tmp_path, **small)
    assert {device.part for step in run.rounds for device in step.devices} == {"depth 1"}


def test_the_page_shows_budgets_only_where_there_are_some(tmp_path: Path) -> None:
    runs = fedpmt.compare(["fedpmt", "fedavg"], budget="operations", out=tmp_path / "with", **SMALL)
    text = page(runs, "table.csv")
    assert '<section id="budget">' in text
    assert 'href="#budget"' in text
    assert len(budgets(runs)) == 8
    without = page(fedpmt.compare(["fedpmt"], out=tmp_path / "without", **SMALL), "table.csv")
    assert "#budget" not in without
    assert 'id="budget"' not in without


FEW = ["--rounds", "1", "--devices", "5", "--samples", "20", "--cohort", "5"]


def test_tables_and_bare_keys_reach_the_methods_they_are_for(tmp_path: Path) -> None:
    for number, text in enumerate(("[options]\nkeep = 0.5\n", "[options.feddrop]\nkeep = 0.5\n")):
        config = tmp_path / f"{number}.toml"
        config.write_text(text)
        out = tmp_path / str(number)
        assert (
            program(["compare", "fedpmt", "feddrop", *FEW, "--config", str(config), "--out", str(out)]) == 0
        )
        stored = json.loads((out / "feddrop-seed0" / "config.json").read_bytes())["settings"]
        assert float(stored["options"]["keep"]) == 0.5
        assert json.loads((out / "fedpmt-seed0" / "config.json").read_bytes())["settings"]["options"] == {}


def test_a_key_that_no_method_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[options]\nkeeps = 0.5\n")
    assert (
        program(["compare", "fedpmt", "feddrop", *FEW, "--config", str(config), "--out", str(tmp_path / "o")])
        == 2
    )
    assert "keeps" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_comparison_can_be_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        program(["compare", "fedpmt", "fedavg", *FEW, "--dry-run", "--json", "--out", str(tmp_path / "o")])
        == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["settings"]["method"] for line in lines] == ["fedpmt", "fedavg"]
    assert lines[0]["round_seconds"] < lines[1]["round_seconds"] == 50.0
    assert not (tmp_path / "o").exists()
