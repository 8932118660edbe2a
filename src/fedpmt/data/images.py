"""Images of bytes, and pictures of any format, become standardised inputs of shape (N, channels, height, width).

A folder of pictures, sorted by class, is a data set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.data.datasets import LoadedDataset
from fedpmt.types import Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedpmt.data.description import Dataset, Scale


Batch = tuple[np.ndarray, np.ndarray]
"""Images (N, channels, height, width) and labels (N,) of one file, as bytes."""


def standardise_grey(dataset: Dataset, raw: tuple[np.ndarray, ...], scale: Scale | None) -> LoadedDataset:
    """Standardise grey images (N, height, width) and add their channel.

    Args:
        dataset: The description of the data set.
        raw: Images and labels to train on, then images and labels to test on, as bytes.
        scale: Mean and deviation to standardise by; None: the data set's own.
    """
    (table,) = _tables(scale or dataset.scale)
    train_images, train_labels, test_images, test_labels = raw
    return LoadedDataset(
        dataset.name,
        _examples(table[train_images][:, None], train_labels),
        _examples(table[test_images][:, None], test_labels),
        dataset.classes,
    )


def standardise_batches(dataset: Dataset, batches: Iterable[Batch], scale: Scale | None) -> LoadedDataset:
    """Standardise batches of equal size, of which the last one is the test set."""
    tables = _tables(scale or dataset.scale)
    train_files = len(dataset.files) - 1
    inputs, targets = np.empty((0, *dataset.shape), np.float32), np.empty(0, np.int64)
    for position, (images, labels) in enumerate(batches):
        count = len(images)
        if position == 0:
            # One array from the start: joining the batches at the end would need twice the memory.
            inputs = np.empty((train_files * count, *dataset.shape), np.float32)
            targets = np.empty(train_files * count, np.int64)
        if position == train_files:
            test_inputs = np.empty((count, *dataset.shape), np.float32)
            _standardise(images, tables, test_inputs)
            return LoadedDataset(
                dataset.name, _examples(inputs, targets), _examples(test_inputs, labels), dataset.classes
            )
        rows = slice(position * count, (position + 1) * count)
        _standardise(images, tables, inputs[rows])
        targets[rows] = labels
    raise AssertionError("the reader yields as many batches as there are files, or raises")


def _tables(scale: Scale | None) -> np.ndarray:
    """The standardised value of each byte, per channel: looking up is faster than arithmetic on images."""
    if scale is None:
        raise TypeError("a data set of images needs a scale")
    values = np.arange(256)[None, :] / 255
    tables: np.ndarray = (values - np.array(scale.mean)[:, None]) / np.array(scale.deviation)[:, None]
    return tables.astype(np.float32)


def _standardise(images: np.ndarray, tables: np.ndarray, out: np.ndarray) -> None:
    for channel, table in enumerate(tables):
        out[:, channel] = table[images[:, channel]]


def _examples(inputs: np.ndarray, targets: np.ndarray) -> Examples:
    return Examples(inputs, targets.astype(np.int64), np.arange(len(targets)))


Pictures = Sequence[tuple[str, Callable[[], Any]]]
"""The name of each picture, for messages, and a function that opens it with Pillow; pixels are read later."""

Pair = tuple[np.ndarray, np.ndarray]
"""Inputs and targets."""

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_GREY = ("1", "L", "LA")


def load_folder(argument: str) -> tuple[Pair, Pair]:
    """Read a folder of images in torchvision's layout: train/CLASS/*.png and test/CLASS/*.png.

    Pixels from 0 to 1 are standardised by the mean and deviation of each channel over the training images. Images have
    one channel if all of them are grey, else three. Classes are numbered in the order of their names.

    Raises:
        SettingError: Pillow is not installed, or the folder does not hold images of one size in that layout.
    """
    label = f"data = 'folder:{argument}'"
    image = _pillow(label)
    root = Path(argument).expanduser()
    parts = {part: _list(label, root / part) for part in ("train", "test")}
    classes = sorted({path.parent.name for path in parts["train"]})
    strange = sorted({path.parent.name for path in parts["test"]} - set(classes))
    if strange:
        raise SettingError(f"{label}: test holds the class '{strange[0]}', which train does not")
    pictures = {
        part: [(str(path), partial(image.open, path)) for path in paths] for part, paths in parts.items()
    }
    inputs = standardise_pictures(label, pictures["train"], pictures["test"])
    train, test = (
        np.array([classes.index(path.parent.name) for path in parts[part]]) for part in ("train", "test")
    )
    return (inputs[0], train), (inputs[1], test)


def _pillow(label: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise SettingError(f"{label} needs the package pillow; pip install 'fedpmt[images]'") from error
    return Image


def _list(label: str, folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise SettingError(f"{label} must hold the folders train and test ({folder} is not a folder)")
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise SettingError(f"{label}: {folder} must hold a folder of images for each class (there are none)")
    return paths


def standardise_pictures(label: str, train: Pictures, test: Pictures) -> tuple[np.ndarray, np.ndarray]:
    """Read pictures of one size and standardise them.

    Returns:
        Arrays of shape (N, channels, height, width) to train and to test on.
    """
    looked = [(name, *_look(label, name, opener)) for name, opener in (*train, *test)]
    first, size, _ = looked[0]
    for name, other, _ in looked:
        if other != size:
            raise SettingError(
                f"{label}: images must have one size ({first} has {size[0]} x {size[1]} pixels, "
                f"{name} {other[0]} x {other[1]})"
            )
    mode = "L" if all(grey for *_, grey in looked) else "RGB"
    arrays = [_decode(label, part, mode, size) for part in (train, test)]
    mean = arrays[0].mean(axis=(0, 2, 3), dtype=np.float64, keepdims=True)
    deviation = arrays[0].std(axis=(0, 2, 3), dtype=np.float64, keepdims=True)
    deviation[deviation == 0] = 1.0
    for pixels in arrays:
        np.subtract(pixels, mean.astype(np.float32), out=pixels)
        np.divide(pixels, deviation.astype(np.float32), out=pixels)
    return arrays[0], arrays[1]


def _look(label: str, name: str, opener: Callable[[], Any]) -> tuple[tuple[int, int], bool]:
    """A picture's size, and whether it is grey."""
    try:
        with opener() as picture:
            return picture.size, picture.mode in _GREY
    except Exception as error:  # a damaged picture can raise anything
        raise _damaged(label, name, error) from error


def _decode(label: str, pictures: Pictures, mode: str, size: tuple[int, int]) -> np.ndarray:
    channels = len(mode)
    pixels = np.empty((len(pictures), channels, size[1], size[0]), np.float32)
    for row, (name, opener) in enumerate(pictures):
        try:
            with opener() as picture:
                decoded = np.asarray(picture.convert(mode), dtype=np.float32) / 255
        except Exception as error:  # a damaged picture can raise anything
            raise _damaged(label, name, error) from error
        pixels[row] = decoded.reshape(*decoded.shape[:2], channels).transpose(2, 0, 1)
    return pixels


def _damaged(label: str, name: str, error: Exception) -> SettingError:
    return SettingError(
        f"{label}: {name} cannot be read as an image ({' '.join(str(error).split()) or type(error).__name__})"
    )
