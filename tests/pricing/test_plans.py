from __future__ import annotations

import numpy as np
import pytest

from fedpmt import api
from fedpmt.devices.fleet import make_fleet
from fedpmt.simulation.assemble import plan


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


def test_memory_is_priced_as_it_is_measured() -> None:
    """Peak bytes by torch's own allocator, for each depth; the price leaves out what a step makes in passing."""
    for prefix in ("cache", "recompute"):
        settings = api.settings_of(
            {"task": "cnn-cifar10", "data": "synthetic", "prefix": prefix, "samples": 100}
        )
        measured = api.profile(settings, repeat=1)
        priced = api.plan_table(settings.model_copy(update={"levels": "1", "deadline": 1e9}))
        assert priced["devices"][0]["memory_bytes"] == pytest.approx(
            measured["depths"][-1]["peak_bytes"], rel=0.35
        )
        problem = api.paper_problem_of(settings)
        planner = plan(settings, problem, make_fleet(settings))
        for part, row in zip(planner.depths, measured["depths"], strict=True):
            assert planner.price(part).memory_bytes == pytest.approx(row["peak_bytes"], rel=0.5)
