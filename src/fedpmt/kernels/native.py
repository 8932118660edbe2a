"""The fast path in compiled code: `native.c`, built on first use where there is a C compiler, else left alone.

One call trains a device for a whole local round, without the interpreter's lock: threads scale with cores. It knows
SGD on convolutions (stride 1, no padding, with or without a 2 x 2 max-pool) and linear layers in single precision
on the CPU. Everything else, and every machine without a compiler, takes the torch operations of `fused`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from platformdirs import user_cache_dir
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedpmt.models.layered import LayeredModel
    from fedpmt.training.local import LocalSettings
    from fedpmt.types import Tensors

LANES = 8  # as in native.c
BLOCK = 60
"""Samples at a time in a forward pass."""

FLAGS = (
    "-O3",
    "-march=native",
    "-funroll-loops",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
)
SWITCH = "FEDPMT_NATIVE"
"""Set to 0 to do without."""


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "convolution", "inputs", "outputs",
            "height", "width", "kernel_height", "kernel_width",
            "pooled", "rectified", "biased",
        )
    ] + [("gain", ctypes.c_float)]  # fmt: skip


class _Plan(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("layers", "frozen", "cached", "classes")),
        *((name, ctypes.c_int64) for name in ("samples", "epochs", "batch", "limit")),
        *((name, ctypes.c_float) for name in ("rate", "kept")),
        ("absent", ctypes.c_void_p),
    ]


class _Shift(ctypes.Structure):
    _fields_ = [("weights", ctypes.c_void_p), ("biases", ctypes.c_void_p)]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code; None where it is switched off or cannot be built."""
    compiler = next(
        (
            found
            for name in (os.environ.get("CC", ""), "cc", "gcc", "clang")
            if name and (found := shutil.which(name))
        ),
        None,
    )
    if os.environ.get(SWITCH) == "0" or os.name != "posix" or compiler is None:
        return None
    source = resources.files("fedpmt.kernels").joinpath("native.c").read_bytes()
    identity = (source, compiler.encode(), " ".join(FLAGS).encode(), _processor())
    name = hashlib.sha256(b"\0".join(identity)).hexdigest()[:20]
    built = Path(user_cache_dir("fedpmt")) / "native" / f"{name}.so"
    try:
        if not built.exists():
            _build(compiler, source, built)
        loaded = ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError):
        return None
    loaded.fedpmt_train.restype = ctypes.c_double
    loaded.fedpmt_forward.restype = ctypes.c_int32
    loaded.fedpmt_prepare.restype = ctypes.c_void_p
    loaded.fedpmt_release.restype = loaded.fedpmt_outputs.restype = loaded.fedpmt_gradients.restype = None
    loaded.fedpmt_fold.restype = loaded.fedpmt_add_at.restype = loaded.fedpmt_turn.restype = None
    return loaded


