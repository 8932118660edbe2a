"""Modules that only run other modules one after another: an `nn.Sequential`, or a class whose `forward` comes to that.

A user's class is traced with `torch.fx`. Where each call takes the result of the one before it and nothing else, the
class is a chain: of its own modules, and of modules that stand for the functions it calls (ReLU, max-pool, flatten). A
trace does not show everything, `torch.no_grad` for one, so a chain must also give the module's own outputs and
gradients on an example, to the bit.
"""

from __future__ import annotations

import copy
import operator
import random
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fedpmt.types import Arrays


class Link(NamedTuple):
    """One module of a chain."""

    path: str | None
    """Where the module has it; None for a module that stands for a function, which has no tensors."""
    module: nn.Module

    def inside(self, paths: Sequence[str]) -> bool:
        """Whether it is one of the modules at these paths, or in one of them."""
        own = self.path
        return own is not None and any(path in ("", own) or own.startswith(f"{path}.") for path in paths)


Chain: TypeAlias = tuple[Link, ...]

ROWS = 4
"""Samples of the example on which a chain is compared with its module."""


class _NoChain(Exception):  # noqa: N818
    """A forward pass does something else than to run known operations one after another."""


def find_chain(module: nn.Module, example: Arrays | None = None) -> Chain | None:
    """Find the modules that a module runs one after another.

    Args:
        module: An `nn.Sequential`, or any other module; it is not changed.
        example: A batch of inputs; without it only an `nn.Sequential` is known to be a chain.

    Returns:
        The modules in order; None where the forward pass is not such a chain, or can't be shown to be one. If the
        children of an `nn.Sequential` are not all chains of torch's own modules, each child is one link.

    Examples:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.hidden, self.out = nn.Linear(4, 3), nn.Linear(3, 2)
        ...     def forward(self, x):
        ...         return self.out(torch.relu(self.hidden(x.view(x.size(0), -1))))
        >>> [link.path or link.module for link in find_chain(Net(), torch.ones(2, 2, 2))]
        [Flatten(start_dim=1, end_dim=-1), 'hidden', ReLU(), 'out']
    """
    children: Chain = ()
    if is_plain_sequential(module):
        children = tuple(Link(*child) for child in sequential_children(module))
        if all(_built_in(link.module) for link in children):
            return children
    return _traced_chain(module, example) or children or None


def bind_chain(chain: Chain, module: nn.Module) -> Chain:
    """Give the same chain of a copy of its module."""
    return tuple(
        link if link.path is None else Link(link.path, module.get_submodule(link.path)) for link in chain
    )


def split_chain(chain: Chain, layers: Sequence[Sequence[str]]) -> tuple[Chain, ...] | None:
    """Divide a chain among layers, each given by the paths of its modules.

    What is in no layer belongs to the one before it, or to the first. None where the layers do not follow one
    another in the chain.
    """
    runs: list[list[Link]] = [[] for _ in layers]
    current = 0
    for link in chain:
        owner = next((number for number, paths in enumerate(layers) if link.inside(paths)), current)
        if owner < current and next(link.module.parameters(), None) is not None:
            return None
        current = max(current, owner)  # an activation that several layers share is listed with the first
        runs[current].append(link)
    return tuple(map(tuple, runs)) if all(runs) else None


def calls_modules_only(chain: Iterable[Link]) -> bool:
    """Whether no link stands for a function: a `view` counts on the usual memory layout, modules take any."""
    return all(link.path is not None for link in chain)


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module does nothing but run its children in a row."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and not hooked(module)
    )


def hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than the forward pass of its class."""
    return "forward" in vars(module) or bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def sequential_children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a (nested) Sequential runs one after another, each with its path."""
    # Not named_children, which leaves out the second use of one module, such as a shared activation.
    for name, child in module._modules.items():
        child_path = f"{path}.{name}" if path else name
        if child is not None and is_plain_sequential(child):
            yield from sequential_children(child, child_path)
        elif child is not None:
            yield child_path, child


def _built_in(module: nn.Module) -> bool:
    """Whether a module is one of torch's own, and not of a class that was derived from one."""
    return getattr(nn, type(module).__name__, None) is type(module)


def _traced_chain(module: nn.Module, example: Arrays | None) -> Chain | None:
    if not isinstance(example, Tensor) or not len(example) or not _traceable(module):
        return None
    drawn = _random_state()
    try:
        # A forward pass may change its module: a copy runs, on the module's own tensors.
        own = copy.deepcopy(module, {id(one): one for one in module.parameters()})
        chain = _trace(own, training=True)
        # What draws as it is traced decides something at random.
        found = _names(chain) == _names(_trace(own, training=False)) and _random_state() == drawn
        if found and _trains_all(chain, module) and _equal(chain, own, example[:ROWS]):
            return bind_chain(chain, module)
    except Exception:
        # A user's forward pass meets a stand-in for its inputs here, and may fail on it in any way.
        return None
    finally:
        _set_random_state(drawn)
    return None


def _traceable(module: nn.Module) -> bool:
    """Whether a module is made of trained tensors, each used in one place, and of plain calls."""
    every = [one for _, one in module.named_parameters(remove_duplicate=False)]
    return (
        bool(every)
        and len(every) == len(list(module.parameters()))
        and all(one.requires_grad for one in every)
        and not any(True for _ in module.buffers())
        and not any(hooked(one) for one in module.modules())
    )


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _built_in(m) and not isinstance(m, nn.Sequential)


