"""Data that no device owns: unlabelled for everybody (public), labelled for the server alone (validation).

none              there is none
holdout:SHARE     a share of the task's training set, at random; devices get none of it
NAME, NAME:N      another data set's training inputs, scaled as the task's are; all of them or N at random
generated:N       noise: N inputs of independent normal values; standard ones, as the sets of images are standardised,
                  and for a user's own arrays of their mean and deviation

Of a user's own arrays nobody knows whose images they are or how they were scaled: no other data set goes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from fedpmt.data.datasets import load
from fedpmt.data.registry import DATASETS
from fedpmt.data.spec import held_out, parse_public
from fedpmt.seeds import generator
from fedpmt.types import Examples, SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.data.datasets import LoadedDataset
    from fedpmt.types import Arrays

NO_LABEL: Final = -1
"""The target of a public sample: using it as a label fails at once."""


@dataclass(frozen=True)
class Rows:
    """Positions of the training set, in order and without overlap."""

    kept: np.ndarray  # for the devices
    public: np.ndarray
    validation: np.ndarray


def hold_out(public: str, validation: float, total: int, seed: int) -> Rows | None:
    """Which samples are held out; None where none is, and devices share everything.

    >>> rows = hold_out("holdout:0.1", 0.02, 100, seed=0)
    >>> len(rows.kept), len(rows.public), len(rows.validation)
    (88, 10, 2)
    """
    unlabelled, labelled = held_out(public, validation, total)
    if unlabelled + labelled == 0:
        return None
    order = generator(seed, "public/holdout").permutation(total)
    parts = np.split(order, [unlabelled, unlabelled + labelled])
    return Rows(*(np.sort(parts[place]) for place in (2, 0, 1)))


def check_public(public: str, data: str) -> None:
    """Refuse another data set whose images devices hold or may hold, or are of another size; loads none of them."""
    kind, _ = parse_public(public)
    own = data.partition(":")[0]
    others = _others(own)
    if kind in ("none", "holdout", "generated", *others):
        return
    if own not in DATASETS:
        why = f"it can be neither told apart from data = '{data}' nor scaled alike"
    elif DATASETS[own].draw is not None:
        why = f"data = '{data}' has no other set of its kind"
    elif DATASETS[kind].shape == DATASETS[own].shape:
        why = f"devices hold images of {own} themselves"
    else:
        why = f"its inputs have another size than those of data = '{data}'"
    allowed = ", ".join(["none", "holdout:SHARE", "generated:N", *(f"{name}:N" for name in others)])
    raise SettingError(f"public = '{public}' is refused: {why} (allowed: {allowed})")


def _others(own: str) -> list[str]:
    """The data sets with samples of the same shape and of another origin.

    >>> _others("embedded"), _others("cifar10"), _others("arrays")
    (['fashion-mnist'], [], [])
    """
    dataset = DATASETS.get(own)
    if dataset is None or dataset.load is None:
        return []
    return [
        other.name
        for other in DATASETS.values()
        if other.load is not None and other.shape == dataset.shape and other.origin != dataset.origin
    ]


def public_data(
    public: str, dataset: LoadedDataset, rows: Rows | None, data_dir: Path | None, seed: int
) -> Examples | None:
    """The unlabelled data that goes with a data set; None where there is none."""
    kind, number = parse_public(public)
    if kind == "none":
        return None
    if kind == "holdout":
        if rows is None or not len(rows.public):
            raise SettingError(
                f"public = '{public}' holds out none of the {len(dataset.train)} training samples"
            )
        return unlabelled(dataset.train.take(rows.public))
    if kind == "generated":
        drawn = noise(int(number), dataset.train.inputs, seed)
        return drawn if dataset.name in DATASETS else _scaled(drawn, dataset.train.inputs)
    check_public(public, dataset.name)
    other = load(kind, data_dir, like=dataset.name).train
    if number > len(other):
        raise SettingError(f"public = '{public}' asks for more samples than there are ({len(other)})")
    if number:
        other = other.take(np.sort(generator(seed, "public/draw").permutation(len(other))[: int(number)]))
    inputs = other.inputs.reshape(len(other), *dataset.train.inputs.shape[1:])
    return unlabelled(Examples(inputs, other.targets, np.arange(len(other))))


def unlabelled(examples: Examples) -> Examples:
    """The same inputs without their targets."""
    return Examples(examples.inputs, np.full(len(examples), NO_LABEL, dtype=np.int64), examples.ids)


def noise(count: int, like: Arrays, seed: int) -> Examples:
    """Standard normal noise in the shape of these inputs."""
    if isinstance(like, Mapping) or like.dtype.kind != "f":
        raise SettingError(f"public = 'generated:{count}' needs inputs that are one array of real numbers")
    drawn = generator(seed, "public/noise").standard_normal((count, *like.shape[1:]), dtype=np.float32)
    return unlabelled(Examples(drawn, np.zeros(count), np.arange(count)))


def _scaled(drawn: Examples, like: np.ndarray) -> Examples:
    """Noise with the mean and the deviation of these inputs, each channel (the second axis) by itself."""
    others = tuple(axis for axis in range(like.ndim) if axis != 1)
    mean, deviation = (
        moment(axis=others, dtype=np.float64, keepdims=True) for moment in (like.mean, like.std)
    )
    return replace(drawn, inputs=(mean + deviation * drawn.inputs).astype(np.float32))
