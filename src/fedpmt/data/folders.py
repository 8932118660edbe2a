"""Where the files of data sets are looked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.data.description import Dataset


def data_folder(data_dir: Path | None) -> Path:
    """The folder given, else that of FEDPMT_DATA, else one in the user's cache."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    named = os.environ.get("FEDPMT_DATA")
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("fedpmt")) / "data"


def home(dataset: Dataset, folder: Path) -> Path:
    """The data set's own place below the data folder, where fetching puts its files."""
    return folder / dataset.places[0]


def find(dataset: Dataset, folder: Path) -> Path | None:
    """The first place that holds any of the data set's files."""
    for place in dataset.places:
        if any(stored(folder / place, file.name) for file in dataset.files):
            return folder / place
    return None


def locate(dataset: Dataset, folder: Path) -> list[Path]:
    """Find all of the data set's files, in the order of its description.

    Raises:
        SettingError: A file is missing.
    """
    place, command = find(dataset, folder), f"run `fedpmt data get {dataset.name}`"
    if place is None:
        raise SettingError(f"data = '{dataset.name}' is not in {folder}; {command}")
    paths = []
    for file in dataset.files:
        path = stored(place, file.name)
        if path is None:
            raise SettingError(f"data = '{dataset.name}': {place} lacks {file.name}; {command}")
        paths.append(path)
    return paths


def find_other_form(dataset: Dataset, folder: Path) -> Path | None:
    """The first place that holds any of the data set's files in their other form."""
    if dataset.other_form is None:
        return None
    for place in dataset.other_form.places:
        if any(_is_file(folder / place / name) for name in dataset.other_form.names):
            return folder / place
    return None


def stored(folder: Path, name: str) -> Path | None:
    """The file of this name, raw or packed; the raw one wins, for it is what fetching writes."""
    for path in (folder / name, folder / f"{name}.gz"):
        if _is_file(path):
            return path
    return None


def check_sizes(dataset: Dataset, folder: Path) -> None:
    """Refuse files that are not as long as the data set's own; `fedpmt data list` calls them damaged.

    Raises:
        SettingError: A file that is there has another size.
    """
    place = find(dataset, folder)
    for file in dataset.files:
        path = None if place is None else stored(place, file.name)
        if path is not None and size_of(path) != file.size:
            raise SettingError(
                f"{path} is damaged: it holds {size_of(path)} bytes, not {file.size}; "
                f"run `fedpmt data get {dataset.name}`"
            )


def size_of(path: Path) -> int:
    """The length of a file's content, without unpacking it: a gzip file ends with it."""
    size = path.stat().st_size
    if path.suffix != ".gz":
        return size
    with path.open("rb") as packed:
        packed.seek(max(0, size - 4))
        return int.from_bytes(packed.read(), "little")


def read_content(path: Path) -> bytes:
    """Read a file, unpacked if it is packed, but never more of it than its end says.

    Raises:
        SettingError: It cannot be read, or is damaged.
    """
    import gzip
    import zlib

    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        size = size_of(path)
        with gzip.open(path) as packed:
            content = packed.read(size)
            if packed.read(1):
                raise SettingError(f"{path} is damaged: it unpacks to more than the {size} bytes it claims")
        return content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SettingError(f"{path} is damaged: it cannot be unpacked ({error})") from error
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be looked into holds nothing for us
        return False
