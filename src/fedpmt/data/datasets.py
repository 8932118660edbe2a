"""Data sets as arrays: images standardised, targets whole numbers, each sample with its identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.data import cifar, embedded, idx
from fedpmt.data.folders import FILES, NAMES, data_folder, find
from fedpmt.types import Examples, SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.types import Arrays

__all__ = ["Dataset", "data_folder", "from_arrays", "load"]

_MNIST = ((0.1307,), (0.3081,))
_FASHION = ((0.2860,), (0.3530,))
_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
"""Mean and standard deviation of each channel over the training images, in units of the largest byte."""

_MOMENTS = {"embedded": _MNIST, "mnist": _MNIST, "fashion-mnist": _FASHION}
SHAPES = {**dict.fromkeys(_MOMENTS, (1, 28, 28)), "cifar10": cifar.SHAPE}
"""Channels, height and width of each set's images."""

_IMAGE_CLASSES = 10


@dataclass(frozen=True)
class Dataset:
    """What there is to train and test on, before it is spread over devices."""

    name: str
    train: Examples
    test: Examples
    classes: int | None  # None: regression


def load(name: str, data_dir: Path | None, *, like: str | None = None) -> Dataset:
    """One of the image sets; inputs are float32 of shape (N, channels, height, width).

    Standardised by its own mean and deviation, or `like` another grey set, whose net is to see them.
    """
    moments = _MOMENTS.get(like or name, _MOMENTS.get(name, _MNIST))
    if name == "embedded":
        return _grey(name, embedded.read(), moments)
    if name not in FILES:
        raise SettingError.unknown("data", name, ["embedded", *FILES])
    folder = data_folder(data_dir)
    if name == "cifar10":
        return _cifar10(folder)
    place = find(name, folder)
    if place is None:
        raise SettingError(f"data = '{name}' is not in {folder}; run `fedpmt data get {name}`")
    return _grey(name, idx.read(name, place), moments)


def _grey(name: str, raw: tuple[np.ndarray, ...], moments: tuple[tuple[float, ...], ...]) -> Dataset:
    (table,) = _tables(*moments)
    train_images, train_labels, test_images, test_labels = raw
    return Dataset(
        name,
        _examples(table[train_images][:, None], train_labels),
        _examples(table[test_images][:, None], test_labels),
        _IMAGE_CLASSES,
    )


def _cifar10(folder: Path) -> Dataset:
    tables = _tables(*_CIFAR)
    train_files = 5
    inputs, targets = np.empty((0, *cifar.SHAPE), np.float32), np.empty(0, np.int64)
    for position, (images, labels) in enumerate(cifar.batches(folder)):
        count = len(images)
        if position == 0:
            # One array from the start: joining the batches at the end would need twice the memory.
            inputs, targets = (
                np.empty((train_files * count, *cifar.SHAPE), np.float32),
                np.empty(train_files * count, np.int64),
            )
        if position == train_files:
            test_inputs = np.empty((count, *cifar.SHAPE), np.float32)
            _standardise(images, tables, test_inputs)
            return Dataset(
                "cifar10", _examples(inputs, targets), _examples(test_inputs, labels), _IMAGE_CLASSES
            )
        rows = slice(position * count, (position + 1) * count)
        _standardise(images, tables, inputs[rows])
        targets[rows] = labels
    raise AssertionError("cifar.batches yields six batches or raises")


def _tables(mean: tuple[float, ...], deviation: tuple[float, ...]) -> np.ndarray:
    """The standardised value of each byte, per channel: looking up is faster than arithmetic on images."""
    values = np.arange(256)[None, :] / 255
    tables: np.ndarray = (values - np.array(mean)[:, None]) / np.array(deviation)[:, None]
    return tables.astype(np.float32)


def _standardise(images: np.ndarray, tables: np.ndarray, out: np.ndarray) -> None:
    for channel, table in enumerate(tables):
        out[:, channel] = table[images[:, channel]]


def _examples(inputs: Arrays, targets: Arrays) -> Examples:
    return Examples(inputs, targets.astype(np.int64), np.arange(len(targets)))


