"""Compiled passes as torch's own: in autograd's graph, and of users' classes that are chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import fedpmt
from fedpmt import kernels
from fedpmt.kernels import differentiable
from fedpmt.kernels import graph as module
from fedpmt.methods.fedavg import FedAvg
from fedpmt.models.build import FlatLinear, build
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import NETS
from fedpmt.seeds import generator
from fedpmt.training.local import LocalWork
from models.nets_of_users import Viewed, twins
from support import FEW, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from fedpmt.training.local import Run
    from fedpmt.types import Examples, Tensors


needs_compiler = pytest.mark.skipif(not kernels.available(), reason="there is no C compiler here")


def close(own: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for one, other in zip(own, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def leaves(model: LayeredModel, first: int = 0) -> dict[str, Tensor]:
    names = {name for layer in model.structure.layers[first:] for name in layer.tensors}
    return {name: tensor.requires_grad_() for name, tensor in model.initial().items() if name in names}


def odd_loss(outputs: Tensor) -> Tensor:
    """None that any fast path knows: entropy, and a square that not every row has."""
    shares = functional.softmax(outputs, dim=1)
    return (shares * shares.log()).sum() + outputs[::2].square().mean()


def gradients(forward: Callable[[Tensors, Tensor], Tensor], tensors: Tensors, inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(odd_loss(forward(tensors, inputs)), list(tensors.values())))


def edge_net() -> LayeredModel:
    """As FedGKT's devices have it."""
    return layered(nn.Sequential(nn.Conv2d(3, 5, 3), nn.MaxPool2d(2), nn.ReLU(), FlatLinear((5, 7, 7), 4)))


@needs_compiler
@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_torch_s_from_any_layer_on(name: str, first: int) -> None:
    model = build(NETS[name], generator(0, "init"))
    tensors = leaves(model, first)
    images = torch.randn(7, *NETS[name].input_shape, generator=torch.Generator().manual_seed(1))
    inputs = model.prefix(first, model.initial(), images) if first else images
    wanted = gradients(lambda t, x: model.suffix(first, t, x), tensors, inputs)
    forward = differentiable(model, first)
    assert "_Chain" in type(forward(tensors, inputs).grad_fn).__name__
    close(gradients(forward, tensors, inputs), wanted)


@needs_compiler
def test_a_head_that_flattens_is_known() -> None:
    model, inputs = edge_net(), torch.randn(6, 3, 16, 16)
    tensors = leaves(model)
    close(gradients(differentiable(model), tensors, inputs), gradients(model.forward, tensors, inputs))


@needs_compiler
def test_passes_that_are_open_at_once_do_not_disturb_each_other() -> None:
    """As where a wide net teaches a narrow one inside it, or public samples stand beside a device's own."""
    model = build(NETS["cnn-mnist"], generator(0, "init"))
    tensors, forward = leaves(model), differentiable(model)
    corner = tensors | {name: tensors[name][:50] for name in ("fc1.weight", "fc1.bias")}
    corner["out.weight"] = tensors["out.weight"][:, :50]
    batches = torch.randn(2, 5, 1, 28, 28).unbind()

    def all_of(run: Callable[[Tensors, Tensor], Tensor]) -> tuple[Tensor, ...]:
        first, second, narrow = run(tensors, batches[0]), run(tensors, batches[1]), run(corner, batches[0])
        loss = (
            odd_loss(first) + odd_loss(second) + functional.cross_entropy(narrow, first.detach().softmax(1))
        )
        return torch.autograd.grad(loss, list(tensors.values()))

    close(all_of(forward), all_of(model.forward))


@needs_compiler
def test_a_pass_is_used_again_and_only_so_many_are_kept() -> None:
    model = build(NETS["fcnn-mnist"], generator(0, "init"))
    tensors, forward = leaves(model), differentiable(model)
    images = torch.randn(9, 1, 28, 28)
    before = [tensor.detach().clone() for tensor in tensors.values()]
    for _ in range(2 * module.KEPT):
        gradients(forward, tensors, images)
    once = module._own.free[0]
    for size in (9, 4, 1):  # the last batch of an epoch is shorter
        close(gradients(forward, tensors, images[:size]), gradients(model.forward, tensors, images[:size]))
        assert module._own.free[0] is once
    open_at_once = [forward(tensors, images) for _ in range(module.KEPT + 3)]
    torch.autograd.grad(torch.stack([odd_loss(one) for one in open_at_once]).sum(), list(tensors.values()))
    assert len(module._own.free) == module.KEPT
    assert all(torch.equal(own, old) for own, old in zip(tensors.values(), before, strict=True))


@needs_compiler
def test_frozen_tensors_get_no_gradient() -> None:
    model = build(NETS["cnn-mnist"], generator(0, "init"))
    tensors = leaves(model)
    frozen = tensors["conv2.weight"].requires_grad_(False)
    trained = {name: tensor for name, tensor in tensors.items() if tensor is not frozen}
    images = torch.randn(3, 1, 28, 28)
    wanted = torch.autograd.grad(odd_loss(model.forward(tensors, images)), list(trained.values()))
    odd_loss(differentiable(model)(tensors, images)).backward()  # type: ignore[no-untyped-call]
    assert frozen.grad is None
    close((tensor.grad for tensor in trained.values() if tensor.grad is not None), wanted)


@pytest.mark.parametrize("case", ["double", "gradient of inputs", "no graph", "another module", "no sample"])
def test_what_compiled_code_does_not_know_is_torch_s(case: str) -> None:
    model = build(NETS["cnn-mnist"], generator(0, "init"))
    inputs = torch.randn(3, 1, 28, 28)
    if case == "another module":
        model = layered(nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.Tanh(), nn.Linear(5, 2)))
    tensors = leaves(model)
    if case == "double":
        tensors, inputs = {name: tensor.double() for name, tensor in tensors.items()}, inputs.double()
    if case == "no sample":
        inputs = inputs[:0]
    if case == "gradient of inputs":
        inputs.requires_grad_()
    with torch.set_grad_enabled(case != "no graph"):
        assert torch.equal(differentiable(model)(tensors, inputs), model.forward(tensors, inputs))


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