def _compiled() -> ctypes.CDLL:
    """For what is only called where the compiled code is known to be there."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("there is no compiled code here")
    return loaded


def _build(compiler: str, source: bytes, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        code, made = Path(folder) / "native.c", Path(folder) / "native.so"
        code.write_bytes(source)
        command = [compiler, *FLAGS, "-o", str(made), str(code), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        made.replace(target)


def _processor() -> bytes:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        flags = next(line for line in lines if line.startswith((b"flags", b"Features")))
    except (OSError, StopIteration):
        flags = b""
    return flags + platform.machine().encode() + platform.processor().encode()


@dataclass(frozen=True)
class Shape:
    """One layer as the compiled code sees it, and what its own tensors are called."""

    path: str
    convolution: bool
    inputs: int  # padded, but for the data's own channels
    outputs: int  # padded
    own_inputs: int
    own_outputs: int
    spots: int = 1  # positions of each input channel that a linear layer behind a flatten sees
    height: int = 0
    width: int = 0
    kernel: tuple[int, int] = (0, 0)
    pooled: bool = False
    rectified: bool = False
    biased: bool = True

    def structure(self, gain: float = 1.0) -> _Layer:
        """As C reads it; its steps are `gain` times as long as the learning rate says."""
        channels = self.inputs, self.outputs
        return _Layer(
            self.convolution,
            *channels,
            self.height,
            self.width,
            *self.kernel,
            self.pooled,
            self.rectified,
            self.biased,
            gain,
        )

    def blank(self) -> tuple[np.ndarray, np.ndarray]:
        """Weight and bias in the layout of the compiled code, all zero."""
        if self.convolution:
            size: tuple[int, ...] = (*self.kernel, self.inputs, self.outputs)
        else:
            size = self.spots, self.inputs // self.spots, self.outputs
        return _aligned(size), _aligned((self.outputs,))

    def pack(self, tensors: Tensors, packed: np.ndarray, bias: np.ndarray) -> None:
        """Write the layer's tensors there; padding stays as it is, zero."""
        weight = tensors[f"{self.path}.weight"].detach().numpy()
        if self.biased:
            bias[: self.own_outputs] = tensors[f"{self.path}.bias"].detach().numpy()
        if self.convolution:
            packed[:, :, : self.own_inputs, : self.own_outputs] = weight.transpose(2, 3, 1, 0)
            return
        self._turn(np.ascontiguousarray(weight), packed, back=False)

    def unpack(self, packed: np.ndarray, bias: np.ndarray, names: frozenset[str]) -> dict[str, Tensor]:
        """The tensors of the layer, as copies."""
        if self.convolution:
            weight = np.array(
                packed[:, :, : self.own_inputs, : self.own_outputs].transpose(3, 2, 0, 1), order="C"
            )
        else:
            weight = np.empty((self.own_outputs, self.own_inputs * self.spots), dtype=np.float32)
            self._turn(weight, packed, back=True)
        own = {
            f"{self.path}.weight": torch.from_numpy(weight),
            f"{self.path}.bias": torch.from_numpy(bias[: self.own_outputs].copy()),
        }
        return {name: tensor for name, tensor in own.items() if name in names}

    def _turn(self, weight: np.ndarray, packed: np.ndarray, *, back: bool) -> None:
        """A linear layer's weights from the tensor's layout to the compiled code's, or back."""
        sizes = (self.own_outputs, self.own_inputs, self.spots, packed.shape[1], self.outputs, back)
        _compiled().fedpmt_turn(
            ctypes.c_void_p(weight.ctypes.data),
            ctypes.c_void_p(packed.ctypes.data),
            *map(ctypes.c_int32, sizes),
        )


def _aligned(size: tuple[int, ...]) -> np.ndarray:
    """Zeros that begin with a cache line, as the compiled code's own buffers do."""
    count, line = math.prod(size), 64
    room = np.zeros(4 * count + line, dtype=np.uint8)
    begin = -room.ctypes.data % line
    return room[begin : begin + 4 * count].view(np.float32).reshape(size)


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


def shapes_of(model: LayeredModel, tensors: Tensors, inputs: Tensor, first: int = 0) -> list[Shape] | None:
    """A chain, from layer `first` on, as shapes; None where the compiled code does not know it."""
    if inputs.dtype != torch.float32 or inputs.device.type != "cpu" or library() is None:
        return None
    found: list[Shape] = []
    size = (inputs.shape[2], inputs.shape[3]) if inputs.ndim == 4 else (1, 1)
    for path, module in model.modules_of(first, len(model.structure.layers)):
        last = found[-1] if found else None
        match module:
            case nn.Conv2d():
                plain = (module.stride, module.padding, module.dilation, module.groups)
                if plain != ((1, 1), (0, 0), (1, 1), 1):
                    return None
                filters, channels, tall, wide = tensors[f"{path}.weight"].shape
                stored = last.outputs if last else channels
                high, broad = size
                found.append(
                    Shape(
                        path, True, stored, _padded(filters), channels, filters, 1, high, broad, (tall, wide)
                    )
                )
                size = high - tall + 1, broad - wide + 1
            case nn.MaxPool2d():
                pairs = (module.kernel_size, module.stride, module.padding, module.dilation)
                if last is None or last.pooled or module.ceil_mode or [_pair(one) for one in pairs] != [
                    (2, 2), (2, 2), (0, 0), (1, 1),
                ]:  # fmt: skip
                    return None
                found[-1] = _with(last, pooled=True)
                size = size[0] // 2, size[1] // 2
            case nn.ReLU() if last is not None:
                found[-1] = _with(last, rectified=True)
            case nn.Linear():
                outputs, features = tensors[f"{path}.weight"].shape
                behind = last is not None and last.convolution
                spots = size[0] * size[1] if behind else 1
                stored = last.outputs * spots if last else _padded(features)
                found.append(Shape(path, False, stored, _padded(outputs), features // spots, outputs, spots))
            case nn.Flatten() | nn.Identity():
                pass
            case _:
                return None
    return (
        [_with(one, biased=f"{one.path}.bias" in tensors) for one in found]
        if found and min(size) > 0
        else None
    )


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _with(shape: Shape, **changes: bool) -> Shape:
    return Shape(**{**shape.__dict__, **changes})


def _rows(inputs: Tensor, first: Shape) -> np.ndarray:
    """Samples as the first layer reads them: channels-last, or rows of padded features."""
    if first.convolution:
        return np.ascontiguousarray(inputs.permute(0, 2, 3, 1).numpy())
    rows = inputs.flatten(1).numpy()
    missing = first.inputs - rows.shape[1]
    return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, missing))) if missing else rows)


