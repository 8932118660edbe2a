"""Which channels go together, in a chain and in nets as users write them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpmt.models.axes import declared_axes, traced_axes
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.structure import Axis
from fedpmt.parts.part import take
from fedpmt.parts.width import channel_norms, hidden_groups
from fedpmt.types import SettingError
from models.nets_of_users import (
    Attention,
    Grouped,
    Loose,
    ResNet,
    Shared,
    Tied,
    Transformer,
    check_narrow,
    half,
    run,
    structure_of,
    tensors_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.structure import Axes
    from fedpmt.types import Arrays

PIXELS = torch.randn(3, 1, 8, 8)
ROWS = torch.randn(3, 6)
SEQUENCES = torch.randn(3, 5, 6)
TOKENS = torch.randint(0, 11, (3, 5))


def resnet() -> LayeredModel:
    torch.manual_seed(0)
    return layered(ResNet(), example=torch.zeros(2, 1, 8, 8))


def hidden(axes: Axes) -> dict[str, int]:
    return {group.name: group.size for group in hidden_groups(axes)}


def test_added_tensors_share_their_channels() -> None:
    axes = resnet().structure.require_axes("this test")
    assert list(hidden(axes)) == ["stem", "blocks.0.conv1", "blocks.1.conv1", "blocks.1.conv2"]
    # The identity shortcut ties the first block's output to the stem's, norms included.
    for name in ("stem.weight", "bn.running_mean", "blocks.0.conv2.weight", "blocks.0.bn2.bias"):
        assert axes.tensors[name][0] == Axis("stem")
    # A 1x1 shortcut has the input channels of conv1 and the output channels of conv2.
    assert axes.tensors["blocks.1.shortcut.weight"][:2] == (Axis("blocks.1.conv2"), Axis("stem"))
    assert axes.tensors["blocks.1.conv1.weight"][1] == Axis("stem")
    assert axes.groups["fc"].kind == "output"


def test_a_chain_has_the_axes_that_are_found_by_running_it() -> None:
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3)),
    )
    read, found = layered(net).structure.require_axes("this test"), traced_axes(net, PIXELS)
    assert read.groups == found.groups
    assert list(read.groups) == list(found.groups)
    assert {name: found.tensors[name] for name in read.tensors} == read.tensors


class Flattened(nn.Module):
    """Pools and flattens by calls, adds in place, and has a linear residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.a = nn.Linear(36, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.max_pool2d(functional.relu(self.conv(x)), 2).view(len(x), -1)
        hidden = self.a(hidden).relu_()
        return self.c(self.b(hidden).add_(hidden))  # type: ignore[no-any-return]


def test_a_flatten_and_calls_are_followed() -> None:
    axes = check_narrow(Flattened(), PIXELS).require_axes("this test")
    assert axes.tensors["a.weight"] == (Axis("a"), Axis("conv", 9))
    assert axes.tensors["b.weight"] == (Axis("a"), Axis("a"))


def test_whole_groups_are_cut_of_norms_and_convolutions() -> None:
    axes = check_narrow(Grouped(), PIXELS).require_axes("this test")
    # Eight groups of two channels have two in each group of four that is normalised.
    assert hidden(axes) == {"stem": 4, "wide.0": 10, "squeeze": 4}
    assert axes.tensors["stem.weight"][0] == Axis("stem", 4)
    assert axes.tensors["deep.0.weight"][0] == Axis("wide.0")
    fitted = {(fit.module, fit.attribute): fit.times for fit in axes.fits}
    assert fitted == {("norm", "num_groups"): 1, ("grouped", "groups"): 2, ("deep.0", "groups"): 1}


class StiffAttention(Attention):
    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        return heads.transpose(1, 2).reshape(x.shape)


def test_heads_and_hidden_units_are_cut_and_the_residual_stream_is_not() -> None:
    """With 4 heads of 4, a wrong number that is fitted would go unnoticed but for what comes out."""
    axes = check_narrow(Attention(), SEQUENCES).require_axes("this test")
    assert hidden(axes) == {"qkv": 4, "up": 10}
    assert axes.groups["qkv"].kind == "heads"
    assert axes.tensors["qkv.weight"] == (Axis("qkv", repeat=4, tiles=3), Axis())
    assert axes.tensors["up.bias"] == (Axis("up", tiles=2),)
    assert [(fit.attribute, fit.times) for fit in axes.fits] == [("h", 1)]


def test_a_group_that_a_module_needs_all_of_stays_whole() -> None:
    assert hidden(traced_axes(StiffAttention(), SEQUENCES)) == {"up": 10}


def test_norms_of_all_heads_weights_count() -> None:
    module = Attention()
    structure = structure_of(module, SEQUENCES)
    [heads, _] = hidden_groups(structure.require_axes("this test"))
    weight = module.qkv.weight.detach().abs().view(3, 4, 4, 16).sum(dim=(0, 2, 3))
    found = channel_norms(structure, tensors_of(module, structure), heads)
    np.testing.assert_allclose(found, weight.numpy(), rtol=1e-5)


class Normed(nn.Module):
    """An MLP with LayerNorm, which has no residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.norm(self.a(x))))))  # type: ignore[no-any-return]


def test_layernorm_normalises_over_the_channels_that_are_left() -> None:
    module = Normed()
    structure = check_narrow(module, ROWS, exact=False)
    axes = structure.require_axes("this test")
    assert hidden(axes) == {"a": 8, "b": 8}
    assert [(fit.module, fit.attribute, fit.place) for fit in axes.fits] == [("norm", "normalized_shape", 0)]
    cut = {
        name: take(tensors_of(module, structure)[name], kept) for name, kept in half(structure).sent.items()
    }
    small = nn.Sequential(
        nn.Linear(6, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)
    )
    small.load_state_dict(dict(zip(small.state_dict(), cut.values(), strict=True)))
    torch.testing.assert_close(run(module, structure, cut, ROWS), small(ROWS))


class UNet(nn.Module):
    """Goes up by a transposed convolution, next to what it had on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.up, self.both = nn.ConvTranspose2d(8, 6, 2, 2), nn.Conv2d(12, 5, 3, padding=1)
        self.out = nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        above = torch.relu(self.down(x))
        below = torch.relu(self.low(functional.max_pool2d(above, 2)))
        return self.out(torch.relu(self.both(torch.cat([self.up(below), above], 1))))  # type: ignore[no-any-return]


def test_a_concatenation_of_equals_is_followed() -> None:
    axes = check_narrow(UNet(), PIXELS).require_axes("this test")
    assert hidden(axes) == {"down": 6, "low": 8, "both": 5}
    assert axes.tensors["both.weight"][1] == Axis("down", tiles=2)
    assert axes.tensors["up.weight"][:2] == (Axis("low"), Axis("down"))
    assert axes.leaving("up.weight") == 1


def test_torchs_transformer_is_cut_within_its_mlp() -> None:
    inputs = {"tokens": TOKENS, "scale": torch.ones(3)}
    axes = check_narrow(Transformer(), inputs).require_axes("this test")
    assert hidden(axes) == {"encoder.layers.0.linear1": 16, "encoder.layers.1.linear1": 16}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(11, 6),
            nn.LSTM(6, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, -1])  # type: ignore[no-any-return]


