"""How the training set is split over devices: which positions of it each device holds.

iid               disjoint, at random
iid:replace       each device draws from the whole set, so that a fleet can be of any size
classes:N         disjoint, N classes per device in equal parts; N = 2 is the paper's non-i.i.d. case
dirichlet:ALPHA   disjoint, each device's class proportions drawn from Dir(α)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from fedpmt.data.base import FederatedData, count_labels
from fedpmt.data.dealing import can_deal, deal
from fedpmt.seeds import generator
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.data.datasets import LoadedDataset
    from fedpmt.types import Examples

SPECS: Final = ("iid", "iid:replace", "classes:N", "dirichlet:ALPHA")


class Partition(ABC):
    """A split of the training set; every device holds the same number of samples."""

    devices: int  # |K|
    samples: int  # |D_k|

    @abstractmethod
    def indices(self, device: int) -> np.ndarray:
        """Positions in the training set of this device's samples."""


@dataclass(frozen=True)
class Disjoint(Partition):
    """A split drawn as a whole: one row of positions per device."""

    devices: int
    samples: int
    positions: np.ndarray  # (devices, samples)

    def indices(self, device: int) -> np.ndarray:
        """Positions in the training set of this device's samples."""
        _check_device(device, self.devices)
        row: np.ndarray = self.positions[device]
        return row


@dataclass(frozen=True)
class Replaced(Partition):
    """Each device's own draw from the whole set, made when it is asked for: a fleet costs nothing."""

    devices: int
    samples: int
    total: int
    seed: int

    def indices(self, device: int) -> np.ndarray:
        """Positions in the training set of this device's samples."""
        _check_device(device, self.devices)
        return generator(self.seed, "partition/replace", None, device).integers(self.total, size=self.samples)


class Subset(Partition):
    """A split of some positions of the training set; the others are no device's."""

    def __init__(self, inner: Partition, positions: np.ndarray) -> None:
        self.devices, self.samples = inner.devices, inner.samples
        self._inner, self._positions = inner, positions

    def indices(self, device: int) -> np.ndarray:
        """Positions in the whole training set of this device's samples."""
        found: np.ndarray = self._positions[self._inner.indices(device)]
        return found


def _check_device(device: int, devices: int) -> None:
    if not 0 <= device < devices:
        raise IndexError(f"device {device} is not one of the {devices} devices")


class PartitionedData(FederatedData):
    """A data set of arrays, of which each device holds the rows that a partition gives it."""

    def __init__(
        self,
        dataset: LoadedDataset,
        partition: Partition,
        public: Examples | None = None,
        validation: Examples | None = None,
    ) -> None:
        self.name = dataset.name
        self.classes = dataset.classes
        self.devices = partition.devices
        self.test = dataset.test
        self.public, self.validation = public, validation
        self._train, self._partition = dataset.train, partition

    def samples(self, device: int) -> int:
        """How many samples the device holds, |D_k|."""
        _check_device(device, self.devices)
        return self._partition.samples

    def shard(self, device: int) -> Examples:
        """The device's samples; `ids` are their positions in the training set."""
        return self._train.take(self._partition.indices(device))

    def training_set(self) -> Examples:
        """The whole training set."""
        return self._train

    def rows(self, device: int) -> np.ndarray:
        """The device's rows of it."""
        return self._partition.indices(device)

    def label_counts(self, device: int) -> np.ndarray | None:
        """Samples per class of the device; None where targets are not one class per sample."""
        if not isinstance(self._train.targets, np.ndarray):
            return None
        return count_labels(self._train.targets[self._partition.indices(device)], self.classes)


