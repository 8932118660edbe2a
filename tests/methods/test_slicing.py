"""FedDrop and FedRolex: which channels a device gets."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from benches import Bench, check_fast_path, takes_fast_path
from torch.nn import functional

from fedpmt.methods.averaging import Averaged
from fedpmt.methods.feddrop import FedDrop
from fedpmt.methods.fedrolex import FedRolex
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.parts.part import Indices, Part, Whole
from fedpmt.types import MODEL, SettingError
from models.nets_of_users import ResNet
from support import samples

ROUNDS = 400


@pytest.mark.parametrize("scope", ["fc", "all"])
def test_the_next_layers_input_is_the_full_one_on_average(scope: Literal["fc", "all"]) -> None:
    """E over masks of Σ_{i kept} (n / m) w_i a_i is Σ_i w_i a_i: the factor is n / m, with exact counts."""
    bench = Bench(FedDrop(scope=scope, scaling=True, keep=0.45))
    inputs = samples(4).inputs

    def before_classifier(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = functional.max_pool2d(
            functional.conv2d(inputs, tensors["0.weight"], tensors["0.bias"]).relu(), 2
        )
        return functional.linear(hidden.flatten(1), tensors["4.weight"])

    def classified(tensors: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, tensors["6.weight"])

    whole = dict(bench.state.tensors)
    first, second = torch.zeros(4, 8), torch.zeros(4, 3)
    seen = torch.zeros(8)
    for index in range(ROUNDS):
        task = bench.method.assign(bench.state, bench.client(0), bench.round(index))
        part, structure = task.offer[0], bench.model.structure
        factors = bench.method.local.factors(task, part, structure)
        sent = {name: tensor * factors.get(name, 1.0) for name, tensor in task.tensors[MODEL].items()}
        kept = part.sent["4.bias"]
        assert isinstance(kept, Indices)
        rows = kept.axes[0]
        assert rows is not None
        first[:, rows] += before_classifier(sent)
        seen[rows] += 1
        # The classifier on the full net's activations, so that one mask at a time is averaged over.
        second += classified(sent, before_classifier(whole).relu()[:, rows]) / ROUNDS
    assert factors["6.weight"] == 8 / 4  # 0.45 of 8 neurons are 4
    assert ("4.weight" in factors) == (scope == "all")
    torch.testing.assert_close(first / seen, before_classifier(whole), rtol=0.2, atol=0.03)
    wanted = classified(whole, before_classifier(whole).relu())
    torch.testing.assert_close(second, wanted, rtol=0.2, atol=0.03)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("scaling", [False, True])
def test_the_fast_path_of_feddrop_does_what_the_oracle_does(scaling: bool, net: str) -> None:
    check_fast_path(FedDrop(scope="all", scaling=scaling, match="within"), net)


def test_a_mask_is_drawn_for_each_device_and_round_and_stays_for_it() -> None:
    bench = Bench(FedDrop(keep=0.5))

    def kept(device: int, index: int) -> list[int]:
        selection = bench.reply(device, index).part.sent["4.bias"]
        assert isinstance(selection, Indices)
        assert selection.axes[0] is not None
        return list(selection.axes[0])

    assert kept(0, 0) == kept(0, 0)
    assert len({tuple(kept(device, index)) for device in range(4) for index in range(4)}) > 8
    # What was not in the mask has not moved in any of the round's steps: it is not there.
    reply = bench.reply(0, count=20)
    assert reply.update["4.weight"].shape == (4, 36)
    assert np.array_equal(kept(0, 0), sorted(kept(0, 0)))


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
def test_the_fast_path_of_fedrolex_does_what_the_oracle_does(net: str) -> None:
    check_fast_path(FedRolex(), net, held=6)
    assert not takes_fast_path(FedRolex(clip=1.0), net)


def test_a_rate_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SettingError, match=r"fedrolex\.rate must be > 0 and <= 1 \(got 2\)"):
        FedRolex(rate=2)
