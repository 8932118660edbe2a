"""Small files in the formats of the real data sets, written by hand."""

from __future__ import annotations

import copyreg
import gzip
import pickle
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

CIFAR_PICKLES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def idx_images(count: int, side: int = 28) -> bytes:
    pixels = np.arange(count * side * side) % 256
    return struct.pack(">IIII", 0x0803, count, side, side) + pixels.astype(np.uint8).tobytes()


def idx_labels(count: int) -> bytes:
    return struct.pack(">II", 0x0801, count) + bytes(index % 10 for index in range(count))


def idx_contents(train: int = 20, test: int = 10) -> dict[str, bytes]:
    return {
        "train-images-idx3-ubyte": idx_images(train),
        "train-labels-idx1-ubyte": idx_labels(train),
        "t10k-images-idx3-ubyte": idx_images(test),
        "t10k-labels-idx1-ubyte": idx_labels(test),
    }


def write_idx(folder: Path, *, packed: bool = False, train: int = 20, test: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in idx_contents(train, test).items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / name).write_bytes(content)


def cifar_records(count: int, shift: int = 0) -> np.ndarray:
    """Rows of a label and 3,072 pixels; each channel is one value, so that a mix-up would show."""
    rows = np.empty((count, 3073), np.uint8)
    rows[:, 0] = np.arange(count) % 10
    for channel in range(3):
        rows[:, 1 + 1024 * channel : 1 + 1024 * (channel + 1)] = 10 * channel + shift
    return rows


def write_cifar_binary(folder: Path, count: int = 20) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for position, name in enumerate(CIFAR_PICKLES):
        (folder / f"{name}.bin").write_bytes(cifar_records(count, position).tobytes())


def old_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """The bytes that Python 2 wrote for {"data": images, "labels": labels}: its strings are read as bytes."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    data = images.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
        b"(K\x01(" + number(images.shape[0]) + number(images.shape[1]) + b"t"
        b"cnumpy\ndtype\n("
        + text(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + text(b"|")
        + b"NNN"
        + number(-1)
        + number(-1)
        + b"K\x00tb"
        b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"
    )
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def write_cifar_pickled(folder: Path, count: int = 20) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for position, name in enumerate(CIFAR_PICKLES):
        rows = cifar_records(count, position)
        (folder / name).write_bytes(old_pickle(rows[:, 1:], rows[:, 0].tolist()))


class Frame:
    """Pickled as an old table of pandas, whose names are put in afterwards."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = columns

    def __reduce__(self) -> Any:
        return copyreg._reconstructor, (Frame, object, None), {"_data": Manager(self.columns)}  # type: ignore[attr-defined]


class Manager(Frame):
    def __reduce__(self) -> Any:
        blocks, start = [], 0
        for kind in (np.float64, np.int64):
            values = np.stack([column for column in self.columns.values() if column.dtype == kind])
            blocks.append({"values": values, "mgr_locs": slice(start, start + len(values), 1)})
            start += len(values)
        axes = [Index(list(self.columns)), Index([])]
        state: Any = (axes, [], [], {"0.14.1": {"axes": axes, "blocks": blocks}})
        return copyreg._reconstructor, (Manager, object, None), state  # type: ignore[attr-defined]


class Index:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __reduce__(self) -> Any:
        return new_index, (Index, {"data": np.array(self.names, dtype=object), "name": None})


def new_index(kind: object, fields: object) -> None:
    """Stands for the function of pandas."""


def hapt_pickle(people: dict[int, list[Frame]]) -> bytes:
    content = pickle.dumps(people, protocol=2)
    for ours, theirs in {
        "Frame": "pandas.core.frame\nDataFrame",
        "Manager": "pandas.core.internals.managers\nBlockManager",
        "Index": "pandas.core.indexes.base\nIndex",
        "new_index": "pandas.core.indexes.base\n_new_Index",
    }.items():
        content = content.replace(f"c{__name__}\n{ours}\n".encode(), f"c{theirs}\n".encode())
    return content


def recording(labels: list[tuple[int, int]], start: int) -> Frame:
    """Activities with their lengths, one after another; every signal is the time since `start`."""
    marks = np.concatenate([np.full(length, label) for label, length in labels])
    times = start + np.arange(len(marks), dtype=np.float64)
    axes = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
    return Frame({**dict.fromkeys(axes, times), "sequence": np.arange(len(marks)), "label": marks})
