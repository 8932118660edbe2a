"""How the training set is split over devices: which positions of it each device holds.

iid               disjoint, at random
iid:replace       each device draws from the whole set, so that a fleet can be of any size
classes:N         disjoint, N classes per device in equal parts; N = 2 is the paper's non-i.i.d. case
dirichlet:ALPHA   disjoint, each device's class proportions drawn from Dir(α)
natural           each device holds the samples of one owner

How many samples a device holds is a matter of its own:

equal             each the same number
lognormal:SIGMA   as many on average, log-normally distributed
free              as they fall when each class is divided among devices by Dir(α); with dirichlet only
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from fedpmt.data.base import FederatedData, OwnTest, count_labels
from fedpmt.data.dealing import can_deal, deal
from fedpmt.data.lazy import is_read, known_targets
from fedpmt.seeds import generator
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.data.datasets import LoadedDataset, Owners
    from fedpmt.types import Examples

SPECS: Final = ("iid", "iid:replace", "classes:N", "dirichlet:ALPHA", "natural")
AMOUNTS: Final = ("equal", "lognormal:SIGMA", "free")
WIDEST: Final = 5.0
"""Of log-normal sizes: beyond it one device holds nearly everything."""


class Partition(ABC):
    """A split of the training set."""

    devices: int  # |K|
    sizes: int | np.ndarray  # |D_k| of every device; one number where all are equal

    @abstractmethod
    def indices(self, device: int) -> np.ndarray:
        """Positions in the training set of this device's samples."""

    def size(self, device: int) -> int:
        """|D_k| of one device."""
        if not 0 <= device < self.devices:
            raise IndexError(f"device {device} is not one of the {self.devices} devices")
        return self.sizes if isinstance(self.sizes, int) else int(self.sizes[device])


class Disjoint(Partition):
    """A split drawn as a whole: a row of positions for each device, of any length."""

    def __init__(self, rows: np.ndarray | Sequence[np.ndarray]) -> None:
        self.devices, self._rows = len(rows), rows
        sizes = np.array([len(row) for row in rows])
        self.sizes = int(sizes[0]) if (sizes == sizes[0]).all() else sizes

    def indices(self, device: int) -> np.ndarray:
        """Positions in the training set of this device's samples."""
        if not 0 <= device < self.devices:
            raise IndexError(f"device {device} is not one of the {self.devices} devices")
        return self._rows[device]


@dataclass(frozen=True)
class Replaced(Partition):
    """Each device's own draw from the whole set, made when it is asked for: a fleet costs nothing."""

    devices: int
    sizes: int | np.ndarray
    total: int
    seed: int

    def indices(self, device: int) -> np.ndarray:
        """Positions in the training set of this device's samples."""
        size = self.size(device)
        return generator(self.seed, "partition/replace", None, device).integers(self.total, size=size)


class Subset(Partition):
    """A split of some positions of the training set; the others are no device's."""

    def __init__(self, inner: Partition, positions: np.ndarray) -> None:
        self.devices, self.sizes = inner.devices, inner.sizes
        self._inner, self._positions = inner, positions

    def indices(self, device: int) -> np.ndarray:
        """Positions in the whole training set of this device's samples."""
        found: np.ndarray = self._positions[self._inner.indices(device)]
        return found


