"""The server's sums in compiled code have the bits of torch, and leave alone what they do not know."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedpmt import kernels
from fedpmt.kernels.calls import SLICE
from fedpmt.parts.part import Indices, add_at, local_shape

needs_compiler = pytest.mark.skipif(not kernels.available(), reason="there is no C compiler here")


@needs_compiler
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("entries", [1, 1000, 3 * SLICE + 17])
def test_replies_are_summed_to_the_bits_of_torch(entries: int, fresh: bool) -> None:
    draw = torch.Generator().manual_seed(entries)
    before, *replies = (torch.randn(entries, generator=draw) for _ in range(4))
    shares = [1.0, 0.3, 7.0]
    wanted = torch.zeros(entries) if fresh else before.clone()
    for reply, share in zip(replies, shares, strict=True):
        wanted += reply * share
    assert kernels.fold(before, replies, shares, fresh=fresh)
    assert torch.equal(before, wanted)


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((7,), ([0, 3, 6],)),
        ((5, 9), ([1, 4], None)),
        ((5, 9), (None, [0, 2, 8])),
        ((5, 9), ([], [0, 2])),
        ((4, 6, 3, 3), ([0, 3], [1, 2, 5], None, None)),
        ((4, 6, 3, 3), (None, None, None, None)),
    ],
)
def test_cut_replies_are_added_to_the_bits_of_torch(
    shape: tuple[int, ...], axes: tuple[list[int] | None, ...]
) -> None:
    draw = torch.Generator().manual_seed(len(shape))
    sums, covers = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
    places = tuple(None if kept is None else np.array(kept, dtype=np.int64) for kept in axes)
    values = torch.randn(local_shape(Indices(places), shape), generator=draw)
    wanted, covered = sums.clone(), covers.clone()
    add_at(wanted, Indices(places), values)
    add_at(covered, Indices(places), 0.3)
    assert kernels.add_at(sums, covers, places, values, 0.3)
    assert torch.equal(sums, wanted)
    assert torch.equal(covers, covered)


@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        ((np.array([0, 4]), None), (2, 4)),
        ((np.array([-1, 2]), None), (2, 4)),
        ((np.array([0, 1]), None), (3, 4)),
    ],
)
def test_no_cut_reply_is_written_outside_its_tensor(
    axes: tuple[np.ndarray | None, ...], cut: tuple[int, ...]
) -> None:
    sums, covers = torch.zeros(4, 4), torch.zeros(4, 4)
    assert not kernels.add_at(sums, covers, axes, torch.ones(cut), 1.0)
    assert not sums.any()
    assert not covers.any()


def test_what_the_compiled_sum_does_not_know_is_left_to_torch() -> None:
    single, double = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float64)
    assert not kernels.fold(double, [double], [1.0], fresh=True)
    assert not kernels.fold(single.t()[:2], [single.t()[:2]], [1.0], fresh=True)
    assert torch.equal(double, torch.ones_like(double))
