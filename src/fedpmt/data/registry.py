"""All data sets, found in the folder `sets`: each of its modules ends in one `DATASET`. Loads no NumPy."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from fedpmt.data import sets
from fedpmt.references import is_reference
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.data.description import Dataset


def _discover() -> dict[str, Dataset]:
    found: dict[str, Dataset] = {}
    for module in pkgutil.iter_modules(sets.__path__):
        dataset = importlib.import_module(f"{sets.__name__}.{module.name}").DATASET
        if dataset.name in found:
            raise ValueError(f"two data sets are called {dataset.name}")
        found[dataset.name] = dataset
    return found


DATASETS: dict[str, Dataset] = _discover()
"""Every data set's description, by name."""

OWN_SETS = {"hf": "hf:NAME", "folder": "folder:PATH"}
"""Kinds of data sets whose samples are the user's, and how each is written: Hugging Face, and folders of images."""


def spellings() -> list[str]:
    """How each data set may be written, e.g. `synthetic` and `synthetic:ALPHA,BETA`."""
    arguments = [f"{one.name}:{one.argument}" for one in DATASETS.values() if one.argument]
    return [*DATASETS, *arguments]


def with_samples() -> list[str]:
    """The data sets whose samples exist, so that they can also serve as public data."""
    return [name for name, dataset in DATASETS.items() if dataset.load is not None]


def is_own(text: str) -> bool:
    """Whether a text names samples of the user's: a function that returns them, or one of `OWN_SETS`.

    >>> is_own("my_package.data:load"), is_own("folder:~/cats"), is_own("synthetic:0,1")
    (True, True, False)
    """
    kind, _, argument = text.partition(":")
    return bool(argument) and (kind in OWN_SETS or (kind not in DATASETS and is_reference(text)))


def find_dataset(text: str) -> tuple[Dataset, str]:
    """Look up a data set as the user wrote it.

    Returns:
        The description, and the argument behind the colon (empty if there is none).

    Raises:
        SettingError: The name is unknown, or the argument cannot be used.

    >>> find_dataset("mnist")[0].classes, find_dataset("synthetic:0,1")[1]
    (10, '0,1')
    """
    name, colon, argument = text.partition(":")
    dataset = DATASETS.get(name)
    if dataset is None or (colon and not dataset.argument):
        raise SettingError.unknown("data", text, [*spellings(), *OWN_SETS.values()])
    if colon and dataset.check is not None:
        dataset.check(argument)
    return dataset, argument


def default_for(wanted: str) -> str:
    """Name the data set to use where this one is wanted and the user names none.

    That is a built-in set with samples of the wanted one if there is any, since it needs no fetching.

    >>> default_for("mnist"), default_for("cifar10")
    ('embedded', 'cifar10')
    """
    parts = [name for name, one in DATASETS.items() if one.built_in and one.part_of == wanted]
    return parts[0] if parts else wanted
