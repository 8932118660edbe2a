"""Channels that a user declares, through the front door."""

from __future__ import annotations

from typing import Any

import pytest

import fedpmt
from fedpmt.types import SettingError
from models.zoo import ZOO

SETTINGS: dict[str, Any] = {"rounds": 1, "devices": 2, "cohort": 2, "samples": 12, "levels": "1/4,1"}
GATES = {
    "embed.weight": (None, "words"),
    "cell.weight_ih_l0": (fedpmt.Axis("state", tiles=4), "words"),
    "cell.weight_hh_l0": (fedpmt.Axis("state", tiles=4), "state"),
    "cell.bias_ih_l0": (fedpmt.Axis("state", tiles=4),),
    "cell.bias_hh_l0": (fedpmt.Axis("state", tiles=4),),
    "out.weight": ("output", "state"),
    "out.bias": ("output",),
}


def test_a_recurrent_net_is_cut_where_its_user_says() -> None:
    published = ZOO["LSTM"]
    inputs = published.inputs()
    data = inputs, published.targets(inputs)
    with pytest.raises(SettingError, match="'cell' \\(LSTM\\) mixes channels"):
        fedpmt.run("heterofl", model=published.make(), train=data, test=data, **SETTINGS)
    run = fedpmt.run("heterofl", model=published.make(), train=data, test=data, axes=GATES, **SETTINGS)
    narrow, whole = sorted(run.rounds[0].devices, key=lambda one: one.level)
    assert narrow.bytes_up < whole.bytes_up / 2
    with pytest.raises(SettingError, match="axes needs a model of your own"):
        fedpmt.run("heterofl", axes=GATES, rounds=1)
