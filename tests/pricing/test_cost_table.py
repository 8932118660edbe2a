from __future__ import annotations

import json

import pytest

from fedpmt.pricing.cost_table import cost_table
from fedpmt.types import SettingError


def test_json_form_is_one_object() -> None:
    table = cost_table("cnn-mnist", "exact")
    read = json.loads(table.model_dump_json())
    assert list(read) == ["task", "batch", "layers", "base_bytes", "base_forward", "mode", "depths"]
    assert [layer["name"] for layer in read["layers"]] == ["conv1", "conv2", "fc1", "out"]
    assert read["depths"][0]["frozen"] == ["conv1", "conv2", "fc1"]
    assert read["depths"][-1]["frozen"] == []
    assert read["depths"][-1]["ratio"] == 1.0
    assert all(isinstance(row["operations"], int) for row in read["depths"])


def test_in_exact_mode_filters_cost_too_much_for_feddrop() -> None:
    """Convolutions are nearly all the work of a CNN, and FedDrop thins fully connected layers only."""
    table = cost_table("cnn-cifar10", "exact")
    assert [row.feddrop_within_budget for row in table.depths] == [False, False, False, False, True]
    assert [row.feddrop_keep for row in table.depths] == [0.1, 0.1, 0.1, 0.1, 1.0]


def test_settings_change_what_they_should() -> None:
    plain = cost_table("fcnn-mnist", "exact", 2, 10, samples=100)
    assert [row.operations for row in plain.depths] == [
        10 * (514_600 + 81_000 + 201_000) + 201_610,
        10 * (514_600 + 201_000 + 514_600) + 515_610,
    ]
    cached = cost_table("fcnn-mnist", "exact", 2, 10, samples=100, cached=True, held=1)
    # The batch's 784 inputs are no longer there, the hidden layer's 400 numbers are for all samples; momentum is
    # one number per trained one.
    difference = cached.depths[0].memory_bytes - plain.depths[0].memory_bytes
    assert difference == 4 * (400 * 100 - 784 * 10 + 201_610)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="task = 'cnn' is unknown"):
        cost_table("cnn", "exact")
    with pytest.raises(SettingError, match="mode = 'papers' is unknown; did you mean 'paper'"):
        cost_table("cnn-mnist", "papers")
    with pytest.raises(SettingError, match="depths = 5 is refused: this model has 4 layers"):
        cost_table("cnn-mnist", "exact", 5)
