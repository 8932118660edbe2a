"""Nets that only run modules one after another, as users write them: the class, and the same as an `nn.Sequential`."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Shared(nn.Module):
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
    nets = [Convolutional(), Viewed(), Shared(), Nested(), Perceptron()]
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
        case Viewed() | Shared():
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
