"""Read binary or pickled batches of images, as those of CIFAR-10."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.data.folders import find, find_other_form, read_content
from fedpmt.data.pickles import read_pickle
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fedpmt.data.description import Dataset
    from fedpmt.data.images import Batch


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
