"""A user's class that runs known modules one after another is trained in compiled code, as its Sequential is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpmt
from fedpmt import kernels
from fedpmt.methods.fedavg import FedAvg
from fedpmt.models.layered import layered
from fedpmt.training.local import LocalWork
from models.chains_of_users import Viewed, twins
from support import FEW, samples

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.training.local import Run
    from fedpmt.types import Examples

needs_compiler = pytest.mark.skipif(not kernels.available(), reason="there is no C compiler here")
TWINS = twins()


def run(module: nn.Module, folder: Path, **settings: Any) -> tuple[str | None, dict[str, Tensor]]:
    """How two rounds were computed, and the weights after them."""
    shape = settings.pop("shape", (1, 8, 8))
    pairs = [
        (examples.inputs.numpy(), examples.targets.numpy())
        for examples in (samples(120, shape), samples(30, shape, seed=1))
    ]
    given = {"method": "fedpmt", "rounds": 2, "lr": 0.1, "epochs": 2, "batch": 5, **FEW, **settings}
    done = fedpmt.run(model=module, train=pairs[0], test=pairs[1], out=folder, **given)
    assert done.result is not None
    return done.result.path, load_file(folder / "model.safetensors")


@needs_compiler
@pytest.mark.parametrize("name", TWINS)
def test_a_class_is_trained_to_the_bits_of_its_sequential(name: str, tmp_path: Path) -> None:
    net, sequential = TWINS[name]
    layers = [layer.name for layer in layered(net, example=samples(2).inputs).structure.layers]
    path, weights = run(net, tmp_path / "class")
    wanted_path, wanted = run(sequential, tmp_path / "sequential", layers=layers)
    assert path == wanted_path == "compiled"
    before = sequential.state_dict()
    assert weights.keys() == wanted.keys() == before.keys()
    assert all(torch.equal(weights[key], one) for key, one in wanted.items())
    assert not any(torch.equal(before[key], one) for key, one in wanted.items())


class Padded(Viewed):
    """A chain, though not of what compiled code knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.fc1 = nn.Linear(64, 8)


class Smooth(Viewed):
    """No chain."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.gelu(self.conv(x)), 2)
        return self.out(self.fc1(x.flatten(1)))  # type: ignore[no-any-return]


class Unflattened(Viewed):
    """Classifies each row of each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.fc1 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.fc1(self.conv(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Padded, Smooth, Unflattened])
def test_another_class_is_left_to_autograd(kind: type[nn.Module]) -> None:
    inputs = samples(5).inputs
    model = layered(kind(), example=inputs)
    assert not kernels.knows(model, inputs)
    assert kernels.forward(model, model.initial(), inputs) is None


def test_tensors_used_in_two_places_are_left_to_autograd() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    net[0][2].weight = net[0][0].weight  # type: ignore[index]
    model = layered(net, layers=["0"])
    assert model.composable
    assert not kernels.knows(model, torch.zeros(2, 4))


class ByHand(LocalWork[Any]):
    """Calls the module itself, as a method of a user's own may."""

    def loss(self, run: Run[Any], batch: Examples) -> Tensor:
        outputs = run.job.model.forward(run.tensors, batch.inputs)
        return F.cross_entropy(outputs, batch.targets)


@dataclass(frozen=True)
class HandMade(FedAvg):
    @property
    def local(self) -> LocalWork[Any]:
        return ByHand()


@needs_compiler
def test_a_view_is_given_the_layout_it_counts_on(tmp_path: Path) -> None:
    """Compiled code reads images with channels last, on which the class's own `view` would fail."""
    net = Viewed()
    net.conv = nn.Conv2d(3, 4, 3)
    path, _ = run(net, tmp_path / "run", method=HandMade(), shape=(3, 8, 8))
    assert path == "autograd"
