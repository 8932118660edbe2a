"""Nets as users write them: unusual ones, narrow ones, and classes that are chains, each with its Sequential."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedpmt.models.axes import fit_attributes, traced_axes
from fedpmt.models.structure import Axes, Layer, Structure
from fedpmt.parts.part import embedded, take
from fedpmt.parts.width import hidden_groups, kept_count, narrow, random_channels

if TYPE_CHECKING:
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays


class Block(nn.Module):
    """A residual block with BatchNorm and a 1x1 shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """Its forward pass pools between the blocks and the classifier, so it is not a chain of its layers."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Block(4, 4), Block(4, 8))
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(torch.relu(self.bn(self.stem(x))))
        return self.fc(hidden.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A small encoder over token ids, given as keywords."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(tokens))
        return self.head(hidden.mean(dim=1)) * scale[:, None]  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x)))  # type: ignore[no-any-return]


class Loose(nn.Module):
    """A parameter that belongs to no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class Grouped(nn.Module):
    """GroupNorm, grouped and depthwise convolutions, squeeze and excite, and many activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=8)
        self.wide = nn.Sequential(nn.Conv2d(16, 10, 1), nn.ReLU6(), nn.Dropout2d(0.1))
        self.deep = nn.Sequential(nn.Conv2d(10, 10, 3, padding=1, groups=10), nn.BatchNorm2d(10), nn.SiLU())
        self.squeeze, self.excite = nn.Linear(10, 4), nn.Linear(4, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(functional.hardswish(self.norm(self.stem(x))))
        x = self.deep(self.wide(functional.gelu(x)))
        gate = self.excite(self.squeeze(x.mean((2, 3))).relu()).sigmoid()
        return self.head((x * gate[:, :, None, None]).amax((2, 3)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention over a residual stream, with queries, keys and values in one weight, and a gated MLP."""

    def __init__(self, heads: int = 4, size: int = 16) -> None:
        super().__init__()
        self.h, self.size = heads, size
        self.embed, self.norm = nn.Linear(6, size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 20), nn.Linear(10, size)
        self.head = nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        rows, steps, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, steps, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.merge(functional.scaled_dot_product_attention(q, k, v), x))
        x = x + self.down(functional.glu(self.up(x)))
        return self.head(x.mean(1))  # type: ignore[no-any-return]

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)


Twin = tuple[nn.Module, nn.Sequential]


class Convolutional(nn.Module):
    """Functions for all that has no weights, as in PyTorch's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 5, 2)
        self.fc1 = nn.Linear(20, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return self.out(x)  # type: ignore[no-any-return]


class Viewed(nn.Module):
    """Pools before the ReLU, and flattens by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc1 = nn.Linear(36, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        x = torch.relu(F.max_pool2d(self.conv(x), kernel_size=(2, 2), stride=2))
        x = x.view(x.size(0), -1)
        x = self.fc1(x).relu_()
        return self.out(x.reshape(batch, 8))  # type: ignore[no-any-return]


class SharedModules(nn.Module):
    """One module for every activation, one for every pool, and dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.0)
        self.skip = nn.Identity()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc1 = nn.Linear(36, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv(self.skip(x))))
        x = F.dropout(x.flatten(start_dim=1), 0.0, self.training)
        x = self.drop(self.relu(self.fc1(x)))
        return self.out(x)  # type: ignore[no-any-return]


class Nested(nn.Module):
    """Layers inside Sequentials and inside a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Sequential(nn.MaxPool2d(2)))
        self.head = Perceptron(36)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Perceptron(nn.Module):
    """Fully connected layers on rows of a fixed length."""

    def __init__(self, inputs: int = 64) -> None:
        super().__init__()
        self.inputs = inputs
        self.fc1 = nn.Linear(inputs, 8, bias=False)
        self.fc2 = nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, self.inputs)
        for layer in (self.fc1, self.fc2):
            x = layer(x).relu()
        return self.out(x)  # type: ignore[no-any-return]


def twins() -> dict[str, Twin]:
    """Make each class and its Sequential, with the same weights under the same names."""
    torch.manual_seed(0)
    nets = [Convolutional(), Viewed(), SharedModules(), Nested(), Perceptron()]
    return {type(net).__name__: (net, twin(net)) for net in nets}