def from_arrays(train: tuple[Arrays, Arrays], test: tuple[Arrays, Arrays], name: str = "arrays") -> Dataset:
    """A user's own inputs and targets, as NumPy arrays, torch tensors or dicts of them.

    Floats become float32, bytes and booleans too (as they are, not scaled); other whole numbers become
    int64. Whole-number targets are classes 0, 1, ...; float targets mean regression.

    >>> data = from_arrays((np.eye(3), [0, 1, 2]), (np.eye(3)[:1], [0]))
    >>> data.classes, data.train.inputs.dtype.name, len(data.test)
    (3, 'float32', 1)
    """
    if name in NAMES:
        # By its name a set is known to be scaled, and whose images it holds.
        raise SettingError(
            f"name = '{name}' is refused: it is that of one of the library's data sets (allowed: others)"
        )
    examples = {}
    for part, (inputs, targets) in {"train": train, "test": test}.items():
        clean_inputs, clean_targets = (
            _clean(f"{part} inputs", inputs, False),
            _clean(f"{part} targets", targets, True),
        )
        lengths = {len(array) for arrays in (clean_inputs, clean_targets) for _, array in _named("", arrays)}
        if len(lengths) != 1:
            raise SettingError(
                f"{part}: inputs and targets differ in length ({', '.join(map(str, sorted(lengths)))})"
            )
        examples[part] = Examples(clean_inputs, clean_targets, np.arange(lengths.pop()))
    for kind in ("inputs", "targets"):
        ours, theirs = (_signature(getattr(examples[part], kind)) for part in ("train", "test"))
        if ours != theirs:
            raise SettingError(f"train and test {kind} do not agree: {_show(ours)} and {_show(theirs)}")
    return Dataset(name, examples["train"], examples["test"], _classes(examples["train"], examples["test"]))


def _clean(label: str, arrays: Arrays, targets: bool) -> Arrays:
    if isinstance(arrays, Mapping):
        if not arrays:
            raise SettingError(f"{label} are an empty dict")
        return {name: _clean_array(f"{label}['{name}']", array, targets) for name, array in arrays.items()}
    return _clean_array(label, arrays, targets)


def _clean_array(label: str, array: Any, targets: bool) -> np.ndarray:
    try:
        # A tensor may sit on a device or carry a graph; known by its methods, for torch is not loaded here.
        plain = np.asarray(array.detach().cpu().numpy() if hasattr(array, "detach") else array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingError(f"{label} cannot be read as an array: {' '.join(str(error).split())}") from error
    if plain.dtype.kind not in "fiub":
        raise SettingError(f"{label} must be numbers, not {plain.dtype}")
    if plain.ndim == 0 or not plain.size:
        raise SettingError(f"{label} are empty")
    byte_image = plain.dtype in (np.uint8, np.bool_) and not targets
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused below
        clean = np.ascontiguousarray(
            plain, dtype=np.float32 if plain.dtype.kind == "f" or byte_image else np.int64
        )
    if clean.dtype.kind == "f" and not np.isfinite(clean).all():
        raise SettingError(f"{label} hold values that are not finite")
    return clean


def _named(label: str, arrays: Arrays) -> list[tuple[str, np.ndarray]]:
    return list(arrays.items()) if isinstance(arrays, Mapping) else [(label, arrays)]


def _signature(arrays: Arrays) -> dict[str, str]:
    return {
        name: " x ".join([array.dtype.name, *map(str, array.shape[1:])])
        for name, array in sorted(_named("", arrays))
    }


def _show(signature: dict[str, str]) -> str:
    return ", ".join(f"{name}: {shape}" if name else shape for name, shape in signature.items())


def _classes(train: Examples, test: Examples) -> int | None:
    if isinstance(train.targets, Mapping) or train.targets.dtype.kind == "f":
        return None
    lowest = min(int(part.targets.min()) for part in (train, test))
    if lowest < 0:
        raise SettingError(f"targets must be classes 0, 1, ...; found {lowest}")
    return 1 + max(int(part.targets.max()) for part in (train, test))
