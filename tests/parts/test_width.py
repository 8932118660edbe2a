"""Which channels a rule keeps, and what becomes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpmt.models.layered import layered
from fedpmt.models.structure import HIDDEN
from fedpmt.parts.part import Indices, Whole, size, take, within
from fedpmt.parts.width import (
    channel_norms,
    disjoint_channels,
    hidden_groups,
    important_channels,
    kept_count,
    narrow,
    of_classes,
    rolling_channels,
    thinned,
)
from support import small_net

SIZES = st.integers(1, 40)


@given(SIZES, st.integers(1, 100), st.integers(0, 1000))
def test_a_rolling_window_is_in_order_and_covers_evenly(full: int, percent: int, start: int) -> None:
    count = kept_count(full, percent / 100)
    window = rolling_channels(full, count, start)
    assert np.array_equal(window, np.unique(window))
    assert len(window) == count
    assert np.array_equal(window, rolling_channels(full, count, start + full))
    seen = np.concatenate([rolling_channels(full, count, start + turn) for turn in range(full)])
    assert np.array_equal(np.bincount(seen, minlength=full), np.full(full, count))


@given(SIZES, st.integers(1, 40), st.integers(0, 100))
def test_a_deal_covers_everything_without_overlap(full: int, pieces: int, seed: int) -> None:
    deal = disjoint_channels(full, pieces, np.random.default_rng(seed))
    assert len(deal) == pieces
    assert all(len(piece) for piece in deal)
    together = np.concatenate(deal)
    assert set(together) == set(range(full))
    if pieces <= full:
        assert len(together) == full
        assert max(map(len, deal)) - min(map(len, deal)) <= 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.data())
def test_no_dropped_channel_is_more_important(scores: list[int], data: st.DataObject) -> None:
    values = np.array(scores, dtype=float)
    count = data.draw(st.integers(1, len(scores)))
    kept = important_channels(values, count)
    assert len(kept) == count
    dropped = np.setdiff1d(np.arange(len(scores)), kept)
    assert dropped.size == 0 or values[kept].min() >= values[dropped].max()


def test_norms_are_of_the_weights_that_come_in() -> None:
    model = layered(small_net())
    tensors, axes = model.initial(), model.structure.require_axes("this test")
    conv, linear = hidden_groups(axes)
    assert channel_norms(model.structure, tensors, conv) == pytest.approx(
        tensors["0.weight"].abs().sum(dim=(1, 2, 3)).numpy()
    )
    assert channel_norms(model.structure, tensors, linear) == pytest.approx(
        tensors["4.weight"].abs().sum(dim=1).numpy()
    )


def test_what_keeps_everything_is_whole_and_has_no_overhead() -> None:
    structure = layered(small_net()).structure
    axes = structure.require_axes("this test")
    part = thinned(structure, axes, 1.0)
    assert all(isinstance(selection, Whole) for selection in part.trained.values())
    assert part.overhead_bytes == 0
    half = thinned(structure, axes, 0.5)
    assert half.overhead_bytes == 4 * (2 + 4)
    assert thinned(structure, axes, 0.5, HIDDEN, derivable=True).overhead_bytes == 0
    only_first = narrow(structure, axes, {"0": np.arange(2), "4": np.arange(8)}, "some")
    assert only_first.overhead_bytes == 4 * 2


@settings(max_examples=30)
@given(st.sets(st.integers(0, 2), min_size=1), st.sampled_from([0.3, 0.5, 1.0]))
def test_only_held_classes_are_trained(held: set[int], rate: float) -> None:
    model = layered(small_net())
    structure, axes = model.structure, model.structure.require_axes("this test")
    rows = np.array(sorted(held))
    part = of_classes(structure, thinned(structure, axes, rate), rows)
    assert size(part.trained["6.bias"], (3,)) == len(held)
    assert size(part.sent["6.bias"], (3,)) == 3
    full = model.initial()["6.weight"]
    sent, trained = part.sent["6.weight"], part.trained["6.weight"]
    # What a device cuts out of what it has is what the server finds at that place.
    assert torch.equal(take(take(full, sent), within(trained, sent)), take(full, trained))
    assert part.trained["4.weight"] is part.sent["4.weight"]
    if len(held) == 3 and rate == 1:
        assert not isinstance(trained, Indices)
