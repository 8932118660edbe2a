"""Data sets of Hugging Face, by name or as `save_to_disk` left them."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.data.folders import data_folder
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.types import Arrays

_log = logging.getLogger("fedpmt")

_TESTS = ("test", "validation")
_TARGETS = ("label", "labels", "target", "targets")
_LENGTH = 128


def load_hugging_face(
    argument: str, data_dir: Path | None
) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Read a data set of Hugging Face: its splits train and test (else validation).

    Targets are its column of class labels, else the one called label, labels, target or targets. Inputs are its column
    of images (standardised) or of texts (the first 128 tokens of MiniLM), else all columns of numbers.

    Args:
        argument: The data set's name, or the folder that it was saved to.
        data_dir: Folder of the data files, which holds MiniLM's tokenizer; None: the usual one.

    Raises:
        SettingError: The package `datasets` is not installed, or the data set cannot be had or has no such columns.
    """
    label = f"data = 'hf:{argument}'"
    splits = _open(label, argument)
    test = next((name for name in _TESTS if name in splits), None)
    if "train" not in splits or test is None:
        raise SettingError(f"{label} must have the splits train and test (it has {_names(splits)})")
    parts = (splits["train"], splits[test])
    features = dict(parts[0].features)
    target = _target(label, features)
    del features[target]
    train, tested = _inputs(label, parts, features, data_dir)
    return (train, np.asarray(parts[0][target])), (tested, np.asarray(parts[1][target]))


def _open(label: str, argument: str) -> Mapping[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise SettingError(f"{label} needs the package datasets; pip install 'fedpmt[hf]'") from error
    path = Path(argument).expanduser()
    try:
        found = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(argument)
    except Exception as error:  # it passes on those of its many storages
        raise SettingError(f"{label} cannot be loaded ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(found, dict):
        raise SettingError(f"{label} must have the splits train and test (it has no splits)")
    return found


def _target(label: str, features: Mapping[str, Any]) -> str:
    found = [name for name, one in features.items() if type(one).__name__ == "ClassLabel"]
    found = found or [name for name in features if name in _TARGETS]
    if len(found) != 1:
        raise SettingError(
            f"{label} must have one column of targets: class labels, or called {' or '.join(_TARGETS)} "
            f"(its columns are {_names(features)})"
        )
    return found[0]


def _inputs(
    label: str, parts: tuple[Any, Any], features: Mapping[str, Any], data_dir: Path | None
) -> tuple[Arrays, Arrays]:
    images = [name for name, one in features.items() if type(one).__name__ == "Image"]
    texts = [name for name, one in features.items() if getattr(one, "dtype", None) == "string"]
    used = images or texts or list(features)
    if not used or len(images or texts) > 1:
        raise SettingError(
            f"{label} must have one column of images or of texts, or columns of numbers "
            f"(its other columns are {_names(features)})"
        )
    unused = [name for name in features if name not in used]
    if unused:
        _log.warning("%s: the columns %s are not used", label, _names(unused))
    if images:
        return _pictures(label, parts, used[0])
    if texts:
        return _tokens(label, parts, used[0], data_dir)
    train, test = ({name: np.asarray(part[name]) for name in used} for part in parts)
    return (train, test) if len(used) > 1 else (train[used[0]], test[used[0]])


def _pictures(label: str, parts: tuple[Any, Any], column: str) -> tuple[np.ndarray, np.ndarray]:
    from fedpmt.data.images import standardise_pictures

    def opener(part: Any, row: int) -> Any:
        return part[row][column]

    train, test = (
        [(f"image {row} of {name}", partial(opener, part, row)) for row in range(len(part))]
        for name, part in zip(("train", "test"), parts, strict=True)
    )
    return standardise_pictures(label, train, test)


def _tokens(label: str, parts: tuple[Any, Any], column: str, data_dir: Path | None) -> tuple[Arrays, Arrays]:
    from fedpmt.data.text import encode, inputs_of, read_tokenizer

    rules = read_tokenizer(label, data_folder(data_dir))
    train, test = (inputs_of(encode(list(part[column]), _LENGTH, rules, label)) for part in parts)
    return train, test


def _names(names: Any) -> str:
    return ", ".join(names) or "none"
