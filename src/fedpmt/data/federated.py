"""Spread a data set over a fleet: the one entrance for a simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.data.base import FederatedData
from fedpmt.data.datasets import load
from fedpmt.data.partition import PartitionedData, Subset
from fedpmt.data.partition import partition as split
from fedpmt.data.public import hold_out, public_data
from fedpmt.data.registry import find_dataset
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.data.datasets import LoadedDataset

__all__ = ["FederatedData", "PartitionedData", "federate", "federate_dataset"]


def federate(
    name: str,
    *,
    partition: str,
    partition_seed: int,
    devices: int,
    samples: int,
    data_dir: Path | None,
    input_shape: tuple[int, ...] | None = None,
    public: str = "none",
    validation: float = 0.0,
) -> FederatedData:
    """A named data set, spread over a fleet; inputs take the shape asked for where their size allows it.

    `public` and `validation` say what is kept from the devices, or comes from elsewhere, as in `Settings`.
    """
    described, argument = find_dataset(name)
    if described.draw is not None:
        if partition != "iid":
            raise SettingError(
                f"partition = '{partition}' does not apply to data = '{name}', "
                "which each device draws for itself (allowed: iid)"
            )
        if devices < 1 or samples < 1:
            raise SettingError(f"devices and samples must be >= 1 (got {devices} and {samples})")
        return described.draw(
            argument,
            seed=partition_seed,
            devices=devices,
            samples=samples,
            input_shape=input_shape,
            public=public,
            validation=validation,
        )
    dataset = load(name, data_dir)
    if input_shape is not None:
        dataset = _reshaped(dataset, tuple(input_shape))
    return federate_dataset(
        dataset,
        partition=partition,
        partition_seed=partition_seed,
        devices=devices,
        samples=samples,
        data_dir=data_dir,
        public=public,
        validation=validation,
    )


def federate_dataset(
    dataset: LoadedDataset,
    *,
    partition: str,
    partition_seed: int,
    devices: int,
    samples: int,
    data_dir: Path | None = None,
    public: str = "none",
    validation: float = 0.0,
) -> FederatedData:
    """A data set of arrays, spread over a fleet but for what is held out."""
    targets = dataset.train.targets if isinstance(dataset.train.targets, np.ndarray) else None
    total = len(dataset.train)
    rows = hold_out(public, validation, total, partition_seed)
    if rows is not None:
        targets = None if targets is None else targets[rows.kept]
        total = len(rows.kept)
    drawn = split(partition, targets, devices, samples, partition_seed, total=total)
    if rows is not None:
        drawn = Subset(drawn, rows.kept)
    return PartitionedData(
        dataset,
        drawn,
        public_data(public, dataset, rows, data_dir, partition_seed),
        dataset.train.take(rows.validation) if rows is not None and len(rows.validation) else None,
    )


def _reshaped(dataset: LoadedDataset, shape: tuple[int, ...]) -> LoadedDataset:
    own = dataset.train.inputs.shape[1:]
    if math.prod(own) != math.prod(shape):
        raise SettingError(
            f"data = '{dataset.name}' has inputs of {_times(own)}, but {_times(shape)} are needed"
        )
    train, test = (
        replace(part, inputs=part.inputs.reshape(len(part), *shape)) for part in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
