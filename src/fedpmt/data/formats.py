"""The file formats that data sets come in. The readers, which need NumPy, are imported when one is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.data.description import DataFile

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.data.datasets import LoadedDataset
    from fedpmt.data.description import Dataset, Scale

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
