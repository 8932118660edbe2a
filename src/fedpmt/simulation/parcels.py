"""Values on their way between a process and its forks: tensors in memory that both see, all else pickled next to them.

Nothing here is read from a file or a network: both sides are one program, so pickle is safe.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST_BYTES = 2**20
"""The size of an arena before it has to grow."""

ALIGNMENT = 64
"""Where torch's own allocator puts tensors: kernels may add up in another order elsewhere."""

Place: TypeAlias = "tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]"
"""Of a tensor in an arena: the first byte, the type, the sizes and the strides."""


class Arena:
    """Memory that a process shares with its forks. One of them writes at a time, and makes it larger when it must."""

    def __init__(self) -> None:
        self._file = os.memfd_create("fedpmt")
        os.ftruncate(self._file, FIRST_BYTES)
        self._bytes = mmap.mmap(self._file, 0)
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        """Reserve memory: its first byte."""
        size = _rounded(size)
        if self._free.get(size):
            return self._free[size].pop()
        start, self._end = self._end, self._end + size
        if self._end > len(self._bytes):
            # Another process may have made it larger than it looks from here, and still counts on that.
            size = os.fstat(self._file).st_size
            if self._end > size:
                os.ftruncate(self._file, max(self._end, 2 * size))
            self._bytes = mmap.mmap(self._file, 0)
        return start

    def give_back(self, start: int, size: int) -> None:
        """Let what was reserved be used again."""
        self._free.setdefault(_rounded(size), []).append(start)

    def clear(self) -> None:
        """Give back everything."""
        self._end = 0
        self._free.clear()

    def bytes(self, start: int, size: int) -> memoryview:
        """A piece of the memory; the writer may have enlarged it since it was last looked at from here."""
        if start + size > len(self._bytes):
            self._bytes = mmap.mmap(self._file, 0)
        return memoryview(self._bytes)[start : start + size]

    def close(self) -> None:
        """Let the memory go; where a tensor still lies in it, with that tensor."""
        os.close(self._file)
        with contextlib.suppress(BufferError):
            self._bytes.close()


def _rounded(size: int) -> int:
    """Few sizes, so that what is given back fits again. Pages that are never touched take no memory."""
    return 1 << (max(size, ALIGNMENT) - 1).bit_length()


class Parcel(NamedTuple):
    """Where a value lies in an arena: numbers that fit in a message."""

    start: int
    size: int


@dataclass
class _Copy:
    tensor: Tensor  # kept alive, as it is known by its address
    place: Place
    size: int
    parcels: int = 0  # that are on their way


@dataclass
class Outbox:
    """Packs values. A tensor that several of them hold is copied once, as long as one of them is on its way."""

    arena: Arena
    _copies: dict[Any, _Copy] = field(default_factory=dict)
    _packed: dict[Parcel, set[Any]] = field(default_factory=dict)  # the copies that a parcel uses

    def pack(self, value: Any, known: Sequence[object] = ()) -> Parcel:
        """Put a value into the arena; objects that are `known` on the other side stay where they are."""
        file, used = io.BytesIO(), set[Any]()
        _Packer(file, lambda tensor: self._place(tensor, used), known).dump(value)
        parcel = Parcel(self.arena.take(file.tell()), file.tell())
        self.arena.bytes(*parcel)[:] = file.getbuffer()
        self._packed[parcel] = used
        for key in used:
            self._copies[key].parcels += 1
        return parcel

    def forget(self, parcel: Parcel) -> None:
        """Give back what only this parcel needed."""
        self.arena.give_back(*parcel)
        for key in self._packed.pop(parcel):
            copy = self._copies[key]
            copy.parcels -= 1
            if not copy.parcels:
                self.arena.give_back(copy.place[0], copy.size)
                del self._copies[key]

    def clear(self) -> None:
        """Forget all parcels."""
        self._copies.clear()
        self._packed.clear()
        self.arena.clear()

    def _place(self, tensor: Tensor, used: set[Any]) -> Place:
        sizes, strides = tuple(tensor.shape), tensor.stride()
        key = (tensor.data_ptr(), tensor.dtype, sizes, strides)
        used.add(key)
        if key not in self._copies:
            # As it lies in memory, gaps included: another layout could have other bits.
            span = _span(sizes, strides)
            size = span * tensor.element_size()
            start = self.arena.take(size)
            memory = torch.frombuffer(self.arena.bytes(start, size), dtype=tensor.dtype)
            memory.copy_(tensor.as_strided((span,), (1,)))
            self._copies[key] = _Copy(tensor, (start, tensor.dtype, sizes, strides), size)
        return self._copies[key].place


def unpack(arena: Arena, parcel: Parcel, known: Sequence[object] = (), *, own: bool) -> Any:
    """Take a value out of an arena; its tensors as they lie there, or as copies of one's `own`."""
    return _Unpacker(io.BytesIO(arena.bytes(*parcel)), arena, known, own=own).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, place: Callable[[Tensor], Place], known: Sequence[object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._place, self._known = place, {id(one): index for index, one in enumerate(known)}

    def persistent_id(self, value: Any) -> Place | int | None:
        if type(value) is Tensor and _is_plain(value):
            return self._place(value)
        return self._known.get(id(value))


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arena: Arena, known: Sequence[object], *, own: bool) -> None:
        super().__init__(file)
        self._arena, self._known, self._own = arena, known, own
        self._found: dict[Place, Tensor] = {}

    def persistent_load(self, name: Place | int) -> object:
        if isinstance(name, int):
            return self._known[name]
        if name not in self._found:
            start, dtype, sizes, strides = name
            memory = self._arena.bytes(start, _span(sizes, strides) * dtype.itemsize)
            tensor = torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)
            self._found[name] = tensor.clone() if self._own else tensor
        return self._found[name]


def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many entries lie between the first and the last, both counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its memory and nothing more; others are pickled."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
