"""Any module is priced by running it: residual nets, attention, recurrent cells, several inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fedpmt.models.layered import layered
from fedpmt.parts import depth
from fedpmt.pricing.cost_table import model_table
from fedpmt.pricing.price import Price

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.models.layered import LayeredModel
    from fedpmt.types import Arrays


def price_of(model: LayeredModel, example: Arrays, batch: int = 6, *, cached: bool = False) -> Price:
    return Price(model, mode="exact", batch=batch, samples=30, cached=cached, held=0, example=example)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(inputs)))
        return torch.relu(self.drop(self.norm2(self.conv2(hidden))) + self.shortcut(inputs))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.block1 = Block(4, 8)
        self.block2 = Block(8, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.block2(self.block1(self.stem(inputs))).mean((2, 3)))  # type: ignore[no-any-return]


RESNET = ["stem", "block1", "block2", "head"]


class TestResNet:
    """16 x 16 inputs, so the stem has 256 positions, block 1 has 64 and block 2 has 16."""

    stem = 3 * 9 * 4 * 256
    into1 = (4 * 9 * 8 + 4 * 8) * 64  # conv1 and the shortcut of block 1
    inside1 = 8 * 9 * 8 * 64  # conv2
    into2 = (8 * 9 * 16 + 8 * 16) * 16
    inside2 = 16 * 9 * 16 * 16
    head = 160
    sizes = (
        3 * 9 * 4 + 4,
        4 * 9 * 8 + 8 * 9 * 8 + 4 * 8 + 4 * 8,
        8 * 9 * 16 + 16 * 9 * 16 + 8 * 16 + 4 * 16,
        170,
    )

    def price(self) -> Price:
        example = torch.randn(3, 3, 16, 16)
        return price_of(layered(ResNet(), layers=RESNET, example=example), example)

    def test_every_cut(self) -> None:
        price = self.price()
        gradients = [self.stem, self.into1 + self.inside1, self.into2 + self.inside2, self.head]
        errors = [
            self.into1 + self.inside1 + self.into2 + self.inside2 + self.head,
            self.inside1 + self.into2 + self.inside2 + self.head,  # none into block 1's input
            self.inside2 + self.head,
            0,
        ]
        for frozen in range(4):
            cost = price(depth.suffix(price.structure, frozen, ""))
            assert cost.prefix == 6 * sum(gradients[:frozen])
            assert cost.forward == 6 * sum(gradients[frozen:])
            assert cost.gradient == 6 * sum(gradients[frozen:])
            assert cost.error == 6 * errors[frozen]
            assert cost.update == sum(self.sizes[frozen:])

    def test_pricing_leaves_no_trace(self) -> None:
        module = ResNet().eval()
        model = layered(module, layers=RESNET)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        price = price_of(model, torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
        price.layers()
        assert torch.equal(torch.rand(3), expected)
        assert not any(child.training for child in module.modules())
        assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
        after = module.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)

    def test_its_table_has_no_feddrop(self) -> None:
        table = model_table("ResNet", self.price())
        assert [row.depth for row in table.depths] == [1, 2, 3, 4]
        assert all(row.feddrop_keep is None and row.feddrop_operations is None for row in table.depths)
        # Statistics of trained norms travel with their parameters: two per channel, of two norms per block.
        buffers = 2 * 2 * (8 + 16)
        assert table.depths[-1].upload_bytes == 4 * (sum(self.sizes) + buffers)
        assert [layer.kind for layer in table.layers] == ["conv", "other", "other", "linear"]


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.first = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        hidden = self.second(self.first(self.embed(tokens) * scale[:, None, None]))
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


class TestTransformer:
    """5 tokens of 8 numbers, called by keyword; frozen layers would take torch's fused path."""

    projection = 5 * 3 * 8 * 8  # into queries, keys and values
    weighted = 5 * (4 * 8 * 8 + 2 * 8 * 16)
    attention = 2 * 5 * 5 * 8
    layer = weighted + attention
    head = 8 * 4

    def test_every_cut(self) -> None:
        for dropout in (0.0, 0.1):
            example = {"tokens": torch.randint(0, 50, (4, 5)), "scale": torch.ones(4)}
            model = layered(Encoder(dropout), layers=["embed", "first", "second", "head"], example=example)
            price = price_of(model, example)
            cuts = [depth.suffix(price.structure, frozen, "") for frozen in range(4)]
            costs = [price(part) for part in cuts]
            gradients = [2 * self.weighted + self.head] * 2 + [self.weighted + self.head, self.head]
            # Attention has two products and each has two gradients, neither of them a weight's.
            through = self.layer + self.attention
            errors = [
                2 * through + self.head,
                2 * through - self.projection + self.head,
                through - self.projection + self.head,
                0,
            ]
            assert [cost.prefix for cost in costs] == [0, 0, 6 * self.layer, 12 * self.layer]
            assert {cost.prefix + cost.forward for cost in costs} == {6 * (2 * self.layer + self.head)}
            assert [cost.gradient for cost in costs] == [6 * gradient for gradient in gradients]
            assert [cost.error for cost in costs] == [6 * error for error in errors]

    def test_keeps_what_crosses_the_cut(self) -> None:
        """Of each sample 5 tokens of 8 numbers; without an example nobody knows how to cut, and nothing is kept."""
        example = {"tokens": torch.zeros(2, 5, dtype=torch.long), "scale": torch.ones(2)}
        kept = []
        for known in (example, None):
            model = layered(Encoder(), layers=["embed", "first", "second", "head"], example=known)
            price = price_of(model, example, cached=True)
            kept.append(price(depth.suffix(price.structure, 3, "")).memory.prefix_cache)
        assert kept == [price.samples * 5 * 8 * 4, 0]


def test_grouped_strided_and_transposed_convolutions() -> None:
    module = nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.Flatten(),
        nn.Linear(6 * 64, 3),
    )
    price = price_of(layered(module), torch.zeros(2, 4, 8, 8), batch=1)
    grouped, transposed, linear = 8 * 9 * 16, 16 * 8 * 6 * 4, 6 * 64 * 3
    assert [layer.forward for layer in price.layers()] == [grouped, transposed, linear]
    assert [layer.gradient for layer in price.layers()] == [grouped, transposed, linear]
    assert [layer.error for layer in price.layers()] == [transposed, linear, 0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.cell(inputs)[0][:, -1])  # type: ignore[no-any-return]


def test_recurrent_cells_are_counted() -> None:
    price = price_of(layered(Recurrent(), layers=["cell", "head"]), torch.zeros(2, 7, 4), batch=1)
    cell = 7 * 12 * (4 + 3)
    assert price.full.forward == cell + 6
    assert price.full.gradient == cell + 6


def test_an_unused_layer_has_no_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.side = nn.Linear(3, 3)
            self.last = nn.Linear(3, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            self.side(hidden)
            return self.last(hidden)  # type: ignore[no-any-return]

    cost = price_of(layered(Unused(), layers=["first", "side", "last"]), torch.zeros(2, 3), batch=1).full
    assert (cost.forward, cost.gradient, cost.error, cost.update) == (27, 18, 9, 36)
