"""CoCoFL's nets as we rebuild them, and what the page says of their prices."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reproduction import blocks

PAGE = Path(__file__).parents[2] / "docs" / "results" / "blocks"


def size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


SIZES = ((10, 11_173_962), (18, 23_520_842), (22, 176_122), (20, 2_296_922), (8, 2_645_762))
"""Blocks and weights of the authors' nets, in the order of NETS."""


@pytest.mark.parametrize("place", range(len(SIZES)), ids=lambda place: blocks.NETS[place].title)
def test_nets_have_the_blocks_and_weights_of_the_authors(place: int) -> None:
    """By hand for DenseNet40, with n channels going in:

    convolution    3 · 24 · 9
    bottleneck     2 n + 48 n + 96 + 48 · 12 · 9     n = 24, 36, .. 84; 48, .. 108; 60, .. 120
    transition     2 n + n² / 2                      n = 96; 120
    classifier     2 n + 10 n + 10                   n = 132
    """
    net, (count, weights) = blocks.NETS[place], SIZES[place]
    module, example = net.make()
    assert size(module) == weights
    price = blocks.price_of(net)
    assert len(price.structure.layers) == count
    with torch.no_grad():
        assert module(example).shape == (2, 2 if net.make is blocks.encoder else 10)


def test_images_shrink_and_channels_grow_as_in_mobilenet_and_densenet() -> None:
    def shapes(made: tuple[nn.Module, torch.Tensor]) -> list[tuple[int, ...]]:
        module, images = made
        assert isinstance(module, nn.Sequential)
        found = []
        for block in list(module)[:-1]:
            images = block(images)
            found.append(tuple(images.shape[1:]))
        return found

    with torch.no_grad():
        mobile, dense = shapes(blocks.mobilenet()), shapes(blocks.densenet())
    # The input convolution, then the last block of each stage, then the output convolution.
    assert [mobile[place] for place in (0, 1, 3, 6, 10, 13, 16, 17, 18)] == [
        (32, 32, 32), (16, 32, 32), (24, 32, 32), (32, 16, 16), (64, 8, 8), (96, 8, 8), (160, 4, 4), (320, 4, 4),
        (1280, 4, 4),
    ]  # fmt: skip
    assert [dense[place] for place in (0, 6, 7, 13, 14, 20)] == [
        (24, 32, 32), (96, 32, 32), (48, 16, 16), (120, 16, 16), (60, 8, 8), (132, 8, 8),
    ]  # fmt: skip
    grown = [after[0] - before[0] for before, after in pairwise(dense) if after[1] == before[1]]
    assert grown == [12] * 18


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(PAGE.with_suffix(".json").read_text())["rows"]
    return found


def test_the_page_shows_today_s_prices(rows: list[dict[str, Any]]) -> None:
    """Where a price has changed, `python -m reproduction blocks --out docs/results` draws the page again."""
    small = next(net for net in blocks.NETS if net.make is blocks.densenet)
    shown = [row for row in rows if row["net"] == small.title]
    for now, then in zip(blocks.rows_of(small), shown, strict=True):
        assert now == pytest.approx(then)


def test_the_sentences_of_the_page_follow_from_its_rows(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == len(blocks.NETS) * len(blocks.PLACES)
    factors = {row["net"]: blocks._implied(row) for row in rows if row["place"] == "last block"}
    assert factors.pop("MobileNet, x64") == pytest.approx(0.25, abs=0.03)
    assert min(factors.values()) > 0.5
    ratios = {row["net"]: blocks._ratio(row) for row in rows if row["place"] == "first block only"}
    assert min(ratios, key=lambda net: ratios[net]) == "MobileNet, x64"
    assert [net for net, ratio in ratios.items() if ratio > 1] == ["ResNet50, x64"]
    assert all(row["fp32_memory"] == row["int8_memory"] for row in rows)
    assert blocks._text(rows) in PAGE.with_suffix(".md").read_text()
