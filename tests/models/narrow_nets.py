"""Runs modules with fewer channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpmt.models.axes import fit_attributes, traced_axes
from fedpmt.models.structure import Axes, Layer, Structure
from fedpmt.parts.part import embedded, take
from fedpmt.parts.width import hidden_groups, kept_count, narrow, random_channels

if TYPE_CHECKING:
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays


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