class Auxiliary(ResNet):
    """Has a second head, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        stem = torch.relu(self.bn(self.stem(x)))
        scores = self.fc(self.blocks(stem).mean(dim=(2, 3)))
        return scores + self.side(stem.mean(dim=(2, 3))) if self.training else scores  # type: ignore[no-any-return]


def test_what_is_used_in_training_only_is_followed_too() -> None:
    axes = traced_axes(Auxiliary(), PIXELS)
    assert axes.tensors["side.weight"] == (Axis("fc"), Axis("stem"))


def test_what_may_be_used_for_other_inputs_is_not_cut() -> None:
    class Choosing(Auxiliary):
        def forward(self, x: Tensor) -> Tensor:
            stem = torch.relu(self.bn(self.stem(x)))
            scores = self.fc(self.blocks(stem).mean(dim=(2, 3)))
            return scores + self.side(stem.mean(dim=(2, 3))) if float(x.sum()) > 1e9 else scores  # type: ignore[no-any-return]

    assert list(hidden(traced_axes(Choosing(), PIXELS))) == ["blocks.0.conv1", "blocks.1.conv1"]


def test_what_is_frozen_is_not_cut() -> None:
    module = ResNet()
    module.blocks[0].requires_grad_(requires_grad=False)
    assert list(hidden(traced_axes(module, PIXELS))) == ["blocks.1.conv1", "blocks.1.conv2"]


class Odd(nn.Module):
    """A convolution, something, and a linear layer."""

    def __init__(self, between: Callable[[Tensor], Tensor], features: int) -> None:
        super().__init__()
        self.conv, self.out, self.between = nn.Conv2d(1, 4, 3), nn.Linear(features, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.between(self.conv(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("between", "features"),
    [
        (lambda x: x.mean(dim=(1, 2)), 6),  # over the channels
        (lambda x: x.mean(dim=(2, 3)).softmax(dim=1), 4),  # mixes them
        (lambda x: x.flatten(1).cumsum(1), 144),
        (lambda x: torch.cat([x, x[:, :1]], 1).flatten(1), 180),
        (lambda x: torch.linalg.qr(x.flatten(2)).R.flatten(1), 144),  # what nobody has a rule for
        (lambda x: x.mean((2, 3)) * torch.arange(4), 4),  # has a size of its own
        (lambda x: x.flatten(1).view(-1, 12, 12).transpose(1, 2).flatten(1), 144),  # 3 rows of each channel
    ],
)
def test_what_may_mix_channels_is_not_cut(between: Callable[[Tensor], Tensor], features: int) -> None:
    axes = traced_axes(Odd(between, features), PIXELS)
    if axes.stopped:
        assert re.search("Odd mixes channels|can't run with fewer channels", axes.stopped)
    else:  # it is followed after all, and the check is that it is so rightly
        check_narrow(Odd(between, features), PIXELS)


@pytest.mark.parametrize(
    ("module", "inputs", "reason"),
    [
        (Recurrent(), TOKENS, r"module 'rnn' \(LSTM\) mixes channels"),
        (Shared(), torch.randn(2, 4), "inputs or outputs"),
        (Loose(), torch.randn(2, 4), "inputs or outputs"),
        (Tied(), torch.randn(2, 4), "inputs or outputs"),
    ],
)
def test_the_refusal_names_the_module(module: nn.Module, inputs: Arrays, reason: str) -> None:
    structure = structure_of(module, inputs)
    with pytest.raises(
        SettingError, match=rf"^heterofl: this model can't be cut by width: .*{reason}.*axes="
    ):
        structure.require_axes("heterofl")


def test_a_module_is_left_as_it_was() -> None:
    module = Grouped().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    traced_axes(module, PIXELS)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(child.training and not child._forward_hooks for child in module.modules())


def test_a_chain_with_a_residual_block_has_axes_too() -> None:
    blocks = resnet().module.blocks
    net = nn.Sequential(nn.Conv2d(1, 4, 3), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))  # type: ignore[arg-type]
    check_narrow(net, PIXELS)
    assert layered(net, example=PIXELS).structure.require_axes("this test").groups["0"].size == 4


GATES: dict[str, Any] = {
    "rnn.weight_ih_l0": (Axis("units", tiles=4), None),
    "rnn.weight_hh_l0": (Axis("units", tiles=4), "units"),
    "rnn.bias_ih_l0": (Axis("units", tiles=4),),
    "rnn.bias_hh_l0": (Axis("units", tiles=4),),
    "head.weight": ("output", "units"),
    "head.bias": ("output",),
}


class TestDeclared:
    """Axes that a user gives."""

    def test_an_lstm_is_cut_by_its_units(self) -> None:
        module = Recurrent()
        structure = structure_of(module, TOKENS, declared_axes(module, GATES, TOKENS))
        axes = structure.require_axes("this test")
        assert hidden(axes) == {"units": 8}
        assert axes.groups["output"].kind == "output"
        assert [(fit.module, fit.attribute) for fit in axes.fits] == [("rnn", "hidden_size")]
        full = tensors_of(module, structure)
        cut = {name: take(full[name], kept) for name, kept in half(structure).sent.items()}
        assert cut["rnn.weight_hh_l0"].shape == (16, 4)
        assert run(module, structure, cut, TOKENS).shape == (3, 3)

    def test_an_axis_that_is_longer_holds_each_channel_several_times(self) -> None:
        names = {"conv.weight": ("c", None, None, None), "conv.bias": ("c",), "a.weight": (None, "c")}
        assert declared_axes(Flattened(), names, PIXELS).tensors["a.weight"] == (Axis(), Axis("c", 9))

    def test_it_is_what_a_model_is_layered_with(self) -> None:
        model = layered(Recurrent(), example=TOKENS, axes=GATES)
        assert hidden(model.structure.require_axes("this test")) == {"units": 8}

    @pytest.mark.parametrize(
        ("declared", "message"),
        [
            ({"a.wieght": ("h", None)}, "axes = 'a.wieght' is unknown; did you mean 'a.weight'"),
            ({"a.weight": ("h",)}, "axes\\['a.weight'\\] must have one entry for each of its 2 axes"),
            (
                {"a.weight": ("h", None), "conv.bias": ("h",)},
                "has 6 positions, which is no multiple of the 4",
            ),
            ({"a.weight": ("h", None), "a.bias": ("h",)}, "can't run with fewer channels as declared"),
        ],
    )
    def test_what_cannot_be_is_refused(self, declared: Any, message: str) -> None:
        with pytest.raises(SettingError, match=message):
            declared_axes(Flattened(), declared, PIXELS)
