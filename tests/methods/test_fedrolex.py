from __future__ import annotations

import numpy as np
import pytest
import torch
from benches import Bench
from narrow_runs import check_fast_path, takes_fast_path

from fedpmt.methods.averaging import Averaged
from fedpmt.methods.fedrolex import FedRolex
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.parts.part import Indices, Part, Whole
from fedpmt.types import SettingError
from models.nets_of_users import ResNet


def rows(part: Part, name: str) -> np.ndarray:
    selection = part.sent[name]
    assert isinstance(selection, Indices)
    assert selection.axes[0] is not None
    return selection.axes[0]


def window(bench: Bench, index: int, rate: float = 0.4) -> Part:
    return FedRolex().slice(bench.state, rate, bench.round(index))


@pytest.mark.parametrize(("layer", "full", "kept"), [("0.weight", 4, 2), ("4.weight", 8, 4)])
def test_over_as_many_rounds_as_channels_each_is_trained_equally_often(
    layer: str, full: int, kept: int
) -> None:
    bench = Bench(FedRolex())
    for first in (0, 3):
        seen = np.concatenate([rows(window(bench, first + turn), layer) for turn in range(full)])
        assert np.array_equal(np.bincount(seen, minlength=full), np.full(full, kept))


def test_the_window_moves_by_one_and_wraps() -> None:
    bench = Bench(FedRolex())
    windows = [rows(window(bench, index), "4.weight").tolist() for index in (0, 1, 6, 8)]
    assert windows == [[0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 6, 7], [0, 1, 2, 3]]
    assert window(bench, 5).overhead_bytes == 0


def test_a_rolled_filter_keeps_its_block_of_the_next_inputs() -> None:
    selection = window(Bench(FedRolex()), 3).sent["4.weight"]
    assert isinstance(selection, Indices)
    assert selection.axes[1] is not None
    assert selection.axes[1].tolist() == [*range(9), *range(27, 36)]  # filters 0 and 3, nine inputs each


def test_the_first_round_is_heterofl_bit_for_bit() -> None:
    ours, theirs = Bench(FedRolex(rate=0.5)), Bench(HeteroFL(rate=0.5))
    mine, other = ours.reply(0), theirs.reply(0)
    assert all(torch.equal(mine.update[name], change) for name, change in other.update.items())
    again = ours.reply(0, index=1)
    assert not np.array_equal(rows(again.part, "4.weight"), rows(mine.part, "4.weight"))


def test_full_width_is_whole_in_every_round() -> None:
    bench = Bench(FedRolex(rate=1.0))
    for index in range(5):
        assert all(isinstance(one, Whole) for one in bench.reply(0, index).part.trained.values())


def test_both_sides_of_a_residual_sum_roll_together() -> None:
    model = layered(ResNet(), example=torch.zeros(2, 1, 8, 8))
    bench = Bench(FedRolex())
    part = FedRolex().slice(Averaged(model.structure, model.initial()), 0.5, bench.round(3))
    assert np.array_equal(rows(part, "stem.weight"), rows(part, "blocks.0.conv2.weight"))
    assert np.array_equal(rows(part, "blocks.1.conv2.weight"), rows(part, "blocks.1.shortcut.weight"))
    assert rows(part, "stem.weight").tolist() == [0, 3]


@pytest.mark.parametrize("net", NETS)
def test_the_fast_path_does_what_the_oracle_does(net: str) -> None:
    check_fast_path(FedRolex(), net, held=6)
    assert not takes_fast_path(FedRolex(clip=1.0), net)


def test_a_rate_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SettingError, match=r"fedrolex\.rate must be > 0 and <= 1 \(got 2\)"):
        FedRolex(rate=2)