class Kept(Partition):
    """A split of which each device keeps a share of its samples for its own test."""

    def __init__(self, inner: Partition, share: float, seed: int) -> None:
        self.devices = inner.devices
        self._inner, self._share, self._seed = inner, share, seed
        whole = inner.sizes
        self.sizes = (
            whole - tested(whole, share)
            if isinstance(whole, int)
            else whole - np.array([tested(int(size), share) for size in whole])
        )

    def indices(self, device: int) -> np.ndarray:
        """Positions of the samples that the device trains on."""
        return self.halves(device)[0]

    def halves(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the samples that a device trains and tests on."""
        rows = self._inner.indices(device)
        order = generator(self._seed, "partition/test", None, device).permutation(len(rows))
        count = tested(len(rows), self._share)
        # In the order in which the split gave them.
        return rows[np.sort(order[count:])], rows[np.sort(order[:count])]


def tested(samples: int, share: float) -> int:
    """How many of its samples a device keeps for its own test: none of a single one, and never all.

    >>> [tested(samples, 0.2) for samples in (1, 2, 10)]
    [0, 1, 2]
    """
    return min(samples - 1, math.ceil(samples * share))


class PartitionedData(FederatedData):
    """A data set of arrays, of which each device holds the rows that a partition gives it."""

    def __init__(
        self,
        dataset: LoadedDataset,
        partition: Partition,
        public: Examples | None = None,
        validation: Examples | None = None,
        names: tuple[str, ...] = (),
        own_test: OwnTest | None = None,
    ) -> None:
        self.name = dataset.name
        self.classes = dataset.classes
        self.devices = partition.devices
        self.test = dataset.test
        self.public, self.validation = public, validation
        self.names, self.own_test = names, own_test
        self._train, self._partition = dataset.train, partition
        self._targets, self.is_read = known_targets(dataset.train), is_read(dataset.train)

    def samples(self, device: int) -> int:
        """How many samples the device holds, |D_k|."""
        return self._partition.size(device)

    @property
    def sizes(self) -> int | np.ndarray:
        """|D_k| of every device; one number where all are equal."""
        return self._partition.sizes

    def shard(self, device: int) -> Examples:
        """The device's samples; `ids` are their positions in the training set."""
        return self._train.view(self._partition.indices(device))

    def training_set(self) -> Examples:
        """The whole training set."""
        return self._train

    def rows(self, device: int) -> np.ndarray:
        """The device's rows of it."""
        return self._partition.indices(device)

    def label_counts(self, device: int) -> np.ndarray | None:
        """Samples per class of the device; None where targets are not one class per sample."""
        if self._targets is None:
            return None
        return count_labels(self._targets[self._partition.indices(device)], self.classes)


def partition(
    spec: str,
    targets: np.ndarray | None,
    devices: int,
    samples: int,
    seed: int,
    *,
    total: int | None = None,
    amounts: str = "equal",
) -> Partition:
    """Split `total` samples (as many as there are targets, unless given); fixed by the seed.

    `samples` is how many each device gets, or with other `amounts` than equal ones how many on average.

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
    name, number = check_spec(spec, amounts)
    if name == "natural":
        raise SettingError("partition = 'natural' needs samples with owners")
    counts = draw_sizes(amounts, devices, samples, seed)
    if spec == "iid:replace":
        return Replaced(devices, counts, total, seed)
    if devices * samples > total:
        need = devices * samples
        raise SettingError(
            f"devices = {devices} of samples = {samples} need {need} samples, the training set has {total}"
        )
    random = generator(seed, f"partition/{name}")
    if spec == "iid":
        drawn = random.permutation(total)[: devices * samples]
        if isinstance(counts, int):
            return Disjoint(drawn.reshape(devices, samples))
        return Disjoint(np.split(drawn, np.cumsum(counts)[:-1]))
    pools = _pools(spec, targets, random)
    if name == "classes":
        return _by_classes(spec, pools, devices, samples, int(number), random)
    if amounts == "free":
        return _by_class_shares(pools, devices, devices * samples, number, random)
    return _by_dirichlet(pools, devices, counts, number, random)


def by_owner(owners: Owners, devices: int, kept: np.ndarray | None = None, seed: int = 0) -> Partition:
    """Give each device what one owner has, of the samples that are `kept`."""
    chosen = owner_positions(owners, devices, seed)
    rows = np.arange(len(owners.train)) if kept is None else kept
    order = rows[np.argsort(owners.train[rows], kind="stable")]
    edges = np.searchsorted(owners.train[order], np.arange(len(owners.names) + 1))
    split = [order[edges[owner] : edges[owner + 1]] for owner in chosen.tolist()]
    empty = next((owner for owner, own in zip(chosen, split, strict=True) if not len(own)), None)
    if empty is not None:
        raise SettingError(
            f"partition = 'natural': client '{owners.names[empty]}' has no samples to train on"
        )
    return Disjoint(split)


def owner_positions(owners: Owners, devices: int, seed: int) -> np.ndarray:
    """Which owner each device is: all in their order, or as many as there are devices, drawn at random."""
    count = len(owners.names)
    if devices > count:
        raise SettingError(f"devices = {devices} is refused: partition = 'natural' has {count} clients")
    if devices == count:
        return np.arange(count)
    return np.sort(generator(seed, "partition/natural").choice(count, devices, replace=False))


def draw_sizes(spec: str, devices: int, samples: int, seed: int) -> int | np.ndarray:
    """Draw |D_k| of each device, at least 1, `samples` on average; one number where all are equal.

    >>> sizes = draw_sizes("lognormal:1", devices=100, samples=20, seed=0)
    >>> int(sizes.sum()), int(sizes.min()) >= 1
    (2000, True)
    """
    if not spec.startswith("lognormal"):
        return samples
    weights = generator(seed, "partition/sizes").lognormal(0.0, _sigma(spec), devices)
    spare = devices * (samples - 1)
    ends = np.rint(np.cumsum(weights) / weights.sum() * spare).astype(np.int64)
    sizes: np.ndarray = 1 + np.diff(ends, prepend=0)
    return sizes


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


def check_spec(spec: str, amounts: str = "equal") -> tuple[str, float]:
    """The name and the number of a partition that is written well; needs no data.

    >>> check_spec("classes:2")
    ('classes', 2)
    """
    name, _, argument = spec.partition(":")
    kind = amounts.partition(":")[0]
    if kind == "lognormal":
        _sigma(amounts)
    elif amounts not in AMOUNTS:
        raise SettingError.unknown("amounts", amounts, AMOUNTS)
    if kind == "free" and name != "dirichlet":
        raise SettingError(f"amounts = 'free' needs partition = 'dirichlet:ALPHA' (got '{spec}')")
    if kind != "equal" and name in ("classes", "natural"):
        raise SettingError(f"amounts = '{amounts}' cannot be combined with partition = '{spec}'")
    if spec in ("iid", "iid:replace", "natural"):
        return name, 0
    if name == "classes":
        return name, _whole(spec, argument)
    if name == "dirichlet":
        return name, _positive(spec, argument)
    raise SettingError.unknown("partition", spec, SPECS)


def _sigma(spec: str) -> float:
    """The width of log-normal sizes."""
    argument = spec.partition(":")[2]
    try:
        sigma = float(argument)
    except ValueError:
        sigma = math.nan
    if not 0 < sigma <= WIDEST:
        raise SettingError(f"amounts must be lognormal:SIGMA with 0 < SIGMA <= {WIDEST:g} (got '{spec}')")
    return sigma


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
    pools: list[np.ndarray],
    devices: int,
    samples: int | np.ndarray,
    alpha: float,
    random: np.random.Generator,
) -> Partition:
    sizes = np.broadcast_to(samples, devices)
    left = np.array([len(pool) for pool in pools])
    counts = np.zeros((devices, len(pools)), dtype=np.int64)
    for device in range(devices):
        proportions = random.dirichlet(np.full(len(pools), alpha))
        while missing := int(sizes[device] - counts[device].sum()):
            weights = np.where(left > 0, proportions, 0.0)
            # A device may want nothing but classes that are used up: it then takes what the rest offers.
            weights = weights if weights.sum() > 0 else left.astype(float)
            taken = np.minimum(random.multinomial(missing, weights / weights.sum()), left)
            counts[device] += taken
            left -= taken
    return _hand_out(pools, counts, random)


def _by_class_shares(
    pools: list[np.ndarray], devices: int, wanted: int, alpha: float, random: np.random.Generator
) -> Partition:
    """Divide each class among the devices by shares drawn from Dir(α); sizes are what comes of it, at least 1."""
    total = sum(len(pool) for pool in pools)
    counts = np.zeros((devices, len(pools)), dtype=np.int64)
    ends = np.rint(np.cumsum([len(pool) for pool in pools]) * wanted / total).astype(np.int64)
    for label, supply in enumerate(np.diff(ends, prepend=0)):
        counts[:, label] = random.multinomial(supply, random.dirichlet(np.full(devices, alpha)))
    for empty in np.flatnonzero(counts.sum(axis=1) == 0):
        largest = int(counts.sum(axis=1).argmax())
        label = int(counts[largest].argmax())
        counts[largest, label] -= 1
        counts[empty, label] += 1
    return _hand_out(pools, counts, random)


def _hand_out(pools: Sequence[np.ndarray], counts: np.ndarray, random: np.random.Generator) -> Disjoint:
    """Give each device its count of each class from the front of that class's pool."""
    # One part per device, and at the end what no device gets.
    parts = [np.split(pool, ends) for pool, ends in zip(pools, counts.cumsum(axis=0).T, strict=True)]
    rows = [np.concatenate(own) for own in list(zip(*parts, strict=True))[:-1]]
    # Without this a device's samples would stand class after class.
    if len({len(row) for row in rows}) == 1:
        return Disjoint(random.permuted(np.stack(rows), axis=1))
    return Disjoint([random.permutation(row) for row in rows])
