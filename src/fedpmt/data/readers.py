"""Read the files of data sets: IDX as MNIST's, batches as CIFAR-10's, and pickles, which must not run code."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.data.folders import find, find_other_form, locate, read_content
from fedpmt.data.registry import DATASETS
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fedpmt.data.description import Dataset
    from fedpmt.data.images import Batch


_IMAGES, _LABELS = 0x0803, 0x0801


def read(dataset: Dataset, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (N, height, width) and labels (N,) as bytes: those to train on, then those to test on."""
    train_images, train_labels, test_images, test_labels = locate(dataset, folder)
    return (*_pair(dataset, train_images, train_labels), *_pair(dataset, test_images, test_labels))


def _pair(dataset: Dataset, images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    images = _array(images_path, _IMAGES)
    labels = _array(labels_path, _LABELS)
    height, width = dataset.shape[1:]
    if images.shape[1:] != (height, width):
        found = f"{images.shape[1]} x {images.shape[2]}"
        raise SettingError(f"{images_path} holds images of {found} pixels, not {height} x {width}")
    if len(images) != len(labels):
        raise SettingError(
            f"{images_path} holds {len(images)} images, but {labels_path.name} {len(labels)} labels"
        )
    if not len(labels):
        raise SettingError(f"{images_path} holds no images")
    if dataset.classes is not None and labels.max() >= dataset.classes:
        raise SettingError(
            f"{labels_path} is damaged: labels must be 0 to {dataset.classes - 1} (got label {labels.max()})"
        )
    _refuse_another_set(dataset.name, labels_path, labels)
    return images, labels


def _refuse_another_set(name: str, path: Path, labels: np.ndarray) -> None:
    """Several sets use the same file names: files in the wrong folder would train, and nobody would notice."""
    content = struct.pack(">II", _LABELS, len(labels)) + labels.tobytes()
    digest = hashlib.sha256(content).hexdigest()
    owners = {other.name for other in DATASETS.values() if any(file.sha256 == digest for file in other.files)}
    if owners and name not in owners:
        raise SettingError(f"{path} holds the labels of {min(owners)}, not of {name}")


def _array(path: Path, magic: int) -> np.ndarray:
    content = read_content(path)
    dimensions = magic & 0xFF
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise SettingError(f"{path} is damaged: it ends within its header")
    found, *shape = struct.unpack(f">{1 + dimensions}I", content[:start])
    if found != magic:
        raise SettingError(f"{path} is damaged: it begins with {found:#010x}, not {magic:#010x}")
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise SettingError(f"{path} is damaged: it holds {len(content)} bytes, its header says {expected}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def batches(dataset: Dataset, folder: Path) -> Iterator[Batch]:
    """The batches to train on, then the one to test on, read one at a time to save memory."""
    place, names, read = _find(dataset, folder)
    expected: int | None = None
    for name in names:
        path = place / name
        if not path.is_file():
            raise SettingError(
                f"data = '{dataset.name}': {place} lacks {name}; run `fedpmt data get {dataset.name}`"
            )
        images, labels = read(path, dataset.shape)
        # Files cut off between two images look sound alone; their unequal counts give them away.
        if expected is not None and len(images) != expected:
            raise SettingError(f"{path} is damaged: it holds {len(images)} images, {names[0]} {expected}")
        expected = len(images)
        if dataset.classes is not None and labels.max() >= dataset.classes:
            raise SettingError(
                f"{path} is damaged: labels must be 0 to {dataset.classes - 1} (got label {labels.max()})"
            )
        yield images, labels


def _find(
    dataset: Dataset, folder: Path
) -> tuple[Path, tuple[str, ...], Callable[[Path, tuple[int, ...]], Batch]]:
    binary = find(dataset, folder)
    if binary is not None:
        return binary, tuple(file.name for file in dataset.files), _binary
    pickled = find_other_form(dataset, folder)
    if pickled is not None and dataset.other_form is not None:
        return pickled, dataset.other_form.names, _pickled
    raise SettingError(f"data = '{dataset.name}' is not in {folder}; run `fedpmt data get {dataset.name}`")


def _binary(path: Path, shape: tuple[int, ...]) -> Batch:
    content = read_content(path)
    record = 1 + math.prod(shape)
    if not content or len(content) % record:
        raise SettingError(
            f"{path} is damaged: its {len(content)} bytes are not whole images of {record} bytes"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return records[:, 1:].reshape(-1, *shape), records[:, 0]


def _pickled(path: Path, shape: tuple[int, ...]) -> Batch:
    pixels = math.prod(shape)
    table = read_pickle(path, encoding="bytes")
    if not isinstance(table, Mapping):
        raise SettingError(f"{path} is damaged: it holds no table")
    fields = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in table.items()}
    images, labels = fields.get("data"), fields.get("labels")
    if (
        not isinstance(images, np.ndarray)
        or images.dtype != np.uint8
        or images.ndim != 2
        or images.shape[1] != pixels
    ):
        raise SettingError(f"{path} is damaged: 'data' is not an array of bytes with {pixels} columns")
    if not isinstance(labels, list) or not all(
        isinstance(label, int) and 0 <= label < 256 for label in labels
    ):
        raise SettingError(f"{path} is damaged: 'labels' is not a list of small whole numbers")
    if len(images) != len(labels) or not labels:
        raise SettingError(f"{path} is damaged: it holds {len(images)} images and {len(labels)} labels")
    return images.reshape(-1, *shape), np.array(labels, dtype=np.uint8)


Admitted = dict[tuple[str, str], Any]
"""What stands for each name, written as module and name, that a pickle may hold."""


def _latin1(text: str, encoding: str) -> bytes:
    """How newer protocols spell bytes in an old pickle; other codecs stay out of reach."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the codec {encoding!r} is not admitted")
    return text.encode("latin1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]
ARRAYS: Admitted = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): _latin1,
}
"""The names in a pickle of arrays and plain containers."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, admitted: Mapping[tuple[str, str], Any], encoding: str) -> None:
        super().__init__(io.BytesIO(content), encoding=encoding)
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        try:
            return self._admitted[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not admitted") from None


def read_pickle(path: Path, admitted: Admitted = ARRAYS, encoding: str = "ASCII") -> Any:
    """Read a pickle of Python 2 or 3.

    Args:
        path: The file.
        admitted: What stands for each name the pickle may hold; any other name is refused.
        encoding: How to read the strings of Python 2; "bytes" leaves them as they are.

    Raises:
        SettingError: The file cannot be read, is damaged, or holds a name that is not admitted.
    """
    content = read_content(path)
    try:
        return _Unpickler(content, admitted, encoding).load()
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SettingError(f"{path} is damaged: it cannot be unpickled ({reason})") from error
