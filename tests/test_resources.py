"""What a budget's text says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpmt.resources import RESOURCES, UNITS, Allowance, Amount, parse_budget
from fedpmt.types import SettingError


def test_a_resource_alone_leaves_the_amount_to_fedpmt() -> None:
    for resource in RESOURCES:
        allowance = parse_budget(resource)
        assert allowance == Allowance(resource)
        assert [allowance.at(level) for level in (1, 5)] == [None, None]


@given(st.sampled_from(RESOURCES), st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6))
def test_shares_come_back_by_level(resource: str, shares: list[float]) -> None:
    allowance = parse_budget(f"{resource}={','.join(map(repr, shares))}")
    for level in range(1, 7):
        wanted = shares[0] if len(shares) == 1 else shares[level - 1] if level <= len(shares) else None
        if wanted is not None:
            amount = allowance.at(level)
            assert amount is not None
            assert amount.limit(200.0) == wanted * 200.0


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("time=20s", 20.0),
        ("time=1.5min", 90.0),
        ("memory=8MiB", 8 * 2**20),
        ("upload=3kB", 3000.0),
        ("bytes=1/2GB", 5e8),
        ("bytes=100B", 100.0),
    ],
)
def test_an_amount_does_not_depend_on_the_model(text: str, limit: float) -> None:
    amount = parse_budget(text).at(1)
    assert amount == Amount(limit, absolute=True)
    assert amount.limit(7.0) == limit


def test_every_unit_is_read_as_itself() -> None:
    for resource, units in UNITS.items():
        for unit, size in units.items():
            assert parse_budget(f"{resource}=2{unit}").amounts == (Amount(2 * size, absolute=True),)


@pytest.mark.parametrize(
    "text", ["", "speed", "time=0", "time=-1s", "upload=1.01", "memory=1,,1", "bytes=nan", "time=1/0s"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="budget = "):
        parse_budget(text)