def partition(
    spec: str, targets: np.ndarray | None, devices: int, samples: int, seed: int, *, total: int | None = None
) -> Partition:
    """Split `total` samples (as many as there are targets, unless given); fixed by the seed.

    >>> split = partition("classes:2", np.arange(100) % 10, devices=10, samples=10, seed=0)
    >>> [len(set(split.indices(device) % 10)) for device in range(10)]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    if total is None:
        if targets is None:
            raise TypeError("partition needs the targets or the total number of samples")
        total = len(targets)
    if devices < 1 or samples < 1:
        raise SettingError(f"devices = {devices} and samples = {samples} must be at least 1")
    name, number = check_spec(spec)
    if spec == "iid:replace":
        return Replaced(devices, samples, total, seed)
    if devices * samples > total:
        need = devices * samples
        raise SettingError(
            f"devices = {devices} of samples = {samples} need {need} samples, the training set has {total}"
        )
    random = generator(seed, f"partition/{name}")
    if spec == "iid":
        return Disjoint(
            devices, samples, random.permutation(total)[: devices * samples].reshape(devices, samples)
        )
    pools = _pools(spec, targets, random)
    if name == "classes":
        return _by_classes(spec, pools, devices, samples, int(number), random)
    return _by_dirichlet(pools, devices, samples, number, random)


def most_samples(spec: str, targets: np.ndarray, devices: int, wanted: int) -> int:
    """Find the most samples per device, up to `wanted`, with which a split into classes can be met.

    `wanted` itself where no number will do, for `partition` to refuse, and for splits that any supply of classes meets.

    >>> most_samples("classes:2", np.repeat([0, 1, 2, 3], [29, 30, 30, 31]), devices=4, wanted=30)
    29
    """
    name, number = check_spec(spec)
    if name != "classes":
        return wanted
    supply, each = np.unique(targets, return_counts=True)[1].tolist(), int(number)
    if each > len(supply):
        return wanted
    found = (samples for samples in range(wanted, each - 1, -1) if can_deal(supply, devices, samples, each))
    return next(found, wanted)


def check_spec(spec: str) -> tuple[str, float]:
    """The name and the number of a partition that is written well; needs no data.

    >>> check_spec("classes:2")
    ('classes', 2)
    """
    name, _, argument = spec.partition(":")
    if spec in ("iid", "iid:replace"):
        return name, 0
    if name == "classes":
        return name, _whole(spec, argument)
    if name == "dirichlet":
        return name, _positive(spec, argument)
    raise SettingError.unknown("partition", spec, SPECS)


def _whole(spec: str, argument: str) -> int:
    try:
        number = int(argument)
    except ValueError:
        number = 0
    if number < 1:
        raise SettingError(
            f"partition = '{spec}' is refused: write classes:N with a whole number N of at least 1"
        )
    return number


def _positive(spec: str, argument: str) -> float:
    try:
        number = float(argument)
    except ValueError:
        number = math.nan
    # Beyond these bounds the draws no longer differ from "one class" and "all classes alike".
    if not 1e-6 <= number <= 1e6:
        raise SettingError(
            f"partition = '{spec}' is refused: write dirichlet:ALPHA with ALPHA from 1e-6 to 1e6"
        )
    return number


def _pools(spec: str, targets: np.ndarray | None, random: np.random.Generator) -> list[np.ndarray]:
    """The positions of each class that occurs, in random order."""
    if targets is None or targets.ndim != 1 or targets.dtype.kind not in "iu":
        raise SettingError(
            f"partition = '{spec}' needs one class per sample as target; take iid or iid:replace"
        )
    order = random.permutation(len(targets))
    labels = targets[order]
    return [order[labels == label] for label in np.unique(targets)]


def _by_classes(
    spec: str,
    pools: list[np.ndarray],
    devices: int,
    samples: int,
    classes_each: int,
    random: np.random.Generator,
) -> Partition:
    if classes_each > len(pools):
        raise SettingError(f"partition = '{spec}' is refused: the training set has {len(pools)} classes")
    if classes_each > samples:
        raise SettingError(
            f"partition = '{spec}' is refused: samples = {samples} per device are fewer than its classes"
        )
    supply = [len(pool) for pool in pools]
    counts = deal(supply, devices, samples, classes_each, random)
    if counts is None:
        raise SettingError(
            f"partition = '{spec}' cannot be met: devices = {devices} need {classes_each} classes each, "
            f"in equal parts of samples = {samples}; the classes hold {min(supply)} to {max(supply)}"
        )
    return _hand_out(pools, counts, random)


def _by_dirichlet(
    pools: list[np.ndarray], devices: int, samples: int, alpha: float, random: np.random.Generator
) -> Partition:
    left = np.array([len(pool) for pool in pools])
    counts = np.zeros((devices, len(pools)), dtype=np.int64)
    for device in range(devices):
        proportions = random.dirichlet(np.full(len(pools), alpha))
        while missing := samples - int(counts[device].sum()):
            weights = np.where(left > 0, proportions, 0.0)
            # A device may want nothing but classes that are used up: it then takes what the rest offers.
            weights = weights if weights.sum() > 0 else left.astype(float)
            taken = np.minimum(random.multinomial(missing, weights / weights.sum()), left)
            counts[device] += taken
            left -= taken
    return _hand_out(pools, counts, random)


def _hand_out(pools: Sequence[np.ndarray], counts: np.ndarray, random: np.random.Generator) -> Disjoint:
    """Give each device its count of each class from the front of that class's pool."""
    # One part per device, and at the end what no device gets.
    parts = [np.split(pool, ends) for pool, ends in zip(pools, counts.cumsum(axis=0).T, strict=True)]
    rows = [np.concatenate(own) for own in list(zip(*parts, strict=True))[:-1]]
    # Without this a device's samples would stand class after class.
    positions = random.permuted(np.stack(rows), axis=1)
    return Disjoint(len(positions), positions.shape[1], positions)
