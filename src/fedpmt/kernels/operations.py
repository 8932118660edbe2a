"""Single operations of autograd that can be faster: GELU, dropout, attention over short sequences, and linear layers.

A model's own forward pass runs on PyTorch. Of a small transformer's step on one core the first three take much
there, and less in compiled code. Linear layers are PyTorch's own, but by oneDNN where it would take MKL,
which leaves some of an AMD processor's vector units unused. `faster` is a mode in which PyTorch's functions are these,
wherever they can be: tensors of 32 bits on the processor. They round differently from PyTorch's, and dropout draws
other entries.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedpmt.kernels import library
from fedpmt.kernels.library import LANES, Attention, Bias, Heads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

LONGEST = 128
"""Tokens and features of a head at most: with more, PyTorch's attention is as fast, and needs less memory."""

PRODUCTS = 2**21
"""Multiplications from which on a linear layer is faster by oneDNN: its calls take ten microseconds more."""

BITS = 31  # that decide whether a number is dropped


def faster() -> AbstractContextManager[object]:
    """A context in which PyTorch's functions are those of compiled code, wherever they can be."""
    return contextlib.nullcontext() if library.library() is None else _Faster()


class _Faster(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        own = OPERATIONS.get(func)
        found = None if own is None or torch.is_autocast_enabled("cpu") else own(*args, **given)
        return func(*args, **given) if found is None else found


def gelu(inputs: Tensor, approximate: str = "none") -> Tensor | None:
    """x Φ(x); None where PyTorch's is to be used."""
    if approximate != "none" or not _plain(inputs) or not inputs.is_contiguous():
        return None
    found: Tensor = _Gelu.apply(inputs)  # type: ignore[no-untyped-call]
    return found


def dropout(inputs: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    """Zero a share of the entries and scale the others; None where PyTorch's is to be used."""
    if not training or inplace or not 0 < p < 1 or not _plain(inputs) or not inputs.is_contiguous():
        return None
    found: Tensor = _Dropout.apply(inputs, p, _seed())  # type: ignore[no-untyped-call]
    return found


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """softmax(Q K^T scale + mask) V of each head; None where PyTorch's is to be used."""
    given = (query, key, value)
    if enable_gqa or not 0 <= dropout_p < 1 or not all(map(_short, given)):
        return None
    samples, heads, queries, features = query.shape
    keys, values = value.shape[2:]
    if key.shape != (samples, heads, keys, features) or value.shape[:2] != (samples, heads):
        return None
    bias = _bias(attn_mask, (samples, heads, queries, keys), is_causal=is_causal)
    if bias is None:
        return None
    factor = 1 / math.sqrt(features) if scale is None else scale
    dropped, seed = round(dropout_p * 2**BITS), _seed() if dropout_p else 0
    plan = Attention(*query.shape[:3], keys, features, values, factor, 1 / (1 - dropout_p), dropped, seed)
    found: Tensor = _Attention.apply(query, key, value, bias, plan)  # type: ignore[no-untyped-call]
    return found


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """X Wᵀ + b; None where PyTorch's is to be used."""
    given = (inputs, weight) if bias is None else (inputs, weight, bias)
    if not all(map(_plain, given)) or weight.ndim != 2 or inputs.shape[-1] != weight.shape[1]:
        return None
    if inputs.numel() * len(weight) < PRODUCTS or not _has_onednn():
        return None
    rows = inputs.reshape(-1, inputs.shape[-1])
    found: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return found.view(*inputs.shape[:-1], len(weight))


OPERATIONS: Mapping[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.gelu: gelu,
    F.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    F.linear: linear,
}


def _plain(tensor: Any) -> bool:
    """Whether this is an ordinary tensor of 32 bits on the processor, and there is something in it."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not tensor.is_neg()
    )


def _short(tensor: Any) -> bool:
    """Whether this can be a head's tokens: features next to each other, and few of both."""
    return _plain(tensor) and tensor.ndim == 4 and tensor.stride(3) == 1 and max(tensor.shape[2:]) <= LONGEST


def _bias(mask: Tensor | None, shape: tuple[int, int, int, int], *, is_causal: bool) -> Tensor | None:
    """What is added to scores, expanded to all of them; empty where that is nothing, None where it has gradients."""
    if is_causal:
        if mask is not None:
            return None
        mask = torch.ones(shape[2:], dtype=torch.bool).tril()
    if mask is None:
        return torch.empty(0)
    if mask.dtype == torch.bool and type(mask) is Tensor and mask.device.type == "cpu":
        mask = torch.zeros(mask.shape).masked_fill_(mask.logical_not(), -math.inf)
    return mask.expand(shape) if _plain(mask) and not mask.requires_grad else None


def _seed() -> int:
    """Of what one call drops, by PyTorch's generator: so runs that seed it are the same again."""
    return int(torch.randint(2**62, ()))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _heads(*tensors: Tensor) -> ctypes.Array[Heads]:
    return (Heads * len(tensors))(*(Heads(one.data_ptr(), *one.stride()[:3]) for one in tensors))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        values = torch.empty_like(inputs)
        slopes = torch.empty_like(inputs) if ctx.needs_input_grad[0] else None
        library.compiled().fedpmt_gelu(
            _pointer(inputs),
            _pointer(values),
            None if slopes is None else _pointer(slopes),
            ctypes.c_int64(inputs.numel()),
        )
        ctx.save_for_backward(slopes)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        slopes: Tensor = ctx.saved_tensors[0]
        return gradient * slopes


class _Dropout(torch.autograd.Function):
    """What is dropped is drawn again on the way back, from the same seed: there is no mask to keep."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, share: float, seed: int) -> Tensor:
        ctx.share, ctx.seed = share, seed
        return _drop(inputs, share, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _drop(gradient.contiguous(), ctx.share, ctx.seed), None, None


def _drop(inputs: Tensor, share: float, seed: int) -> Tensor:
    outputs = torch.empty_like(inputs)
    library.compiled().fedpmt_dropout(
        _pointer(inputs),
        _pointer(outputs),
        ctypes.c_int64(inputs.numel()),
        ctypes.c_uint64(seed),
        ctypes.c_int32(round(share * 2**BITS)),
        ctypes.c_float(1 / (1 - share)),
    )
    return outputs


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, plan: Attention) -> Tensor:
        compiled = library.compiled()
        # Heads next to each other for each token: models join them right after this.
        outputs = query.new_empty(plan.samples, plan.queries, plan.heads, plan.values).transpose(1, 2)
        wide = -(-plan.keys // LANES) * LANES
        probabilities = query.new_empty(plan.samples, plan.heads, plan.queries, wide)
        added, room = Bias(bias.data_ptr(), *bias.stride()) if bias.numel() else Bias(), _room(plan)
        compiled.fedpmt_attention(
            ctypes.byref(plan),
            _heads(query, key, value, outputs),
            ctypes.byref(added),
            _pointer(probabilities),
            _pointer(room),
        )
        ctx.save_for_backward(query, key, value, probabilities)
        ctx.plan = plan
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, probabilities = ctx.saved_tensors
        gradient = gradient if gradient.stride(3) == 1 else gradient.contiguous()
        found, room = [torch.empty_like(one) for one in (query, key, value)], _room(ctx.plan)
        library.compiled().fedpmt_attention_backward(
            ctypes.byref(ctx.plan),
            _heads(query, key, value, gradient, *found),
            _pointer(probabilities),
            _pointer(room),
        )
        return *found, None, None


@cache
def _has_onednn() -> bool:
    """Whether PyTorch is built with it, and has the operation that takes ordinary tensors."""
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _product(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    """Left times the transpose of right, plus a row."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, added, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        # With a graph of its own, for penalties on gradients, this must be made of differentiable operations.
        times = _matmul if torch.is_grad_enabled() else _product
        below, own, sums = ctx.needs_input_grad
        return (
            times(gradient, weight.t()) if below else None,
            _weight_gradient(times, gradient, inputs) if own else None,
            gradient.sum(0) if sums else None,
        )


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.t()


def _weight_gradient(times: Callable[[Tensor, Tensor], Tensor], gradient: Tensor, inputs: Tensor) -> Tensor:
    """Gᵀ X. What stands on the right is laid out anew, which should be the narrower one."""
    if gradient.shape[1] > inputs.shape[1]:
        return times(inputs.t(), gradient.t()).t()
    return times(gradient.t(), inputs.t())


def _room(plan: Attention) -> Tensor:
    return torch.empty(library.compiled().fedpmt_attention_room(ctypes.byref(plan)))