Buffers = list[tuple[np.ndarray, np.ndarray]]
"""Weight and bias of each layer, in the layout of the compiled code."""

_own = threading.local()


def laid_out(shapes: Sequence[Shape], tensors: Tensors, place: str = "weights") -> Buffers:
    """Weights and biases in this thread's own buffers: new memory for every device would cost more than the copy."""
    key, known = tuple(shapes), _own.__dict__
    if known.get(place, (None,))[0] != key:
        known[place] = key, [shape.blank() for shape in shapes]
    buffers: Buffers = known[place][1]
    _fill(shapes, buffers, tensors)
    return buffers


def _fill(shapes: Sequence[Shape], buffers: Buffers, tensors: Tensors) -> None:
    for shape, (weight, bias) in zip(shapes, buffers, strict=True):
        shape.pack(tensors, weight, bias)


def read_back(
    shapes: Sequence[Shape], packed: Buffers, frozen: int, names: frozenset[str]
) -> dict[str, Tensor]:
    """Copies of the tensors from layer `frozen` on, in their own layout."""
    trained: dict[str, Tensor] = {}
    for shape, (weight, bias) in list(zip(shapes, packed, strict=True))[frozen:]:
        trained |= shape.unpack(weight, bias, names)
    return trained


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


@dataclass(frozen=True)
class StepRule:
    """What a step does beside following the gradient."""

    gains: Mapping[str, float] = field(
        default_factory=dict
    )  # by a layer's path: its steps are so much longer
    absent: np.ndarray | None = None  # classes whose logits are zero, as booleans
    shift: Tensors | None = None  # what each step takes away from every tensor
    spring: float = 0.0  # η μ: the share of a weight that each step takes away, too


PLAIN_STEP = StepRule()


def native_train(
    shapes: Sequence[Shape],
    tensors: Tensors,
    inputs: Tensor,
    labels: Tensor,
    order: np.ndarray,
    settings: LocalSettings,
    frozen: int,
    limit: int | None,
    rule: StepRule = PLAIN_STEP,
) -> tuple[dict[str, Tensor], float]:
    """One device's local round: its tensors from layer `frozen` on, and the mean loss. `order` is [epoch, sample]."""
    packed = laid_out(shapes, tensors)
    rows, targets = _rows(inputs, shapes[0]), np.ascontiguousarray(labels.numpy())
    positions = np.ascontiguousarray(order, dtype=np.int64)
    absent = None if rule.absent is None else np.ascontiguousarray(rule.absent, dtype=np.uint8)
    shifts = [] if rule.shift is None else laid_out(shapes, rule.shift, "shift")
    plan = _Plan(
        len(shapes),
        frozen,
        settings.prefix == "cache" and frozen > 0,
        shapes[-1].own_outputs,
        len(rows),
        settings.epochs,
        settings.batch,
        -1 if limit is None else limit,
        settings.learning_rate,
        1 - settings.learning_rate * settings.weight_decay - rule.spring,
        None if absent is None else absent.ctypes.data,
    )
    loss = _compiled().fedpmt_train(
        ctypes.byref(plan),
        (_Layer * len(shapes))(*(shape.structure(rule.gains.get(shape.path, 1.0)) for shape in shapes)),
        _pointers([weight for weight, _ in packed]),
        _pointers([bias for _, bias in packed]),
        (_Shift * len(shifts))(*(_Shift(*(one.ctypes.data for one in pair)) for pair in shifts))
        if shifts
        else None,
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_void_p(targets.ctypes.data),
        ctypes.c_void_p(positions.ctypes.data),
    )
    if loss < 0:
        raise MemoryError("no memory for a device's local round")
    return read_back(shapes, packed, frozen, frozenset(tensors)), float(loss)


