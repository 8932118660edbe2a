"""A pretended accelerator: tensors that say they are on `cuda`, while their numbers are on the CPU.

Every operation runs twice. First torch's fake tensors run it, which have a device and no numbers: they refuse to mix
devices as an accelerator would. Then the CPU runs it, so that whatever depends on numbers goes on. The pretended
device has a random generator of its own. As on `mps`, there is no float64.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SEEDED = torch.Tag.nondeterministic_seeded


class OnCuda(Tensor):
    """A tensor that says it is on `cuda`. To torch's own C++ it is on the CPU: a build without CUDA ends there."""

    held: Tensor  # its numbers

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCuda:
        made: OnCuda = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=CPU
        )
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _compute(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnCuda({self.held})"


class _Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _copy(tensor: Tensor, other: Tensor) -> Tensor:
    return torch.ops.aten.copy_(tensor, other)  # type: ignore[no-any-return]


def _nonzero(tensor: Tensor) -> Tensor:
    return torch.ops.aten.nonzero(tensor)  # type: ignore[no-any-return]


@contextlib.contextmanager
def pretended() -> Iterator[Generator]:
    """Let tensors be put on `cuda` in this thread, and give the random generator there."""
    generator = Generator()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    # Else a module that is moved keeps its parameters, and gets new numbers for them.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            mock.patch.multiple(
                torch.cuda,
                _lazy_init=lambda: None,
                is_available=lambda: True,
                device_count=lambda: 1,
                current_device=lambda: 0,
                manual_seed_all=generator.seed,
                get_rng_state=lambda device=CUDA: generator.state,
                set_rng_state=generator.set,
            ),
            mock.patch(f"{__name__}._generator", generator),
            # These methods, unlike the operations, ask CUDA for the current device.
            mock.patch.multiple(Tensor, copy_=_copy, nonzero=_nonzero),
            _Computed(),  # type: ignore[no-untyped-call]
        ):
            yield generator
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


class Generator:
    """The state of the device's random generator."""

    def __init__(self) -> None:
        self.state = torch.Generator().get_state()

    def seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    def set(self, state: Tensor, device: Any = CUDA) -> None:
        self.state = state

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the CPU draw from it."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.state)
        yield
        self.state = torch.default_generator.get_state()
        torch.default_generator.set_state(before)


_generator = Generator()
_local = threading.local()


def joined() -> None:
    """Let tensors be put on `cuda` in this thread too, for as long as it lives."""
    _Computed().__enter__()  # type: ignore[no-untyped-call]


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


_SAID: dict[Any, Any] = {
    Tensor.device.__get__: CUDA,
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    Tensor.get_device: 0,
}


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """Answer what C++, which sees the CPU, would answer wrongly."""
    on_cuda = bool(args) and isinstance(args[0], OnCuda)
    if on_cuda and func in _SAID:
        return _SAID[func]
    if func is functional.one_hot and on_cuda:
        # C++ would make it of zeros on the device that it sees.
        with _disable_current_modes():
            return _compute(torch.ops.aten.one_hot.default, args, kwargs)
    if func is Tensor.cpu and on_cuda:
        return _move(args[0], CPU)
    if func is Tensor.to and (on_cuda or any(isinstance(one, OnCuda) for one in args)):
        return _move(args[0], *args[1:], **kwargs)
    return func(*args, **kwargs)


def _move(tensor: Tensor, *where: Any, **more: Any) -> Tensor:
    own = CUDA if isinstance(tensor, OnCuda) else CPU
    if where and isinstance(where[0], Tensor):
        device, dtype = (CUDA if isinstance(where[0], OnCuda) else CPU), where[0].dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*where, **more)
    device, dtype = device or own, dtype or tensor.dtype
    if (device, dtype) == (own, tensor.dtype):
        return tensor
    return torch.ops.aten._to_copy(tensor, device=device, dtype=dtype)  # type: ignore[no-any-return]


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    if not any(isinstance(one, OnCuda) or _is_cuda(one) for one in flat):
        return func(*args, **kwargs)
    devices = iter(_devices(func, flat, spec))
    own = {id(one.held): one for one in flat if isinstance(one, OnCuda)}
    args, kwargs = tree_unflatten([_held(one) for one in flat], spec)
    with _generator.drawing() if SEEDED in func.tags else contextlib.nullcontext():
        made = func(*args, **kwargs)
    return tree_map(lambda one: _placed(one, own, next(devices)) if isinstance(one, Tensor) else one, made)


_known: dict[tuple[Any, ...], list[torch.device]] = {}


def _devices(func: Callable[..., Any], flat: list[Any], spec: Any) -> list[torch.device]:
    """Where the tensors are that an operation makes; torch is asked once for operands that look the same."""
    key = (func, *(_looks(one) for one in flat), str(spec))
    if key not in _known:
        _known[key] = _find_devices(func, flat, spec)
    return _known[key]


def _looks(value: Any) -> Any:
    if isinstance(value, Tensor):
        return isinstance(value, OnCuda), value.shape, value.stride(), value.dtype
    return str(value)


def _find_devices(func: Callable[..., Any], flat: list[Any], spec: Any) -> list[torch.device]:
    if not hasattr(_local, "mode"):
        _local.mode = FakeTensorMode()
    fakes = [_faked(one) if isinstance(one, Tensor) else one for one in flat]
    args, kwargs = tree_unflatten(fakes, spec)
    try:
        with _local.mode:
            made = func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        # It makes numbers, or shapes that depend on them.
        devices = {one.device for one in fakes if isinstance(one, Tensor)}
        if devices != {CUDA} and func is not torch.ops.aten.index.Tensor:  # an index may be on the CPU
            raise RuntimeError(f"{func} mixes devices") from None
        return [CUDA]
    return [one.device for one in tree_flatten(made)[0] if isinstance(one, Tensor)]


def _faked(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(_local.mode, blank, CUDA if isinstance(tensor, OnCuda) else CPU)


def _held(value: Any) -> Any:
    if isinstance(value, OnCuda):
        return value.held
    return CPU if _is_cuda(value) else value


def _placed(tensor: Tensor, own: dict[int, OnCuda], device: torch.device) -> Tensor:
    if device != CUDA:
        return tensor.clone() if any(tensor is one.held for one in own.values()) else tensor
    if tensor.dtype == torch.float64:
        raise TypeError("a float64 tensor on the accelerator: mps has none")
    with torch.inference_mode(mode=False):  # a view of what was made outside is not made inside
        return own[id(tensor)] if id(tensor) in own else OnCuda(tensor)
