"""What a budget's text says, and what it means to keep to one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpmt.resources import (
    FIELDS,
    RESOURCES,
    ROUNDING,
    UNITS,
    UNLIMITED,
    BudgetSetting,
    Resources,
    parse_budget,
)
from fedpmt.types import SettingError

WHOLE = Resources(*[200.0] * len(FIELDS))


def test_a_resource_alone_leaves_the_amount_to_fedpmt() -> None:
    for resource in RESOURCES:
        budget = parse_budget(resource)
        assert budget == BudgetSetting(resource)
        assert budget.planned
        budget.check_levels(resource, 5)


@given(st.sampled_from(RESOURCES), st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6))
def test_shares_come_back_by_level(resource: str, shares: list[float]) -> None:
    text = f"{resource}={','.join(map(repr, shares))}"
    budget = parse_budget(text)
    assert not budget.planned
    for level, share in enumerate(shares, start=1):
        assert budget.most(level, WHOLE) == share * 200.0
    if len(shares) == 1:
        assert budget.most(6, WHOLE) == shares[0] * 200.0
    else:
        with pytest.raises(SettingError, match=f"lists {len(shares)} amounts, but there are 7 levels"):
            budget.check_levels(text, 7)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("time=20s", 20.0),
        ("time=1.5min", 90.0),
        ("memory=8MiB", 8 * 2**20),
        ("upload=3kB", 3000.0),
        ("bytes=1/2GB", 5e8),
        ("bytes=100B", 100.0),
        ("energy=5J", 5.0),
        ("energy=0.5kJ", 500.0),
        ("energy=2Wh", 7200.0),
    ],
)
def test_an_amount_does_not_depend_on_the_model(text: str, limit: float) -> None:
    assert parse_budget(text).amounts == ((limit, True),)
    assert parse_budget(text).most(1, WHOLE) == limit


def test_every_unit_is_read_as_itself() -> None:
    for resource, units in UNITS.items():
        for unit, size in units.items():
            assert parse_budget(f"{resource}=2{unit}").amounts == ((2 * size, True),)


@pytest.mark.parametrize(
    "text", ["", "speed", "time=0", "time=-1s", "upload=1.01", "memory=1,,1", "bytes=nan", "time=1/0s"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="budget = "):
        parse_budget(text)


@pytest.mark.parametrize("resource", RESOURCES)
def test_a_usage_fits_if_no_resource_is_over_its_limit(resource: str) -> None:
    """One resource over is enough; a sum in another order, which differs by rounding, is not over."""
    over = dataclasses.replace(WHOLE, **{FIELDS[resource]: 200.0 * (1 + 10 * ROUNDING)})  # type: ignore[index]
    same = dataclasses.replace(WHOLE, **{FIELDS[resource]: 200.0 * (1 + ROUNDING / 10)})  # type: ignore[index]
    assert WHOLE <= WHOLE
    assert same <= WHOLE
    assert not over <= WHOLE
    assert over <= UNLIMITED
    assert UNLIMITED.but(resource, 200.0) >= WHOLE  # type: ignore[arg-type]
    assert not UNLIMITED.but(resource, 199.0) >= WHOLE  # type: ignore[arg-type]


def test_a_limit_is_only_ever_lowered() -> None:
    limit = Resources.limit(seconds=5.0)
    assert limit.but("time", 9.0) == limit
    assert limit.but("time", 3.0).seconds == 3.0
    assert limit.of("time") == 5.0
    assert limit.of("upload") == float("inf")
