"""Follows the channels of a module through one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fedpmt.models.axes.factors import Dim, fix, leaves, new_dim
from fedpmt.models.axes.operations import Followed, Follower, follow, tensors_in
from fedpmt.types import Arrays

INPUTS, OUTPUTS = "the inputs", "the outputs"
"""Why some axes are fixed; no module is to blame."""

Exit = tuple[str, tuple[tuple[Dim, ...], ...]]
"""A module that was run, and the axes of the tensors that it returned."""


@dataclass
class Trace:
    """What one forward pass says about a module's axes."""

    tensors: Mapping[str, tuple[Dim, ...]]  # parameters and float buffers, in the order of their first use
    transposed: tuple[str, ...]  # weights that are stored as inputs x outputs
    exits: list[Exit] = field(default_factory=list)
    touched: dict[str, list[Dim]] = field(default_factory=dict)  # module -> axes that it worked on itself


class _Following(TorchDispatchMode):
    def __init__(self, follower: Follower, touch: Callable[[Dim], None]) -> None:
        super().__init__()
        self._follower, self._touch = follower, touch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        names = [argument.name for argument in func._schema.arguments]
        defaults = {
            argument.name: argument.default_value
            for argument in func._schema.arguments
            if argument.has_default_value()
        }
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **given}
        follow(self._follower, func, arguments, result)
        for tensor in tensors_in([arguments, result]):
            for dim in self._follower.dims(tensor):
                self._touch(dim)
        return result


def trace(module: nn.Module, inputs: Arrays) -> Trace:
    """Run a module on a batch of inputs and follow all of its tensors."""
    follower, stack = Follower(), [""]
    names = {id(tensor): name for name, tensor in _state(module)}
    for _, tensor in _state(module):
        follower.give(tensor, [new_dim(size) for size in tensor.shape], weights=True)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            for dim in follower.dims(parameter):
                fix(dim, f"parameter '{name}' is frozen")
    for tensor in tensors_in(inputs):
        follower.give(tensor, [new_dim(size, INPUTS) for size in tensor.shape])
    follower.used.clear()
    exits: list[Exit] = []
    touched: dict[str, list[Dim]] = {}
    follower.where = f"{describe('', module)} mixes channels"

    def enter(path: str, child: nn.Module) -> None:
        stack.append(path)
        follower.where = f"{describe(path, child)} mixes channels"

    def leave(path: str, _: nn.Module, outputs: Any) -> None:
        stack.pop()
        follower.where = f"{describe(stack[-1], module.get_submodule(stack[-1]))} mixes channels"
        exits.append((path, tuple(follower.dims(tensor) for tensor in results(outputs))))

    mode = _Following(follower, lambda dim: touched.setdefault(stack[-1], []).append(dim))
    with watch(module, enter, leave), mode:
        outputs = call(module, inputs)
    for tensor in results(outputs, scores_only=True):
        for dim in follower.dims(tensor):
            fix(dim, OUTPUTS)
            for leaf in leaves(dim):
                leaf.output = True
    used = {names[key]: follower.known[key].dims for key in follower.used if key in names}
    transposed = tuple(names[key] for key in names if key in follower.transposed)
    return Trace(used, transposed, exits, touched)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors that belong to the federation, each by its first name."""
    state = module.state_dict(keep_vars=True).keys()
    yield from module.named_parameters()
    for name, buffer in module.named_buffers():
        if name in state and buffer.is_floating_point():
            yield name, buffer


def describe(path: str, module: nn.Module) -> str:
    """A module as messages call it."""
    return f"module '{path}' ({type(module).__name__})" if path else f"the forward pass of {type(module).__name__}"


@contextmanager
def watch(
    module: nn.Module,
    enter: Callable[[str, nn.Module], None],
    leave: Callable[[str, nn.Module, Any], None],
) -> Iterator[None]:
    """Call these functions whenever a submodule begins and ends."""
    hooks = []
    for path, child in module.named_modules():
        hooks.append(
            child.register_forward_pre_hook(lambda child, _, path=path: enter(path, child), prepend=True)
        )
        hooks.append(child.register_forward_hook(lambda child, _, out, path=path: leave(path, child, out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def call(module: nn.Module, inputs: Arrays) -> Any:
    """Run a module in plain steps: no fused attention, which shows nothing of its axes."""
    # With a graph, nn.TransformerEncoderLayer does not take its fast path, which is one opaque operation.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)


def results(outputs: Any, *, scores_only: bool = False) -> list[Tensor]:
    """The tensors that a module returned; of a model that names its logits only these, if `scores_only`."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {one.name: getattr(outputs, one.name) for one in fields(outputs)}
    if isinstance(outputs, Mapping):
        if scores_only and isinstance(outputs.get("logits"), Tensor):
            return [outputs["logits"]]
        outputs = tuple(outputs.values())
    if not isinstance(outputs, list | tuple):
        return []
    return [tensor for one in outputs for tensor in results(one)]
