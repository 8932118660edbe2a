"""Kept runs in archives: the same bytes, nothing damaged goes unnoticed, runs can be added, old names renamed."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedpmt import api
from fedpmt.settings import resolve
from fedpmt.types import SettingError
from reproduction import archive
from reproduction.__main__ import program
from reproduction.archive import RUN_SUFFIX, thin
from reproduction.library import Library, migrate_archives, name_of

if TYPE_CHECKING:
    from fedpmt.settings import Settings

RECORDS = Path(__file__).parents[2] / "docs" / "results" / "records"
TINY: dict[str, Any] = {"devices": 8, "samples": 12, "cohort": 4, "levels": "1/4,1/3,1/2,1", "rounds": 2}
MEMBERS = {"b.json": b"[2]", "a.json": b"[1]"}


def settings(**more: Any) -> Settings:
    return resolve({**TINY, "assign": "level", "mode": "paper", "depths": 4, **more})


def keep(folder: Path, *wanted: Settings) -> None:
    """Finished runs as single files, as `Library.play` leaves them."""
    for one in wanted:
        run = api.start(api.request_of(one), folder / "runs" / name_of(one))
        kept = thin(run.model_copy(update={"settings": one.identity()}))
        (folder / f"{name_of(one)}{RUN_SUFFIX}").write_bytes(kept)


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.tar.xz", tmp_path / "second.tar.xz"
    archive.write(first, MEMBERS)
    archive.write(second, dict(reversed(MEMBERS.items())))
    assert first.read_bytes() == second.read_bytes()
    assert archive.names(first) == ["a.json", "b.json"]
    assert archive.read(first) == MEMBERS
    # The manifest comes first, in sha256sum's format, for whoever has no Python at hand.
    plain = lzma.decompress(first.read_bytes())
    assert plain.startswith(archive.MANIFEST.encode())
    assert plain[512:].startswith(f"{hashlib.sha256(b'[1]').hexdigest()}  a.json\n".encode())


def replaced(old: bytes, new: bytes) -> Any:
    """Something else of the same length, in an archive whose own checksums are right."""
    return lambda data: lzma.compress(lzma.decompress(data).replace(old, new))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "is not an archive"),
        (lambda data: b"hello", "is not an archive"),
        (lambda data: data[:-40], "is not an archive"),
        (lambda data: data[:80] + bytes([data[80] ^ 1]) + data[81:], "is not an archive"),
        (replaced(b"[1]", b"[3]"), "a.json has another hash"),
        (replaced(b"  a.json", b"  c.json"), "a.json is listed but missing, or not listed"),
    ],
)
def test_damage_is_refused_in_one_line(change: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "page.tar.xz"
    archive.write(path, MEMBERS)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SettingError, match=f"page.tar.xz.*{said}.*git checkout"):
        archive.read(path)


def test_runs_are_packed_found_and_added_to(tmp_path: Path) -> None:
    first, second, other = settings(), settings(seed=1), settings(seed=2)
    keep(tmp_path, first, other)
    library = Library(tmp_path, tmp_path / "work")
    assert library.missing([first, second, other]) == [second]
    before = library.find(first)
    place = library.pack("page", [first, second])
    assert place == tmp_path / "page.tar.xz"
    # Another page's run stays a single file until that page is packed.
    assert [path.name for path in tmp_path.glob(f"*{RUN_SUFFIX}")] == [f"{name_of(other)}{RUN_SUFFIX}"]
    assert library.find(first) == before is not None
    assert library.missing([first, second, other]) == [second]
    assert library.pack("page", [first, second]) is None
    keep(tmp_path, second)
    library.pack("page", [first, second])
    assert archive.names(place) == sorted(f"{name_of(one)}{RUN_SUFFIX}" for one in (first, second))
    assert Library(tmp_path, tmp_path / "work").find(second) == library.find(second) is not None
    # A damaged archive is neither read nor written over.
    damaged = place.read_bytes()[:-8]
    place.write_bytes(damaged)
    with pytest.raises(SettingError, match="is not an archive"):
        Library(tmp_path, tmp_path / "work").find(first)
    with pytest.raises(SettingError, match="is not an archive"):
        library.pack("page", [other])
    assert place.read_bytes() == damaged


def test_records_of_an_older_version_get_new_names_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = settings()
    keep(tmp_path, now)
    place = Library(tmp_path, tmp_path / "work").pack("page", [now])
    assert place is not None
    old = json.loads(archive.read(place)[f"{name_of(now)}{RUN_SUFFIX}"])
    old["settings"]["widths"] = old["settings"].pop("depths")
    old["devices"]["part"] = [
        [label.replace("depth", "width") for label in labels] for labels in old["devices"]["part"]
    ]
    archive.write(place, {"old-name.json": json.dumps(old).encode()})
    assert Library(tmp_path, tmp_path / "work").missing([now]) == [now]
    assert program(["migrate", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"{place}\n"
    found = Library(tmp_path, tmp_path / "work").find(now)
    assert found is not None
    assert {device.part for device in found.rounds[0].devices} <= {f"depth {depth}" for depth in range(1, 5)}
    assert found.settings["depths"] == 4
    assert migrate_archives(tmp_path) == []


def test_the_archives_of_the_pages_are_whole() -> None:
    paths = sorted(RECORDS.iterdir())
    assert len(paths) > 6
    for path in paths:
        assert archive.names(path) == sorted(archive.read(path))
