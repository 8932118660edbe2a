"""A compiled forward pass in autograd's graph gives torch's gradients, under any loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpmt import kernels
from fedpmt.kernels import differentiable
from fedpmt.kernels import graph as module
from fedpmt.models.build import FlatLinear, build
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import NETS
from fedpmt.seeds import generator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fedpmt.types import Tensors

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
