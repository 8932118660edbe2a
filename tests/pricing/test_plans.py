from __future__ import annotations

import numpy as np
import pytest

from fedpmt import api
from fedpmt.devices.fleet import make_fleet
from fedpmt.simulation.assemble import make_price, plan
from fedpmt.simulation.schedule import local_settings


def test_many_kinds_are_shown_by_level_and_counted_one_by_one() -> None:
    settings = api.settings_of({"levels": "lognormal:0.7", "devices": 5000, "deadline": 30, "cohort": 5})
    table = api.plan_table(settings)
    assert sum(row["devices"] for row in table["devices"]) == 5000
    assert len(table["devices"]) < 30
    problem = api.paper_problem_of(settings.model_copy(update={"data": "synthetic"}))
    planner = plan(settings, problem, make_fleet(settings))
    fleet = make_fleet(settings)
    depths = [
        planner.depths.index(planner.depth(fleet.device(device), 80)) + 1 for device in range(0, 5000, 50)
    ]
    assert depths == planner.depths_of(fleet, 80)[::50].tolist()
    shares = np.bincount(planner.depths_of(fleet, 80) - 1, minlength=4) / 5000
    assert table["psi"] == pytest.approx(sum(1 / shares[depth:].sum() for depth in range(4)))


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
    settings = api.settings_of({"data": "synthetic", "samples": 100, "epochs": 2})
    measured = api.profile(settings, repeat=1)["depths"]
    planner = plan(settings, api.paper_problem_of(settings), make_fleet(settings))
    priced = [planner.price(part).memory_bytes for part in planner.depths]
    assert priced == pytest.approx([row["peak_bytes"] for row in measured], rel=0.02)
