"""The kept runs of one results page as one file, checked against a list of hashes.

    accuracy.tar.xz
        MANIFEST.sha256     a line per run, as `sha256sum` writes them
        NAME.json           one run, small: what figures, tables and another clock need, by column (`thin`)

The same runs give the same bytes, on any day and for any user. An archive can also be opened without this code:
`tar xf accuracy.tar.xz && sha256sum -c MANIFEST.sha256`.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedpmt.records import DeviceRecord, ResultRecord, RoundRecord, RunRecord, migrate, write_atomically
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


SUFFIX = ".tar.xz"
MANIFEST = "MANIFEST.sha256"
UNREADABLE = (OSError, EOFError, ValueError, lzma.LZMAError, tarfile.TarError)


def write(path: Path, members: Mapping[str, bytes]) -> None:
    """Write an archive in one step; a reader sees the old one or the new one."""
    buffer = io.BytesIO()
    # One stream for all runs: they are alike, so that they take a third of what each would take by itself.
    with (
        lzma.open(buffer, "wb", preset=9) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        # The manifest comes first, so that `names` need not unpack the rest.
        for name, data in [(MANIFEST, _manifest(members)), *sorted(members.items())]:
            entry = tarfile.TarInfo(name)  # of no time and no user: both would change the bytes
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    write_atomically(path, buffer.getvalue())


def names(path: Path) -> list[str]:
    """List the members of an archive by its manifest, without unpacking or checking them."""
    try:
        with lzma.open(path) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            entry = tar.next()
            file = tar.extractfile(entry) if entry is not None and entry.name == MANIFEST else None
            if file is None:
                raise ValueError(f"it does not begin with {MANIFEST}")
            return list(_hashes(file.read()))
    except UNREADABLE as error:
        raise _refused(path, error) from error


def read(path: Path) -> dict[str, bytes]:
    """Read all members of an archive, and check each against the manifest.

    Raises:
        SettingError: The file is damaged, or what it holds is not what the manifest lists.
    """
    try:
        # All of it, and not only what the tar reader asks for: xz's own checks come last.
        plain = io.BytesIO(lzma.decompress(path.read_bytes()))
        with tarfile.open(fileobj=plain, mode="r:") as tar:
            members = {
                entry.name: file.read() for entry in tar if (file := tar.extractfile(entry)) is not None
            }
        wanted = _hashes(members.pop(MANIFEST, b""))
    except UNREADABLE as error:
        raise _refused(path, error) from error
    apart = sorted(wanted.keys() ^ members.keys())
    wrong = apart or [name for name, data in members.items() if _hash(data) != wanted[name]]
    if wrong:
        what = "is listed but missing, or not listed" if apart else "has another hash than its manifest says"
        raise SettingError(f"{path} is damaged: {wrong[0]} {what}; restore it, e.g. with `git checkout`")
    return members


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest(members: Mapping[str, bytes]) -> bytes:
    return "".join(f"{_hash(data)}  {name}\n" for name, data in sorted(members.items())).encode()


def _hashes(manifest: bytes) -> dict[str, str]:
    """Name and hash of each line; ValueError where a line is something else."""
    lines = [line.split("  ", 1) for line in manifest.decode().splitlines()]
    return {name: value for value, name in lines}


def _refused(path: Path, error: BaseException) -> SettingError:
    return SettingError(
        f"{path} is not an archive of kept runs ({error}); restore it, e.g. with `git checkout`"
    )


RUN_SUFFIX = ".json"
LEFT_OUT = frozenset({"devices", "score_by_level", "score_by_class"})
"""Of every round but the last one that was evaluated; devices are kept by column."""


def thin(run: RunRecord) -> bytes:
    """A finished run as the bytes of its kept record."""
    if run.result is None:
        raise SettingError(f"'{run.folder}' is not finished")
    rounds = [one.model_dump(mode="json") for one in run.rounds]
    devices = [one.pop("devices") for one in rounds]
    last: dict[str, Any] = next((one for one in reversed(rounds) if one["score"] is not None), {})
    kept = {
        "settings": run.settings,
        "result": {**run.result.model_dump(mode="json"), "run": ""},
        "rounds": _columns(rounds, set(RoundRecord.model_fields) - LEFT_OUT),
        "devices": _columns(
            [_columns(members, set(DeviceRecord.model_fields)) for members in devices],
            set(DeviceRecord.model_fields),
        ),
        "last": {key: last[key] for key in LEFT_OUT if key in last},
    }
    return to_bytes(kept)


def to_bytes(kept: dict[str, Any]) -> bytes:
    """The JSON of a kept record."""
    return json.dumps(kept, separators=(",", ":")).encode()


def thick(data: bytes, path: Path) -> RunRecord:
    """Read a kept record back; `path` says where it is from."""
    try:
        kept = json.loads(data)
        devices = [_rows(members) for members in _rows(kept["devices"])]
        rounds = [
            RoundRecord.model_validate({**one, "devices": members})
            for one, members in zip(_rows(kept["rounds"]), devices, strict=True)
        ]
        for place in range(len(rounds) - 1, -1, -1):
            if rounds[place].score is not None:
                rounds[place] = rounds[place].model_copy(update=migrate(kept["last"]))
                break
        result = ResultRecord.model_validate(kept["result"])
        return RunRecord(
            folder=path.parent / path.name.removesuffix(RUN_SUFFIX),
            settings=kept["settings"],
            rounds=tuple(rounds),
            result=result,
        )
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise SettingError(f"{path} is not a run's record ({error})") from error


def _columns(rows: list[dict[str, Any]], names: set[str]) -> dict[str, list[Any]]:
    """Lists of equal things compress well.

    >>> _columns([{"a": 1, "b": 2}, {"a": 1, "b": 3}], {"a"})
    {'a': [1, 1]}
    """
    return {name: [row[name] for row in rows] for name in sorted(names)}


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
