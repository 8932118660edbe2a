"""All methods in one table, and what their papers found, judged from records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedpmt.cli.main import program
from fedpmt.experiments import paper, rivals
from fedpmt.experiments.accuracy import final
from fedpmt.experiments.paper import IID, TWO_CLASSES, Scope
from fedpmt.experiments.rivals import FINDINGS, NOT_SEEN, OPEN, SEEN, UNKNOWN, Finding
from fedpmt.methods.registry import METHODS

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from report_samples import run

if TYPE_CHECKING:
    from fedpmt.records import RunRecord


def ended(*accuracies: float) -> list[RunRecord]:
    """One run for each final accuracy, of seeds 0, 1, ..; a round takes ten seconds and sends a hundred bytes."""
    return [run([accuracy / 2, accuracy], seed=seed) for seed, accuracy in enumerate(accuracies)]


def test_runs_are_those_of_the_table() -> None:
    found = rivals.runs(Scope(range(3)))
    assert len(found) == 3 * 2 * len(METHODS)
    assert {one.method for one in found} == set(METHODS)
    one = next(one for one in found if one.method == "fedmp" and one.partition == TWO_CLASSES)
    assert (one.task, one.data, one.rounds, one.budget, one.mode) == (
        "cnn-cifar10", "cifar10", 200, "operations", "exact",
    )  # fmt: skip
    assert one.levels.count(",") == 4
    assert one.options == {"bandit": False}
    assert {one.data for one in rivals.runs(Scope([0], quick=True))} == {"embedded"}


@pytest.mark.parametrize(
    ("firsts", "seconds", "verdict"),
    [
        ((0.8, 0.81, 0.82), (0.7, 0.71, 0.72), SEEN),
        ((0.7, 0.71, 0.72), (0.8, 0.81, 0.82), NOT_SEEN),
        ((0.8, 0.70, 0.75), (0.7, 0.80, 0.74), OPEN),
        ((0.8,), (0.7,), SEEN),
        ((0.7,), (0.8,), NOT_SEEN),
        ((), (0.8,), UNKNOWN),
    ],
)
def test_verdicts_need_more_than_the_interval(
    firsts: tuple[float, ...], seconds: tuple[float, ...], verdict: str
) -> None:
    finding = Finding("", "", "a", "b", final, more=True)
    assert finding.verdict(ended(*firsts), ended(*seconds))[0] == verdict


def test_who_never_reaches_the_target_is_behind() -> None:
    finding = Finding("", "", "a", "b", rivals.reached_seconds)
    assert finding.verdict(ended(0.6, 0.6), ended(0.4, 0.4)) == (SEEN, "2 of 2")
    assert finding.verdict(ended(0.4, 0.4), ended(0.6, 0.6)) == (NOT_SEEN, "0 of 2")
    assert finding.verdict(ended(0.6, 0.4), ended(0.4, 0.6)) == (OPEN, "1 of 2")
    assert finding.verdict(ended(0.4), ended(0.4))[0] == UNKNOWN
    # At 20 s and after 200 bytes; with 1.2 already at 10 s.
    assert [rivals.reached_seconds(one) for one in ended(0.6, 1.2)] == [20.0, 10.0]
    assert [rivals.reached_bytes(one) for one in ended(0.6, 1.2)] == [200.0, 100.0]


def test_a_margin_and_jumps() -> None:
    close = Finding("", "", "a", "b", final, more=True, margin=0.01)
    assert close.verdict(ended(0.795), ended(0.8))[0] == SEEN
    assert close.verdict(ended(0.78), ended(0.8))[0] == NOT_SEEN
    calm, wild = run([0.1, 0.9, 0.5, 0.5, 0.5, 0.5]), run([0.5, 0.5, 0.5, 0.3, 0.6, 0.3])
    assert rivals.jumps(calm) == 0
    assert rivals.jumps(wild) == pytest.approx(0.3)


def test_findings_are_about_methods_that_exist() -> None:
    for finding in FINDINGS:
        assert {finding.first, finding.second} <= set(METHODS)
        assert set(finding.panels) <= {IID, TWO_CLASSES}


def test_the_page_of_a_few_tiny_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "QUICK_ROUNDS", 2)
    monkeypatch.setitem(paper.EVALUATED_EVERY, "embedded", 1)
    monkeypatch.setattr(
        rivals, "METHODS", {name: METHODS[name] for name in ("fedavg", "heterofl", "feddrop")}
    )
    flags = ["--quick", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--jobs", "2"]
    assert program(["reproduce", "rivals", *flags]) == 0
    numbers = json.loads((tmp_path / "out" / "rivals.json").read_text())
    rows = {(row["partition"], row["method"]): row for row in numbers["rows"]}
    assert len(rows) == 6
    assert rows[IID, "heterofl"]["over_budget"] == rows[IID, "feddrop"]["over_budget"] == 0
    assert rows[IID, "fedavg"]["over_budget"] == pytest.approx(0.75, abs=0.11)  # all levels but the fastest
    assert rows[IID, "heterofl"]["operations"] < rows[IID, "fedavg"]["operations"]
    assert rows[IID, "heterofl"]["memory_slowest_level"] < rows[IID, "fedavg"]["memory_slowest_level"]
    judged = {(one["finding"], one["partition"]): one["verdict"] for one in numbers["findings"]}
    assert judged["HeteroFL ends above random dropout", IID] in (SEEN, NOT_SEEN)
    assert judged["FedRolex ends above HeteroFL", IID] == UNKNOWN
    page = (tmp_path / "out" / "rivals.md").read_text()
    assert "| HeteroFL | on each device |" in page
    assert "| FedAvg | not at all |" in page
