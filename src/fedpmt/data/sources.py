"""Get data sets, and say which are there.

A set appears in its folder in one step, complete and checked: it is unpacked beside its place and then
renamed. What a kill leaves behind is a hidden folder that nothing reads and that the next call removes.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedpmt.data.fetching import Tools, UnusableError, open_address, run
from fedpmt.data.folders import data_folder, find, find_other_form, home, size_of, stored
from fedpmt.data.registry import DATASETS
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.data.description import DataFile, Dataset
    from fedpmt.data.fetching import Opener, Progress, Runner, Source

_FAILURES = (
    OSError,
    EOFError,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    http.client.HTTPException,
    subprocess.SubprocessError,
    UnusableError,
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PART = ".part"


class Status(NamedTuple):
    """One line of `fedpmt data list`."""

    name: str
    state: str  # built in, present, absent or damaged
    where: str


def get(
    name: str,
    data_dir: Path | None,
    progress: Progress,
    *,
    runner: Runner = run,
    opener: Opener = open_address,
) -> Path:
    """Fetch a data set unless it is there and sound.

    Args:
        name: One of the data sets that have files.
        data_dir: Folder of the data files; None: that of FEDPMT_DATA, else the user's cache.
        progress: Called with what is being done, the bytes done and the bytes in all.
        runner: Runs a command.
        opener: Opens an address on the web.

    Returns:
        The folder that holds the data set's files.
    """
    if name not in DATASETS:
        raise SettingError.unknown("data", name, DATASETS)
    dataset = DATASETS[name]
    if dataset.built_in:
        raise SettingError(f"data = '{name}' needs no fetching: {dataset.built_in}")
    folder = data_folder(data_dir)
    place = find(dataset, folder)
    if place is not None and all(is_sound(place, file, progress) for file in dataset.files):
        return place
    target = home(dataset, folder)
    fetch(f"data = '{name}'", dataset.files, dataset.sources, target, Tools(runner, opener, progress))
    return target


def fetch(
    label: str, files: Sequence[DataFile], sources: Sequence[Source], target: Path, tools: Tools
) -> None:
    """Put files into a folder in one step, complete and checked, from the first source that has them.

    Args:
        label: What is fetched, for messages, e.g. "data = 'mnist'".
        files: The files with their sizes and checksums.
        sources: Where to get them, tried in this order.
        target: The folder to put them in.
        tools: What the sources may use.

    Raises:
        SettingError: No source has the files, or the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.name, target.parent)
        part = Path(
            tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-{os.getpid()}-", suffix=_PART)
        )
    except OSError as error:
        raise SettingError(f"data-dir = '{target.parent}' cannot be written: {error.strerror}") from error
    try:
        _try_sources(label, files, sources, part, target, tools)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _try_sources(
    label: str, files: Sequence[DataFile], sources: Sequence[Source], part: Path, target: Path, tools: Tools
) -> None:
    failures = []
    for number, source in enumerate(sources):
        ready, scratch = part / f"ready-{number}", part / f"scratch-{number}"
        try:
            ready.mkdir()
            scratch.mkdir()
            source.fetch(files, ready, scratch, tools)
            return _put(ready, target)
        except _FAILURES as error:
            if isinstance(error, OSError) and error.errno in _FULL:  # no other source would help
                raise SettingError(
                    f"data-dir = '{target.parent}' cannot be written: {error.strerror}"
                ) from error
            failures.append(f"{source.label} ({_reason(error)})")
    raise SettingError(f"{label} cannot be fetched; tried {'; '.join(failures)}")


def _put(ready: Path, target: Path) -> None:
    if not target.exists():
        ready.rename(target)
        return
    # A damaged set is mended file by file: the folder may hold other things that are not ours to remove.
    for path in ready.iterdir():
        path.replace(target / path.name)


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is not installed"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        telling = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
        return " ".join(telling.split())[:120] or f"exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return "no answer in time"
    cause = getattr(error, "reason", None)
    return " ".join(str(cause or error).split())[:120] or type(error).__name__


def _remove_leftovers(name: str, folder: Path) -> None:
    for path in folder.glob(f".{name}-*{_PART}"):
        owner = path.name.removeprefix(f".{name}-").split("-")[0]
        # Another process may be fetching the same set right now: its folder stays.
        if not (owner.isdigit() and _alive(int(owner))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    if os.name != "posix":
        return False  # signal 0 would not be a question there
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def is_sound(place: Path, file: DataFile, progress: Progress) -> bool:
    """Compare a file with its size and checksum."""
    path = stored(place, file.name)
    if path is None or size_of(path) != file.size:
        return False
    digest, done = hashlib.sha256(), 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as content:
            # One byte more than there should be is enough to tell; a packed file may hold any number of them.
            while chunk := content.read(min(1 << 20, file.size + 1 - done)):
                digest.update(chunk)
                done += len(chunk)
                progress(f"check {file.name}", done, file.size)
    except (OSError, EOFError, zlib.error):
        return False
    return digest.hexdigest() == file.sha256


def status(data_dir: Path | None) -> list[Status]:
    """Which sets are there, judged by the presence and size of their files."""
    folder = data_folder(data_dir)
    return [_status(dataset, folder) for dataset in DATASETS.values()]


def _status(dataset: Dataset, folder: Path) -> Status:
    if dataset.built_in:
        return Status(dataset.name, "built in", dataset.built_in)
    place = find(dataset, folder)
    if place is not None:
        paths = [(stored(place, file.name), file.size) for file in dataset.files]
        whole = all(path is not None and size_of(path) == size for path, size in paths)
        return Status(dataset.name, "present" if whole else "damaged", str(place))
    place = find_other_form(dataset, folder)
    if place is not None and dataset.other_form is not None:
        whole = all((place / name).is_file() for name in dataset.other_form.names)
        return Status(dataset.name, "present" if whole else "damaged", str(place))
    return Status(dataset.name, "absent", str(home(dataset, folder)))
