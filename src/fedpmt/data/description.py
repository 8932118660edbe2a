"""What the library knows about a data set before any of it is read, and the file formats that data sets come in.

Loads neither NumPy nor torch: the readers, which need NumPy, are imported when one is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fedpmt.data.base import FederatedData
    from fedpmt.data.datasets import LoadedDataset
    from fedpmt.data.fetching import Source


@dataclass(frozen=True)
class DataFile:
    """One file of a data set. Size and checksum are of the unpacked content, whichever source it came from."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class OtherForm:
    """The same data set in files of another form. They are read where they are found, but never fetched."""

    names: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each channel over the training inputs; in images the largest byte is 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Defaults:
    """Settings of a run where the user gives none; for the paper's data sets those of its section IV-B."""

    devices: int = 50  # |K|
    samples: int = 80  # |D_k|
    cohort: int = 10  # |S|
    batch: int = 10
    lr: float = 0.05  # η
    rounds: int = 100  # T


Load = Callable[["Dataset", Path, "Scale | None"], "LoadedDataset"]
"""Reads a data set from the data folder, standardised by this scale (its own, or that of another set)."""


class Draw(Protocol):
    """Draws a data set that has no samples of its own, device by device."""

    def __call__(
        self,
        argument: str,
        *,
        seed: int,
        devices: int,
        samples: int,
        input_shape: tuple[int, ...] | None,
        public: str,
        validation: float,
    ) -> FederatedData:
        """Return the fleet's data; `argument` is what follows the colon in the data set's name."""


@dataclass(frozen=True)
class Dataset:
    """The description of a data set: all that the rest of the library knows about it.

    Each module of `fedpmt.data.sets` ends in one of these, named `DATASET`; adding such a module is all it
    takes to add a data set. A set has either `load` (samples that exist) or `draw` (samples that are drawn for
    each device). Both functions import NumPy and their readers only when they are called.
    """

    name: str
    shape: tuple[int, ...]  # of one input
    classes: int | None  # None: targets are not one class per sample
    defaults: Defaults
    load: Load | None = None
    draw: Draw | None = None
    train: int | None = None  # number of training samples; None: as many as the devices ask for
    clients: int | None = None  # how many owners its samples have, each a device; None: they have none
    tokens: int | None = None  # inputs are whole numbers below this; None: they are real numbers
    fields: tuple[str, ...] = ()  # names of the arrays where an input is a dict, each of this shape
    scale: Scale | None = None  # None: `load` returns inputs that need no scaling
    built_in: str = ""  # where the samples come from if there is nothing to fetch
    files: tuple[DataFile, ...] = ()
    places: tuple[str, ...] = ()  # folders the files are looked for in; fetching writes to the first
    other_form: OtherForm | None = None
    sources: tuple[Source, ...] = ()  # tried in this order
    part_of: str = ""  # the larger data set that these samples are taken from
    argument: str = ""  # what may follow the name, e.g. "ALPHA,BETA"
    check: Callable[[str], object] | None = None  # raises SettingError if the argument cannot be used

    def __post_init__(self) -> None:
        if (self.load is None) == (self.draw is None):
            raise ValueError(f"data set {self.name}: exactly one of load and draw must be given")
        if bool(self.built_in) == bool(self.files):
            raise ValueError(f"data set {self.name}: exactly one of built_in and files must be given")
        if self.files and not (self.places and self.sources):
            raise ValueError(f"data set {self.name}: files need places and sources")

    @property
    def origin(self) -> str:
        """The data set that the samples belong to: two sets with the same origin share samples."""
        return self.part_of or self.name


MINILM_TOKENS = 30_522
"""How many tokens MiniLM knows."""

MINILM_FIELDS = ("input_ids", "attention_mask")
"""The arrays of an input of MiniLM."""


def idx_files(*sha256: str) -> tuple[DataFile, ...]:
    """Describe the four files of MNIST and of the sets made in its image; checksums in this order."""
    names = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    return tuple(DataFile(*fields) for fields in zip(names, sizes, sha256, strict=True))


def load_idx(dataset: Dataset, folder: Path, scale: Scale | None) -> LoadedDataset:
    """Load a data set of IDX files, as MNIST."""
    from fedpmt.data.images import standardise_grey
    from fedpmt.data.readers import read

    return standardise_grey(dataset, read(dataset, folder), scale)


def load_cifar(dataset: Dataset, folder: Path, scale: Scale | None) -> LoadedDataset:
    """Load a data set of binary or pickled batches, as CIFAR-10."""
    from fedpmt.data.images import standardise_batches
    from fedpmt.data.readers import batches

    return standardise_batches(dataset, batches(dataset, folder), scale)
