"""Spread a data set over a fleet: the one entrance for a simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.data.base import FederatedData, OwnTest
from fedpmt.data.datasets import load
from fedpmt.data.lazy import known_targets
from fedpmt.data.partition import Kept, PartitionedData, Subset, by_owner, owner_positions
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
    amounts: str = "equal",
    held_out: float = 0.0,
) -> FederatedData:
    """A named data set, spread over a fleet; inputs take the shape asked for where their size allows it.

    `public` and `validation` say what is kept from the devices, or comes from elsewhere; `amounts` and `held_out` how
    many samples each device has, and which share of them it keeps for its own test: all as in `Settings`.
    """
    described, argument = find_dataset(name)
    if described.draw is not None:
        if partition != "iid":
            raise SettingError(
                f"partition = '{partition}' does not apply to data = '{name}', "
                "which each device draws for itself (allowed: iid)"
            )
        if amounts != "equal" or held_out:
            key, value = ("amounts", amounts) if amounts != "equal" else ("held-out", f"{held_out:g}")
            raise SettingError(
                f"{key} = '{value}' does not apply to data = '{name}', which is drawn for each device"
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
        amounts=amounts,
        held_out=held_out,
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
    amounts: str = "equal",
    held_out: float = 0.0,
) -> FederatedData:
    """A data set of arrays, spread over a fleet but for what is held out."""
    total, owners = len(dataset.train), dataset.owners
    rows = hold_out(public, validation, total, partition_seed)
    if partition == "natural":
        if owners is None:
            raise SettingError(
                f"partition = 'natural' needs samples with owners, which data = '{dataset.name}' lacks"
            )
        drawn = by_owner(owners, devices, None if rows is None else rows.kept, partition_seed)
    else:
        targets = known_targets(dataset.train)
        if rows is not None:
            targets = None if targets is None else targets[rows.kept]
            total = len(rows.kept)
        drawn = split(partition, targets, devices, samples, partition_seed, total=total, amounts=amounts)
        drawn = drawn if rows is None else Subset(drawn, rows.kept)
    own_test, names = _natural_test(dataset, partition, devices, partition_seed), ()
    if held_out:
        drawn = Kept(drawn, held_out, partition_seed)
        own_test = _held_out_test(dataset, drawn)
    if not len(dataset.test):
        if own_test is None:
            raise SettingError(
                "test: there is no test set; give test, or let devices keep a share with held_out"
            )
        dataset = replace(dataset, test=own_test.examples)
    if owners is not None and partition == "natural":
        names = tuple(owners.names[owner] for owner in owner_positions(owners, devices, partition_seed))
    return PartitionedData(
        dataset,
        drawn,
        public_data(public, dataset, rows, data_dir, partition_seed),
        dataset.train.take(rows.validation) if rows is not None and len(rows.validation) else None,
        names,
        own_test,
    )


MOST_TESTED = 1000
"""Devices, at most, whose own test samples are looked at: the first of them."""


def _held_out_test(dataset: LoadedDataset, drawn: Kept) -> OwnTest | None:
    """What the devices keep of their samples for their own test."""
    tested = [drawn.halves(device)[1] for device in range(min(drawn.devices, MOST_TESTED))]
    owners = np.repeat(np.arange(len(tested)), [len(rows) for rows in tested])
    return OwnTest(dataset.train.view(np.concatenate(tested)), owners) if len(owners) else None


def _natural_test(dataset: LoadedDataset, partition: str, devices: int, seed: int) -> OwnTest | None:
    """The samples of the test set that devices own, where the split is by owner."""
    owners = dataset.owners
    if owners is None or partition != "natural":
        return None
    device_of = np.full(len(owners.names) + 1, -1)  # the last one is nobody's
    device_of[owner_positions(owners, devices, seed)] = np.arange(devices)
    found = device_of[owners.test]
    owned = np.flatnonzero((found >= 0) & (found < MOST_TESTED))
    if not len(owned):
        return None
    # The test set itself where it is all of it: it is then run through the model once.
    whole = len(owned) == len(dataset.test)
    return OwnTest(dataset.test if whole else dataset.test.view(owned), found[owned])


def _reshaped(dataset: LoadedDataset, shape: tuple[int, ...]) -> LoadedDataset:
    inputs = dataset.train.inputs
    if isinstance(inputs, Mapping):
        raise SettingError(
            f"data = '{dataset.name}' has inputs of {' and '.join(inputs)}, but {_times(shape)} are needed"
        )
    own = inputs.shape[1:]
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
