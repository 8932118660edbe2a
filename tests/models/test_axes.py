"""Which channels go together, in a chain and in a residual net."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpmt.models.axes import traced_axes
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.structure import Axis
from fedpmt.parts.part import add_at, take
from fedpmt.parts.width import hidden_groups, kept_count, narrow, random_channels
from models.nets_of_users import Loose, ResNet, Shared, Tied, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable


def resnet() -> LayeredModel:
    torch.manual_seed(0)
    return layered(ResNet(), example=torch.zeros(2, 1, 8, 8))


def check_cut(model: LayeredModel, inputs: Tensor, seed: int = 0) -> None:
    """A narrow forward pass is the full one with the dropped channels zeroed."""
    structure = model.structure
    axes, rng = structure.require_axes("this test"), np.random.default_rng(seed)
    kept = {g.name: random_channels(g.size, kept_count(g.size, 0.5), rng) for g in hidden_groups(axes)}
    part = narrow(structure, axes, kept, "half")
    full = model.initial()
    cut = {name: take(full[name], selection) for name, selection in part.sent.items()}
    zeroed = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    for name, selection in part.sent.items():
        add_at(zeroed[name], selection, cut[name])
    model.set_training([False] * len(structure.layers))
    torch.testing.assert_close(
        model.forward(cut, inputs), model.forward(zeroed, inputs), rtol=1e-4, atol=1e-5
    )
    assert any(cut[name].shape != full[name].shape for name in full)


def test_added_tensors_share_their_channels() -> None:
    axes = resnet().structure.require_axes("this test")
    assert [group.name for group in hidden_groups(axes)] == [
        "stem",
        "blocks.0.conv1",
        "blocks.1.conv1",
        "blocks.1.conv2",
    ]
    # The identity shortcut ties the first block's output to the stem's, norms included.
    for name in ("stem.weight", "bn.running_mean", "blocks.0.conv2.weight", "blocks.0.bn2.bias"):
        assert axes.tensors[name][0] == Axis("stem")
    # A 1x1 shortcut has the input channels of conv1 and the output channels of conv2.
    assert axes.tensors["blocks.1.shortcut.weight"][:2] == (Axis("blocks.1.conv2"), Axis("stem"))
    assert axes.tensors["blocks.1.conv1.weight"][1] == Axis("stem")
    assert axes.groups["fc"].kind == "output"


@pytest.mark.parametrize("seed", range(3))
def test_a_residual_net_is_cut_consistently(seed: int) -> None:
    model = resnet()
    with torch.no_grad():
        for name, buffer in model.module.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    check_cut(model, torch.randn(4, 1, 8, 8), seed)


class Flattened(nn.Module):
    """Pools and flattens by calls, adds in place, and has a linear residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.a = nn.Linear(36, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.flatten(functional.max_pool2d(functional.relu(self.conv(x)), 2), 1)
        hidden = self.a(hidden).relu()
        hidden += self.b(hidden)
        return self.c(hidden)  # type: ignore[no-any-return]


def test_a_flatten_and_calls_are_followed() -> None:
    model = layered(Flattened(), example=torch.zeros(2, 1, 8, 8))
    axes = model.structure.require_axes("this test")
    assert axes.tensors["a.weight"] == (Axis("a"), Axis("conv", 9))
    assert axes.tensors["b.weight"] == (Axis("a"), Axis("a"))
    check_cut(model, torch.randn(4, 1, 8, 8))


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
        (lambda x: x, 6),  # works on columns
        (lambda x: x.mean(dim=(2, 3)) + 1, 4),
        (lambda x: torch.cat([x, x], 1).flatten(1), 288),
    ],
)
def test_what_may_mix_channels_is_not_followed(between: Callable[[Tensor], Tensor], features: int) -> None:
    assert traced_axes(Odd(between, features)) is None


@pytest.mark.parametrize("module", [Transformer(), Shared(), Loose(), Tied()])
def test_what_cannot_be_followed_has_no_axes(module: nn.Module) -> None:
    assert traced_axes(module) is None


def test_what_is_added_to_the_inputs_is_not_cut() -> None:
    class Plus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.back = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.back(hidden + torch.relu(self.inner(hidden)))  # type: ignore[no-any-return]

    axes = traced_axes(Plus())
    assert axes is not None
    assert [group.name for group in hidden_groups(axes)] == ["first"]


def test_a_chain_with_a_residual_block_has_axes_too() -> None:
    blocks = resnet().module.blocks
    net = nn.Sequential(nn.Conv2d(1, 4, 3), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))  # type: ignore[arg-type]
    check_cut(layered(net), torch.randn(4, 1, 8, 8))
