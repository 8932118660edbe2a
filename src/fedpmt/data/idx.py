"""Read the IDX files of MNIST and of the sets made in its image, packed or not."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.data.folders import locate, read_content
from fedpmt.data.registry import DATASETS
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.data.description import Dataset

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
