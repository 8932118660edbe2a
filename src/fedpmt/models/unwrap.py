"""Modules that are not what they seem: compiled, wrapped, lazy and scripted ones. They become plain, or are refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fedpmt.models.trees import tensors_in
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from fedpmt.types import Arrays

QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
"""Packages of modules that hold whole numbers in place of weights."""


def prepare(module: nn.Module, example: Arrays | None, run: Callable[[nn.Module, Arrays], Any]) -> nn.Module:
    """Copy a module as a plain one on the CPU, all of whose tensors have values.

    Args:
        module: The user's module, which stays as it is.
        example: A few samples, by which lazy layers find their shapes. Their weights are always the same ones.
        run: How the module is called.

    Raises:
        SettingError: It cannot be trained, copied, or called with the example.
    """
    module = unwrap(module)
    check_module(module)
    if example is not None:
        _check_call(module, example)
    return _materialise(copy_module(module), example, run).cpu()


def unwrap(module: nn.Module) -> nn.Module:
    """Take a module out of `torch.compile`, `DataParallel` or `DistributedDataParallel`: names are its own again."""
    while (name := _inner_name(module)) is not None:
        module = module.get_submodule(name)
    return module


def check_module(module: nn.Module) -> None:
    """Refuse what cannot be trained by exchanging weights."""
    for path, child in module.named_modules():
        kind = f"{type(child).__module__}.{type(child).__qualname__}"
        name = f"'{path}'" if path else "the module"
        if isinstance(child, torch.jit.ScriptModule):
            raise SettingError(
                f"model: {name} was scripted or traced by torch.jit, so its weights cannot be exchanged; "
                "give the nn.Module that it was made from"
            )
        if kind.startswith(QUANTISED):
            raise SettingError(
                f"model: {name} is quantised ({kind}), so it cannot be trained; give the model as it was before"
            )
    for name, tensor in _tensors(module):
        if tensor.device.type == "meta" and not is_lazy(tensor):
            raise SettingError(
                f"model: '{name}' has no values (it is on the meta device); load its weights first"
            )


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a module; wrappers inside it become plain modules that keep the names."""
    memo: dict[int, Any] = {}
    for child in module.modules():
        # What a forward pass has left behind, such as the weight that a norm of weights computes, has a graph.
        memo |= {id(one): one.detach().clone() for one in tensors_in(vars(child)) if not one.is_leaf}
        # Which torch cannot copy, unlike lazy parameters.
        lazy = [one for one in child.buffers(recurse=False) if is_lazy(one)]
        memo |= {id(one): nn.UninitializedBuffer(device=one.device, dtype=one.dtype) for one in lazy}  # type: ignore[call-arg]
    try:
        for child in reversed(list(module.modules())):
            name = _inner_name(child)
            if name is not None:
                memo[id(child)] = _Place(name, copy.deepcopy(child.get_submodule(name), memo))
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        # A user's class may refuse to be copied in any way.
        what = " ".join(str(error).split())[:200]
        raise SettingError(f"model: {type(module).__name__} cannot be copied: {what}") from error
    for child, own in zip(module.modules(), copied.modules(), strict=True):
        for name in _slots(child):  # torch copies what is in __dict__ alone
            object.__setattr__(own, name, copy.deepcopy(getattr(child, name), memo))
    return copied


def computes_weights(module: nn.Module) -> bool:
    """Whether a module's weights are computed of others when it runs, as by `weight_norm` or pruning."""
    return bool(module._forward_pre_hooks) or is_parametrized(module)


class _Place(nn.Module):
    """Where a wrapper was: it only runs the module inside, which keeps its name."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.inner_name = name
        self._modules[name] = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module inside."""
        return self._modules[self.inner_name](*args, **kwargs)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(self._modules[self.inner_name], name)  # a compiled module has its attributes


def _slots(module: nn.Module) -> list[str]:
    """The attributes that a module's classes keep outside of its dictionary."""
    named = (kind.__dict__.get("__slots__", ()) for kind in type(module).__mro__)
    slots = (name for names in named for name in ((names,) if isinstance(names, str) else names))
    return [name for name in slots if hasattr(module, name)]


def _inner_name(module: nn.Module) -> str | None:
    """The name under which a wrapper holds its module; None where a module is no wrapper."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module"
    # By its name: the class is part of torch's compiler, which takes a second to load.
    return (
        "_orig_mod" if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules else None
    )


def _check_call(module: nn.Module, example: Arrays) -> None:
    """Refuse a forward pass that needs more, or other, arguments than the inputs."""
    named = isinstance(example, Mapping)
    try:
        parameters = inspect.signature(module.forward)
    except ValueError:
        return  # one without a signature, as compiled code has
    try:
        parameters.bind(**dict.fromkeys(example)) if named else parameters.bind(example)
    except TypeError as error:
        inputs = f"inputs {', '.join(map(repr, example))}" if named else "one array of inputs"
        raise SettingError(
            f"model: forward of {type(module).__name__} cannot be called with {inputs}: {error}; "
            "wrap it in a module that takes the inputs alone"
        ) from error


def _materialise(
    module: nn.Module, example: Arrays | None, run: Callable[[nn.Module, Arrays], Any]
) -> nn.Module:
    """Give lazy layers their shapes by running a copy, and everything else the values that it had before."""
    values = dict(_tensors(module))
    lazy = [name for name, tensor in values.items() if is_lazy(tensor)]
    if not lazy:
        return module
    if example is None:
        raise SettingError(f"model: '{lazy[0]}' has no shape yet; run one batch through the module first")
    modes = [child.training for child in module.modules()]
    made = copy_module(module).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Runs are repeated and resumed: these weights must not depend on what was drawn before.
        torch.default_generator.manual_seed(0)
        run(made, example)
        for name, tensor in _tensors(made):
            if is_lazy(tensor):
                raise SettingError(f"model: '{name}' has no shape yet, and samples do not reach it")
            if name not in lazy:
                tensor.copy_(values[name])
    for child, mode in zip(made.modules(), modes, strict=True):
        child.training = mode
    return made


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
