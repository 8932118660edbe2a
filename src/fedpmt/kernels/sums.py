"""The server's sums of replies in compiled code, to the bits of torch."""

from __future__ import annotations

import ctypes
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedpmt.kernels.library import library

if TYPE_CHECKING:
    from collections.abc import Sequence


SLICE = 2**18
"""Entries that a core is given at a time in a sum of large tensors."""


def fold(sums: Tensor, replies: Sequence[Tensor], shares: Sequence[float], *, fresh: bool) -> bool:
    """Add Σ share reply to `sums`, or to zero where it is `fresh`, in this order for any number of cores.

    Returns:
        Whether it was done: False where compiled code is not there or does not know these tensors.
    """
    compiled, tensors = library(), (sums, *replies)
    if compiled is None or not all(_plain(tensor) for tensor in tensors):
        return False
    factors = (ctypes.c_float * len(shares))(*shares)
    places = [tensor.data_ptr() for tensor in tensors]

    def fold_slice(first: int) -> None:
        total, *others = (ctypes.c_void_p(place + 4 * first) for place in places)
        count = min(SLICE, sums.numel() - first)
        compiled.fedpmt_fold(
            total,
            (ctypes.c_void_p * len(others))(*others),
            factors,
            ctypes.c_int32(len(others)),
            ctypes.c_int64(count),
            ctypes.c_int32(fresh),
        )

    starts = range(0, sums.numel(), SLICE)
    if len(starts) == 1:
        fold_slice(0)
    else:
        # Made anew each time: threads that are kept would be missing in a process that is forked later.
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as cores:
            list(cores.map(fold_slice, starts))
    return True


def add_at(
    sums: Tensor, covers: Tensor, axes: Sequence[np.ndarray | None], values: Tensor, weight: float
) -> bool:
    """Add `values` to `sums`, and `weight` to `covers`, at the positions that `axes` list (None: all of them).

    Returns:
        Whether it was done: False where compiled code is not there or does not know these tensors.
    """
    compiled = library()
    if compiled is None or not all(_plain(tensor) for tensor in (sums, covers, values)):
        return False
    shape = tuple(sums.shape)
    pairs = zip(shape, axes, strict=True)
    within = all(kept is None or bool(((kept >= 0) & (kept < full)).all()) for full, kept in pairs)
    if not shape or not within or any(kept is not None for kept in axes[2:]):
        return False
    rows = _places(axes[0], shape[0])
    if len(axes) > 1 and axes[1] is not None:
        columns, inner = _places(axes[1], shape[1]), math.prod(shape[2:])
    else:  # whole rows, each of them one run
        columns, inner = _places(None, 1), math.prod(shape[1:])
    if values.numel() != len(rows) * len(columns) * inner:
        return False
    compiled.fedpmt_add_at(
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_void_p(covers.data_ptr()),
        ctypes.c_void_p(values.data_ptr()),
        ctypes.c_float(weight),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(columns.ctypes.data),
        ctypes.c_int64(len(columns)),
        ctypes.c_int64(math.prod(shape[1:])),
        ctypes.c_int64(inner),
    )
    return True


def _places(kept: np.ndarray | None, full: int) -> np.ndarray:
    return np.arange(full, dtype=np.int64) if kept is None else np.ascontiguousarray(kept, dtype=np.int64)


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