def twin(net: nn.Module) -> nn.Sequential:
    """Write a class out as a Sequential; modules without weights get names that it does not use."""

    def named(*modules: tuple[str, nn.Module]) -> nn.Sequential:
        return nn.Sequential(OrderedDict(modules))

    pool, flat, act = ("pool", nn.MaxPool2d(2)), ("flat", nn.Flatten()), ("act", nn.ReLU())
    match net:
        case Convolutional():
            made = named(
                ("conv1", nn.Conv2d(1, 4, 3)), ("act0", nn.ReLU()), pool, ("conv2", nn.Conv2d(4, 5, 2)), act,
                flat, ("fc1", nn.Linear(20, 8)), ("act1", nn.ReLU()), ("out", nn.Linear(8, 3)),
            )  # fmt: skip
        case Viewed() | SharedModules():
            made = named(
                ("conv", nn.Conv2d(1, 4, 3)), pool, act, flat, ("fc1", nn.Linear(36, 8)),
                ("act1", nn.ReLU()), ("out", nn.Linear(8, 3)),
            )  # fmt: skip
        case Nested():
            head = named(
                ("fc1", nn.Linear(36, 8, bias=False)), ("act0", nn.ReLU()), ("fc2", nn.Linear(8, 6)),
                ("act1", nn.ReLU()), ("out", nn.Linear(6, 3)),
            )  # fmt: skip
            made = named(
                ("features", nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))),
                flat,
                ("head", head),
            )
        case _:
            made = named(
                flat, ("fc1", nn.Linear(64, 8, bias=False)), ("act0", nn.ReLU()), ("fc2", nn.Linear(8, 6)),
                ("act1", nn.ReLU()), ("out", nn.Linear(6, 3)),
            )  # fmt: skip
    made.load_state_dict(net.state_dict())
    return made


def structure_of(module: nn.Module, example: Arrays, axes: Axes | None = None) -> Structure:
    """A module as one layer, with its axes."""
    parameters = dict(module.named_parameters())
    buffers = {name: one for name, one in module.named_buffers() if one.is_floating_point()}
    shapes = {name: tuple(one.shape) for name, one in {**parameters, **buffers}.items()}
    layer = Layer("model", tuple(parameters), tuple(buffers))
    return Structure((layer,), shapes, axes or traced_axes(module, example))


def tensors_of(module: nn.Module, structure: Structure) -> dict[str, Tensor]:
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: state[name].detach().clone() for name in structure.tensors}


def run(module: nn.Module, structure: Structure, tensors: Mapping[str, Tensor], inputs: Arrays) -> Tensor:
    """The scores that a module gives on these tensors."""
    arguments, keywords = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    fit_attributes(module, structure, tensors)
    outputs: Any = functional_call(module, dict(tensors), arguments, keywords)
    fit_attributes(module, structure, {})
    return outputs if isinstance(outputs, Tensor) else outputs["logits"]


def half(structure: Structure, seed: int = 0) -> Part:
    """A random half of all channels."""
    axes, rng = structure.require_axes("this test"), np.random.default_rng(seed)
    kept = {
        group.name: random_channels(group.size, kept_count(group.size, 0.5), rng)
        for group in hidden_groups(axes)
    }
    return narrow(structure, axes, kept, "half")


def randomise(module: nn.Module) -> nn.Module:
    """No weight is zero, as some are at the start, and no statistic is trivial."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter[0].numel() if parameter.dim() > 1 else 16
            parameter.copy_((parameter.dim() < 2) + torch.randn_like(parameter) / scale**0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    return module.eval()


def check_narrow(module: nn.Module, example: Arrays, *, exact: bool = True) -> Structure:
    """A narrow pass is the full one with the dropped channels zeroed, and a narrow net can be trained."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = {path: dict(vars(child)) for path, child in module.named_modules()}
    randomise(module)
    structure = structure_of(module, example)
    full = tensors_of(module, structure)
    for seed in range(2):
        part = half(structure, seed)
        cut = {name: take(full[name], selection) for name, selection in part.sent.items()}
        assert sum(map(Tensor.numel, cut.values())) < sum(map(Tensor.numel, full.values()))
        narrow_scores = run(module, structure, cut, example)
        if exact:
            zeroed = embedded(cut, part.sent, structure.shapes)
            wanted = run(module, structure, zeroed, example)
            torch.testing.assert_close(narrow_scores, wanted, rtol=1e-3, atol=1e-4)
            # The dropped channels had something to say.
            assert not torch.allclose(narrow_scores, run(module, structure, full, example), atol=1e-4)
    check_step(module, structure, cut, example)
    for path, child in module.named_modules():
        assert all(
            vars(child)[name] == value for name, value in attributes[path].items() if type(value) is int
        )
    module.load_state_dict(before)
    return structure


def check_step(module: nn.Module, structure: Structure, cut: Mapping[str, Tensor], example: Arrays) -> None:
    """A small step along the gradient lowers the loss."""
    module.train()
    trained = {name: cut[name].clone().requires_grad_() for name in structure.parameters}
    buffers = {name: cut[name].clone() for name in structure.buffers}

    def loss_of(tensors: Mapping[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        # A copy, as norms change their statistics in place.
        own = {name: tensor.clone() for name, tensor in buffers.items()}
        return run(module, structure, {**tensors, **own}, example).square().mean()

    loss = loss_of(trained)
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    assert all(one is None or bool(one.isfinite().all()) for one in gradients)
    norm = sum(float(one.square().sum()) for one in gradients if one is not None)
    assert norm > 0
    rate = 1e-2 * float(loss.detach()) / norm
    stepped = {
        name: tensor.detach() if gradient is None else tensor.detach() - rate * gradient
        for (name, tensor), gradient in zip(trained.items(), gradients, strict=True)
    }
    with torch.no_grad():
        assert float(loss_of(stepped)) < float(loss.detach())
    module.eval()
