"""The artefact `convergence`, on studies short enough for a test."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from reproduction.artefact import Artefact, publish
from reproduction.convergence import build, convergence
from reproduction.theory.studies import FIXED, Scope

if TYPE_CHECKING:
    from pathlib import Path

SHORT = Scope(
    seeds=(0, 1),
    quadratic_rounds=600,
    softmax_rounds=40,
    theorem_rounds=1500,
    pilot_rounds=800,
    gap_rounds=3000,
    softmax_gap_rounds=40,
    floor_rounds=60,
    assignments=2,
    measured=4,
)


@pytest.fixture(scope="module")
def artefact() -> Artefact:
    return build(SHORT)


@pytest.mark.slow
def test_it_can_be_published(artefact: Artefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The versions are known only where the package is installed.
    monkeypatch.setattr("reproduction.artefact.versions", lambda: ["fedpmt 0"])
    paths = publish(artefact, tmp_path)
    assert {path.suffix for path in paths} == {".md", ".html", ".json", ".svg"}
    page = (tmp_path / "convergence.md").read_text()
    assert "Theorem 1 does not cover this case" in page
    assert "python -m reproduction convergence" in page
    assert "nan" not in page
    assert "inf" not in json.dumps(json.loads((tmp_path / "convergence.json").read_text())["theorem"])


def test_every_row_fits_its_columns(artefact: Artefact) -> None:
    assert [table.title for table in artefact.tables] == [
        "The rate",
        "ε of Proposition 1",
        "The bound and the error, step size of Theorem 1",
        "The gap against ψ",
        "The floor of fixed levels",
        "Plans within one budget: two classes per device, levels fixed",
    ]
    for table in artefact.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_bound_is_above_the_error_and_the_proof_gives_l_times_the_printed_one(artefact: Artefact) -> None:
    for run in artefact.values["theorem"]:
        assert run["bound"]["proof"] == pytest.approx(
            run["constants"]["smoothness"] * run["bound"]["printed"]
        )
        assert run["errors"][-1] < run["bound"]["printed"]
        assert run["constants"]["epsilon"] >= run["assumed_epsilon"] > 0


def test_fixed_levels_on_differing_data_are_never_covered(artefact: Artefact) -> None:
    seen = 0
    for case in artefact.values["rate"]:
        for arm in case["arms"]:
            if arm["name"] == FIXED:
                seen += 1
                assert arm["constants"]["epsilon"] <= 0
                assert case["floor"] > 0
    assert seen == 4


def test_the_poorest_mix_is_the_furthest_from_fedavg(artefact: Artefact) -> None:
    """On the quadratic the error is ψ / |I| times FedAvg's; a short run knows it to some tens of percent."""
    arms = artefact.values["gap"][0]["arms"]
    assert arms[0]["psi"] == 4
    assert arms[-1]["ratio"][0] == max(arm["ratio"][0] for arm in arms)
    assert arms[-1]["ratio"][0] == pytest.approx(arms[-1]["psi"] / 4, rel=0.5)


def test_the_bound_of_the_unbiased_mean_is_above_the_error(artefact: Artefact) -> None:
    bounded = 0
    for case in artefact.values["plans"]:
        assert [arm["bound"] is not None for arm in case["arms"]] == [
            arm["rest"] < 1e-9 for arm in case["arms"]
        ]
        for arm in case["arms"]:
            if arm["bound"] is not None:
                bounded += 1
                assert arm["errors"][-1] < arm["bound"]
    assert bounded == 6  # FedAvg, traded by steps, rotated by draws; on two problems


def test_quick_takes_fewer_seeds_and_rounds() -> None:
    assert Scope.of([5], quick=True).seeds == (5,)
    assert Scope.of(range(10), quick=True).theorem_rounds < Scope.of(range(10), quick=False).theorem_rounds
    assert len(Scope.of(range(10), quick=False).seeds) == 10


@pytest.mark.slow
def test_the_quick_run() -> None:
    artefact = convergence(quick=True, seeds=range(3))
    assert artefact.command == "python -m reproduction convergence --seeds 0-2 --quick"
    assert "far too short" in artefact.text
    assert all(math.isfinite(arm["slope"][0]) for case in artefact.values["rate"] for arm in case["arms"])
