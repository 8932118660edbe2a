"""Images of bytes become standardised inputs of shape (N, channels, height, width)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedpmt.data.datasets import LoadedDataset
from fedpmt.types import Examples

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
