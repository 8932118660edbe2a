"""Build, load and check the C files: on first use where there is a C compiler, else there is no compiled code."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_dir

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = ("native.c", "operations.c")
HEADERS = ("products.h",)
VERSION = 6  # as in both
LANES = 8  # likewise

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

_log = logging.getLogger("fedpmt")


def _fields(kind: type[ctypes._SimpleCData[Any]], *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class Layer(ctypes.Structure):
    """`Layer` in native.c."""

    _fields_ = [
        *_fields(ctypes.c_int32, "convolution", "inputs", "outputs"),
        *_fields(ctypes.c_int32, "height", "width", "kernel_height", "kernel_width"),
        *_fields(ctypes.c_int32, "pooled", "rectified", "biased"),
        *_fields(ctypes.c_int32, "blocks", "own_inputs", "own_outputs"),
        *_fields(ctypes.c_float, "gain", "bias_gain"),
    ]


class Values(ctypes.Structure):
    """`Values` in native.c."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "weights", "biases", "velocity", "bias_velocity", "shift", "bias_shift"),
        *_fields(ctypes.c_void_p, "given", "given_bias", "wanted", "wanted_bias"),
    ]


class Net(ctypes.Structure):
    """`Net` in native.c."""

    _fields_ = _fields(ctypes.c_void_p, "layers", "values")


class Plan(ctypes.Structure):
    """`Plan` in native.c."""

    _fields_ = [
        *_fields(ctypes.c_int32, "layers", "frozen", "cached", "classes"),
        *_fields(ctypes.c_int32, "nets", "moving", "nesterov", "changes"),
        *_fields(ctypes.c_int64, "samples", "epochs", "batch", "limit"),
        *_fields(ctypes.c_float, "rate", "kept", "momentum", "decay"),
        *_fields(ctypes.c_void_p, "absent"),
    ]


class Heads(ctypes.Structure):
    """`Heads` in operations.c."""

    _fields_ = [*_fields(ctypes.c_void_p, "data"), *_fields(ctypes.c_int64, "sample", "head", "token")]


class Bias(ctypes.Structure):
    """`Bias` in operations.c."""

    _fields_ = [*_fields(ctypes.c_void_p, "data"), *_fields(ctypes.c_int64, "sample", "head", "query", "key")]


class Attention(ctypes.Structure):
    """`Attention` in operations.c."""

    _fields_ = [
        *_fields(ctypes.c_int64, "samples", "heads", "queries", "keys", "features", "values"),
        *_fields(ctypes.c_float, "scale", "kept"),
        *_fields(ctypes.c_int64, "dropped"),
        *_fields(ctypes.c_uint64, "seed"),
    ]


STRUCTURES = {
    "fedpmt_interface": (Layer, Values, Net, Plan),
    "fedpmt_operations_interface": (Heads, Bias, Attention),
}
"""By the function of a C file that describes them, in its order."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code; None where it is switched off, cannot be built or is not the one that is meant."""
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
    package = resources.files("fedpmt.kernels")
    sources = {name: package.joinpath(name).read_bytes() for name in (*SOURCES, *HEADERS)}
    identity = (*sources.values(), compiler.encode(), " ".join(FLAGS).encode(), _processor())
    name = hashlib.sha256(b"\0".join(identity)).hexdigest()[:20]
    built = Path(user_cache_dir("fedpmt")) / "native" / f"{name}.so"
    try:
        if not built.exists():
            _build(compiler, sources, built)
        loaded = ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError):
        return None
    if any(_interface(loaded, name) != expected_interface(name) for name in STRUCTURES):
        # Called with structures of another layout it would write anywhere.
        _log.warning("fedpmt: %s does not match this version of fedpmt and is not used", built)
        return None
    loaded.fedpmt_train.restype = ctypes.c_double
    loaded.fedpmt_forward.restype = ctypes.c_int32
    loaded.fedpmt_prepare.restype = ctypes.c_void_p
    loaded.fedpmt_release.restype = loaded.fedpmt_outputs.restype = loaded.fedpmt_gradients.restype = None
    loaded.fedpmt_attention_room.restype = ctypes.c_int64
    loaded.fedpmt_gelu.restype = loaded.fedpmt_dropout.restype = None
    loaded.fedpmt_attention.restype = loaded.fedpmt_attention_backward.restype = None
    loaded.fedpmt_lay_out.restype = loaded.fedpmt_hand_back.restype = None
    loaded.fedpmt_fold.restype = loaded.fedpmt_add_at.restype = loaded.fedpmt_step.restype = None
    return loaded


@cache
def compiled() -> ctypes.CDLL:
    """The compiled code, for what is only called where it is known to be there."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("there is no compiled code here")
    return loaded


def expected_interface(name: str) -> list[int]:
    """What this function of the right library says: version, lanes, sizes and offsets."""
    numbers = [VERSION, LANES]
    for structure in STRUCTURES[name]:
        offsets = [getattr(structure, name).offset for name, *_ in structure._fields_]
        numbers += [ctypes.sizeof(structure), *offsets]
    return numbers


def _interface(loaded: ctypes.CDLL, name: str) -> list[int]:
    room = len(expected_interface(name))
    numbers = (ctypes.c_int64 * room)()
    try:
        count = loaded[name](numbers, ctypes.c_int32(room))
    except AttributeError:  # from before there was one
        return []
    return list(numbers) if count == room else []


def _build(compiler: str, sources: Mapping[str, bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "native.so"
        for name, source in sources.items():
            (Path(folder) / name).write_bytes(source)
        command = [compiler, *FLAGS, "-o", str(made), *(str(Path(folder) / name) for name in SOURCES), "-lm"]
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
