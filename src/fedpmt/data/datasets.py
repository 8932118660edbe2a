"""Data sets as arrays: images standardised, targets whole numbers, each sample with its identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.data.folders import check_sizes, data_folder
from fedpmt.data.lazy import Lazy, known_targets
from fedpmt.data.registry import DATASETS, with_samples
from fedpmt.types import IGNORED, Examples, SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.types import Arrays

__all__ = ["LoadedDataset", "Owners", "data_folder", "from_arrays", "load"]


ARRAYS = "arrays"
"""The name of a user's own samples."""


@dataclass(frozen=True)
class Owners:
    """Whose each sample is."""

    names: tuple[str, ...]  # of the clients
    train: np.ndarray  # for each training sample, the position of its owner's name
    test: np.ndarray  # likewise; -1: nobody's


@dataclass(frozen=True)
class LoadedDataset:
    """The samples to train and test on, before they are spread over devices."""

    name: str
    train: Examples
    test: Examples
    classes: int | None  # None: targets are not one class per sample
    owners: Owners | None = None  # None: nobody's


def load(name: str, data_dir: Path | None, *, like: str | None = None) -> LoadedDataset:
    """Load a data set; inputs of images are float32 of shape (N, channels, height, width).

    Args:
        name: One of the data sets that have samples, e.g. "mnist".
        data_dir: Folder of the data files; None: that of FEDPMT_DATA, else the user's cache.
        like: Another data set, by whose mean and deviation to standardise instead of by its own.

    Raises:
        SettingError: The name is unknown, or files are missing or damaged.
    """
    dataset = DATASETS.get(name)
    if dataset is None or dataset.load is None:
        raise SettingError.unknown("data", name, with_samples())
    model = DATASETS.get(like or name, dataset)
    check_sizes(dataset, data_folder(data_dir))
    return dataset.load(dataset, data_folder(data_dir), model.scale)


def from_arrays(
    train: tuple[Arrays, Arrays], test: tuple[Arrays, Arrays], name: str = ARRAYS
) -> LoadedDataset:
    """A user's own inputs and targets, as NumPy arrays, torch tensors or dicts of them.

    Floats become float32, bytes and booleans too (as they are, not scaled); other whole numbers become
    int64. One whole number of 0 or more per sample is a class, and -100 a sample whose label does not count; all other
    targets have no classes.

    >>> data = from_arrays((np.eye(3), [0, 1, 2]), (np.eye(3)[:1], [0]))
    >>> data.classes, data.train.inputs.dtype.name, len(data.test)
    (3, 'float32', 1)
    """
    if name in DATASETS:
        # By its name a set is known to be scaled, and whose images it holds.
        raise SettingError(f"name = '{name}' is the name of a data set of the library; choose another")
    ours, theirs = make_examples("train", *train), make_examples("test", *test)
    check_alike("train", ours, "test", theirs)
    return LoadedDataset(name, ours, theirs, find_classes(ours, theirs))


def make_examples(what: str, inputs: Any, targets: Any) -> Examples:
    """Samples of a user's arrays, not copied where they are float32 or int64; `what` is how errors call them."""
    clean_inputs = clean_arrays(f"{what} inputs", inputs, False)
    clean_targets = clean_arrays(f"{what} targets", targets, True)
    lengths = {len(array) for arrays in (clean_inputs, clean_targets) for _, array in _named("", arrays)}
    if len(lengths) != 1:
        raise SettingError(
            f"{what}: inputs and targets differ in length ({', '.join(map(str, sorted(lengths)))})"
        )
    return Examples(clean_inputs, clean_targets, np.arange(lengths.pop()))


def check_alike(first: str, ours: Examples, second: str, theirs: Examples) -> None:
    """Refuse samples of another kind; of samples that are not in memory one is looked at, and not its lengths."""
    lazy = isinstance(ours, Lazy) or isinstance(theirs, Lazy)
    ours, theirs = (one.take(slice(0, 1)) if isinstance(one, Lazy) else one for one in (ours, theirs))
    for kind in ("inputs", "targets"):
        signatures = [_signature(getattr(one, kind), ragged=lazy) for one in (ours, theirs)]
        if signatures[0] != signatures[1]:
            joined = f"{first} and {second}"
            raise SettingError(
                f"{joined} {kind} do not agree: {_show(signatures[0])} and {_show(signatures[1])}"
            )


def clean_arrays(label: str, arrays: Any, targets: bool) -> Arrays:
    """A user's array, or dict of arrays, of numbers that the library computes with."""
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


def _signature(arrays: Arrays, *, ragged: bool = False) -> dict[str, str]:
    """What arrays are of; where batches may differ in length, how many axes they have."""
    return {
        name: " x ".join(
            [array.dtype.name, *(["?"] * (array.ndim - 1) if ragged else map(str, array.shape[1:]))]
        )
        for name, array in sorted(_named("", arrays))
    }


def _show(signature: dict[str, str]) -> str:
    return ", ".join(f"{name}: {shape}" if name else shape for name, shape in signature.items())


def find_classes(train: Examples, test: Examples | None) -> int | None:
    """How many classes there are; None where targets are not one class per sample, or would all have to be read."""
    known = [known_targets(examples) for examples in (train, test) if examples is not None]
    if any(one is None or one.dtype.kind == "f" or one.ndim != 1 for one in known):
        return None
    labels = np.concatenate([one for one in known if one is not None])
    labels = labels[labels != IGNORED]
    # Where they are to be classes, the objective refuses them.
    return None if not labels.size or labels.min() < 0 else 1 + int(labels.max())