def native_forward(shapes: Sequence[Shape], tensors: Tensors, inputs: Tensor) -> Tensor:
    """The outputs of the chain."""
    packed = laid_out(shapes, tensors)
    rows = _rows(inputs, shapes[0])
    outputs = np.empty((len(rows), shapes[-1].outputs), dtype=np.float32)
    done = _compiled().fedpmt_forward(
        (_Layer * len(shapes))(*(shape.structure() for shape in shapes)),
        ctypes.c_int32(len(shapes)),
        _pointers([weight for weight, _ in packed]),
        _pointers([bias for _, bias in packed]),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_int64(len(rows)),
        ctypes.c_int64(BLOCK),
        ctypes.c_void_p(outputs.ctypes.data),
    )
    if not done:
        raise MemoryError("no memory for a forward pass")
    return torch.from_numpy(outputs)[:, : shapes[-1].own_outputs]


class Pass:
    """A forward pass that can be gone backward: weights in the layout of the compiled code, and room for a batch."""

    def __init__(self, shapes: Sequence[Shape], batch: int) -> None:
        self.shapes, self.batch = tuple(shapes), batch
        self._compiled = _compiled()
        self._buffers = [shape.blank() for shape in shapes]
        self._count = ctypes.c_int32(len(shapes))
        layers = (_Layer * len(shapes))(*(shape.structure() for shape in shapes))
        self._work = ctypes.c_void_p(
            self._compiled.fedpmt_prepare(layers, self._count, ctypes.c_int64(batch))
        )
        if not self._work:
            raise MemoryError("no memory for a batch")
        weights = _pointers([weight for weight, _ in self._buffers])
        biases = _pointers([bias for _, bias in self._buffers])
        self._chain = layers, self._work, self._count, weights, biases

    def __del__(self) -> None:
        if getattr(self, "_work", None):
            self._compiled.fedpmt_release(self._work, self._count)

    def outputs(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """What comes out, no more than `batch` samples; each of them is kept as the way back needs it."""
        _fill(self.shapes, self._buffers, tensors)
        last = self.shapes[-1]
        self._rows = _rows(inputs, self.shapes[0])
        made = np.empty((len(inputs), last.outputs), dtype=np.float32)
        self._compiled.fedpmt_outputs(
            *self._chain,
            ctypes.c_void_p(self._rows.ctypes.data),
            ctypes.c_int64(len(inputs)),
            ctypes.c_void_p(made.ctypes.data),
        )
        return torch.from_numpy(made)[:, : last.own_outputs]

    def gradients(self, error: Tensor, names: frozenset[str]) -> dict[str, Tensor]:
        """Of these tensors, once: they take the place of the weights."""
        last = self.shapes[-1]
        wide = np.zeros((len(error), last.outputs), dtype=np.float32)
        wide[:, : last.own_outputs] = error.numpy()
        self._compiled.fedpmt_gradients(
            *self._chain,
            ctypes.c_void_p(self._rows.ctypes.data),
            ctypes.c_int64(len(wide)),
            ctypes.c_void_p(wide.ctypes.data),
        )
        return read_back(self.shapes, self._buffers, 0, names)


SLICE = 2**18
"""Entries that a core is given at a time in a sum of large tensors."""


def native_fold(
    sums: Tensor, now: Tensor, replies: Sequence[Tensor], shares: Sequence[float], *, fresh: bool
) -> bool:
    """`sums` += Σ share (reply - now), in this order for any number of cores; False where it is not for this code."""
    compiled, tensors = library(), (sums, now, *replies)
    if compiled is None or not all(_plain(tensor) for tensor in tensors):
        return False
    factors = (ctypes.c_float * len(shares))(*shares)
    places = [tensor.data_ptr() for tensor in tensors]

    def fold(first: int) -> None:
        total, base, *others = (ctypes.c_void_p(place + 4 * first) for place in places)
        count = min(SLICE, sums.numel() - first)
        compiled.fedpmt_fold(
            total,
            base,
            (ctypes.c_void_p * len(others))(*others),
            factors,
            ctypes.c_int32(len(others)),
            ctypes.c_int64(count),
            ctypes.c_int32(fresh),
        )

    starts = range(0, sums.numel(), SLICE)
    if len(starts) == 1:
        fold(0)
    else:
        # Made anew each time: threads that are kept would be missing in a process that is forked later.
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as cores:
            list(cores.map(fold, starts))
    return True


def native_add_at(
    sums: Tensor, covers: Tensor, axes: Sequence[np.ndarray | None], values: Tensor, weight: float
) -> bool:
    """`sums` += values and `covers` += weight where `axes` select; False where it is not for this code."""
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