def _trace(module: nn.Module, *, training: bool) -> Chain:
    module.train(training)
    before = [dict(vars(one)) for one in module.modules()]
    graph = _Tracer().trace(module)
    if [dict(vars(one)) for one in module.modules()] != before:
        raise _NoChain  # a later pass may depend on what this one has kept
    return tuple(_links(module, graph))


def _links(module: nn.Module, graph: fx.Graph) -> Iterator[Link]:
    current: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder" and current is None:
            current = node
        elif node.op == "output":
            if node.args != (current,):
                raise _NoChain
        elif not _is_size(node):
            if current is None or node.args[:1] != (current,):
                raise _NoChain
            yield _link(module, node)
            current = node


def _link(module: nn.Module, node: fx.Node) -> Link:
    if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        return Link(str(node.target), module.get_submodule(str(node.target)))
    target: Any = node.target
    if node.op == "call_method":
        target = getattr(Tensor, str(target), None)
    elif node.op != "call_function":
        raise _NoChain
    if target in _VIEWS and _flattens(node):
        return Link(None, nn.Flatten())
    if len(node.all_input_nodes) > 1 or target not in _STAND_INS:
        raise _NoChain
    names, stand_in = _STAND_INS[target]
    return Link(None, stand_in(**dict(zip(names, node.args[1:], strict=False)), **node.kwargs))


_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    if start_dim != 1:
        raise _NoChain  # else samples would be mixed
    return nn.Flatten(start_dim, end_dim)


def _max_pool(kernel_size: Any, stride: Any = None, **options: Any) -> nn.Module:
    return nn.MaxPool2d(kernel_size, stride or None, **options)


def _relu(inplace: bool = False) -> nn.Module:
    return nn.ReLU()  # the same numbers, and nothing is written over


def _dropout(p: float = 0.5, **_options: Any) -> nn.Module:
    if p != 0:
        raise _NoChain  # a function drops whenever its caller says so; a module has a mode of its own
    return nn.Identity()


_POOLING = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_RELU = ("inplace",), _relu
_STAND_INS: dict[Any, tuple[tuple[str, ...], Callable[..., nn.Module]]] = {
    functional.relu: _RELU,
    torch.relu: _RELU,
    torch.relu_: _RELU,
    Tensor.relu: _RELU,
    Tensor.relu_: _RELU,
    functional.max_pool2d: (_POOLING, _max_pool),
    torch.max_pool2d: (_POOLING, _max_pool),
    torch.flatten: (("start_dim", "end_dim"), _flatten),
    Tensor.flatten: (("start_dim", "end_dim"), _flatten),
    functional.dropout: (("p", "training", "inplace"), _dropout),
    Tensor.contiguous: ((), nn.Identity),
}
"""What a forward pass may call by itself: the names of its arguments after the first, and the module to run instead."""


def _is_size(node: fx.Node) -> bool:
    """Whether a call asks for nothing but a tensor's shape or a part of it."""
    if node.op == "call_method":
        return bool(node.target == "size")
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_size(node.args[0])
    return node.target is getattr and node.args[1] == "shape"


def _flattens(node: fx.Node) -> bool:
    """Whether a view makes a row of each sample; that its length is right is seen on the example."""
    sizes = node.args[1] if len(node.args) == 2 else node.args[1:]
    if not isinstance(sizes, tuple | list) or len(sizes) != 2 or node.kwargs:
        return False
    rows, length = sizes
    if isinstance(rows, fx.Node):
        return _counts_samples(rows) and isinstance(length, int)
    return isinstance(rows, int) and rows == -1 and isinstance(length, int) and length > 0


def _counts_samples(node: fx.Node) -> bool:
    """Whether a number is the first of a whole shape: `x.size(0)`, `x.shape[0]`."""
    whole = node.args[0]
    sliced = isinstance(whole, fx.Node) and whole.target is operator.getitem
    return not sliced and _is_size(node) and tuple(node.args[1:]) == (0,)


def _names(chain: Chain) -> list[tuple[str | None, str]]:
    return [(link.path, str(link.module)) for link in chain]


def _trains_all(chain: Chain, module: nn.Module) -> bool:
    """Whether each parameter of the module is used, once."""
    used = [f"{path}.{name}" for path, one in chain for name, _ in one.named_parameters()]
    return sorted(used) == sorted(name for name, _ in module.named_parameters())


def _equal(chain: Chain, module: nn.Module, inputs: Tensor) -> bool:
    """Whether outputs and gradients are the same, to the bit."""

    def run_chain(hidden: Tensor) -> Tensor:
        for link in chain:
            hidden = link.module(hidden)
            if len(hidden) != len(inputs):
                raise _NoChain
        return hidden

    module.train()
    outcomes = []
    for forward in (module, run_chain):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            outputs = forward(inputs.clone())
            error = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).reshape(outputs.shape)
            gradients = torch.autograd.grad(outputs, list(module.parameters()), error)
        outcomes.append((outputs.detach(), *gradients))
    return all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def _random_state() -> tuple[Any, ...]:
    """Where the generators of torch, Python and NumPy are, as values that can be compared."""
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (name, tuple(keys), *rest)


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8))
    random.setstate(state[1])
    np.random.set_state(state[2])
