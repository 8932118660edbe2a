"""Follows the channels of a module through one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedpmt.models.axes.factors import Dim, fix, leaves, new_dim
from fedpmt.models.axes.operations import Follower, follow
from fedpmt.models.tracing import NoFastPath, Watching
from fedpmt.models.trees import tensors_in

if TYPE_CHECKING:
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


class _Following(Watching):
    def __init__(self, follower: Follower, touch: Callable[[Dim], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._follower, self._touch = follower, touch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        arguments = {
            argument.name: args[place]
            if place < len(args)
            else given.get(argument.name, argument.default_value)
            for place, argument in enumerate(func._schema.arguments)
        }
        follow(self._follower, func, arguments, result)
        for tensor in tensors_in([arguments, result]):
            for dim in self._follower.dims(tensor):
                self._touch(dim)
        return result


class _Tracer:
    """Follows a module through passes on one batch of inputs."""

    def __init__(self, module: nn.Module, inputs: Arrays) -> None:
        self.module, self.inputs, self.follower = module, inputs, Follower()
        self.stack: list[str] = []
        self.exits: list[Exit] = []
        self.touched: dict[str, list[Dim]] = {}
        self.names = {id(tensor): name for name, tensor in _state(module)}
        for _, tensor in _state(module):
            self.follower.give(tensor, [new_dim(size) for size in tensor.shape], weights=True)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                for dim in self.follower.known[id(parameter)].dims:
                    fix(dim, f"parameter '{name}' is frozen")
        for tensor in tensors_in(inputs):
            self.follower.give(tensor, [new_dim(size, INPUTS) for size in tensor.shape])

    def enter(self, path: str, child: nn.Module) -> None:
        self.stack.append(path)
        self.follower.where = f"{describe(path, child)} mixes channels"

    def leave(self, path: str, _: nn.Module, outputs: Any) -> None:
        self.stack.pop()
        dims = tuple(self.follower.dims(tensor) for tensor in results(outputs))
        self.exits.append((path, dims))
        if self.stack:
            self.follower.where = (
                f"{describe(self.stack[-1], self.module.get_submodule(self.stack[-1]))} mixes channels"
            )
            self.touched.setdefault(self.stack[-1], []).extend(dim for each in dims for dim in each)

    def touch(self, dim: Dim) -> None:
        self.touched.setdefault(self.stack[-1] if self.stack else "", []).append(dim)

    def run(self) -> None:
        """One pass."""
        with watch(self.module, self.enter, self.leave), _Following(self.follower, self.touch):
            outputs = call(self.module, self.inputs)
        for dim in (
            dim for tensor in results(outputs, scores_only=True) for dim in self.follower.dims(tensor)
        ):
            fix(dim, OUTPUTS)
            for leaf in leaves(dim):
                leaf.output = True

    def unused(self) -> list[str]:
        """Trained parameters that no pass has used."""
        parameters = self.module.named_parameters()
        return [name for name, one in parameters if one.requires_grad and id(one) not in self.follower.used]

    def spare(self, name: str) -> None:
        """A parameter was not used, but may be for other inputs: nothing that may then go into it can be cut."""
        ran = {path for path, _ in self.exits}
        owner = name.rpartition(".")[0]
        while owner not in ran and owner:
            owner = owner.rpartition(".")[0]
        for dim in self.touched.get(owner, []):
            fix(dim, f"parameter '{name}' is not used for the example batch")


def trace(module: nn.Module, inputs: Arrays) -> Trace:
    """Run a module on a batch of inputs and follow all of its tensors."""
    tracer = _Tracer(module, inputs)
    tracer.run()
    exits = list(tracer.exits)
    if tracer.unused():
        # Some heads are used in training only.
        module.train()
        tracer.run()
        module.eval()
    for name in tracer.unused():
        tracer.spare(name)
    known, names = tracer.follower.known, tracer.names
    used = {names[key]: known[key].dims for key in tracer.follower.used if key in names}
    transposed = tuple(names[key] for key in names if key in tracer.follower.transposed)
    return Trace(used, transposed, exits, tracer.touched)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors that belong to the federation, each by its first name."""
    state = module.state_dict(keep_vars=True).keys()
    yield from module.named_parameters()
    for name, buffer in module.named_buffers():
        if name in state and buffer.is_floating_point():
            yield name, buffer


def describe(path: str, module: nn.Module) -> str:
    """A module as messages call it."""
    return (
        f"module '{path}' ({type(module).__name__})"
        if path
        else f"the forward pass of {type(module).__name__}"
    )


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
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), NoFastPath():
        return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)


def results(outputs: Any, *, scores_only: bool = False) -> list[Tensor]:
    """The tensors that a module returned; of a model that names its logits only these, if `scores_only`."""
    if scores_only and isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        return [outputs["logits"]]
    return list(tensors_in(outputs))
