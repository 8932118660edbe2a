"""Folders that cannot be continued: refused in one line, and left as they are."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from killed_runs import interrupted, refused, run, tree

from fedpmt import api
from fedpmt.simulation.checkpoint import DIGEST, DeviceStore, write_value
from fedpmt.simulation.runner import Totals, exclusive, open_folder

if TYPE_CHECKING:
    from pathlib import Path


FLAGS = ("--devices", "10", "--samples", "20", "--cohort", "5", "--rounds", "6", "--batch", "10")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after three rounds."""
    out = tmp_path_factory.mktemp("original") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert interrupted(patch, 3, *FLAGS, "--out", out).code == 130
    return out


@pytest.fixture
def broken_off(original: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(original, tmp_path / "run")


def test_it_could_have_been_continued(broken_off: Path) -> None:
    """The folder that the next tests damage is sound."""
    assert run(*FLAGS, "--resume", "--out", broken_off).code == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seed", "4"), "its seed is '0', not '4'"),
        (("--rounds", "5"), "rounds must be >= 6, those of the run in"),
        (("--lr", "0.5"), "its lr is '0.05', not '0.5'"),
        (("--method", "fedavg"), "its method is 'fedpmt', not 'fedavg'"),
        (("--set", "weight=uniform"), "its options is '{}'"),
        (("--partition", "classes:2"), "its partition is 'iid', not 'classes:2'"),
        (("--deadline", "30"), "its deadline is 'None', not '30.0'"),
    ],
)
def test_a_run_of_another_configuration(flags: tuple[str, ...], words: str, broken_off: Path) -> None:
    """The first setting that differs is named."""
    before = tree(broken_off)
    assert words in refused(*FLAGS, *flags, "--resume", "--out", broken_off)
    assert tree(broken_off) == before


def test_a_run_is_not_begun_over_another(broken_off: Path) -> None:
    """Without --resume a folder that holds a run is refused, with the way out."""
    before = tree(broken_off)
    line = refused(*FLAGS, "--out", broken_off)
    assert "already holds a run" in line
    assert "--resume" in line
    assert tree(broken_off) == before


def test_a_folder_in_use(broken_off: Path) -> None:
    """One process at a time; the other one leaves everything as it is."""
    before = tree(broken_off)
    with exclusive(broken_off):
        assert "in use by another process" in refused(*FLAGS, "--resume", "--out", broken_off)
    assert tree(broken_off) == before
    assert run(*FLAGS, "--resume", "--out", broken_off).code == 0


def test_the_loser_of_a_race_does_not_remove_the_winners_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes begin the same run; the one that made the folder may find it taken by the other."""
    from fedpmt import api

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        held = []

        def overtaken(*arguments: object, **keywords: object) -> bool:
            made = open_folder(*arguments, **keywords)  # type: ignore[arg-type]
            held.append(exclusive(out))
            held[0].__enter__()
            return made

        patch.setattr(api, "open_folder", overtaken)
        assert "in use" in refused(*FLAGS, "--out", out)
        assert (out / "config.json").exists()
        held[0].__exit__(None, None, None)
    assert run(*FLAGS, "--resume", "--out", out).code == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"{}",
        b'{"settings": 3}',
        b'{"settings": []}',
        b"\xff\xfe\x00",
        b'{"settings": {"options": 3, "nope": 1}}',
        b'{"settings": {"nope": 1}}',
        b'{"settings": {"rounds": -1}}',
        b'{"settings": {"method": 3}}',
    ],
)
@pytest.mark.parametrize("flags", [FLAGS, ()], ids=["flags", "bare"])
def test_a_damaged_configuration(content: bytes, flags: tuple[str, ...], broken_off: Path) -> None:
    """A config.json that is no run's is refused, whatever flags come with it."""
    (broken_off / "config.json").write_bytes(content)
    before = tree(broken_off)
    refused(*flags, "--resume", "--out", broken_off)
    assert tree(broken_off) == before


def test_a_configuration_cut_short_names_the_file(broken_off: Path) -> None:
    """The line says which file to look at."""
    path = broken_off / "config.json"
    path.write_bytes(path.read_bytes()[:100])
    assert f"{path} is not a run's configuration" in refused("--resume", "--out", broken_off)


def swapped(content: bytes) -> bytes:
    """Two different bytes of the weights change places: the file stays a sound safetensors file."""
    middle = (8 + int.from_bytes(content[:8], "little") + len(content)) // 2
    other = next(place for place in range(middle, len(content)) if content[place] != content[middle])
    changed = bytearray(content)
    changed[middle], changed[other] = changed[other], changed[middle]
    return bytes(changed)


@pytest.mark.parametrize("damage", ["empty", "half", "longer", "flipped", "no checksum"])
def test_a_damaged_checkpoint(damage: str, broken_off: Path) -> None:
    """The file is named, with the way out; nothing is computed from a wrong state."""
    path = broken_off / "checkpoint.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "half": content[: len(content) // 2],
            "longer": content + b"0",
            "flipped": swapped(content),
            "no checksum": content[:-DIGEST],
        }[damage]
    )
    assert path.read_bytes() != content
    before = tree(broken_off)
    line = refused(*FLAGS, "--resume", "--out", broken_off)
    assert f"{path} is damaged: its checksum does not match; delete it to start the run again" in line
    assert tree(broken_off) == before


def test_a_damaged_checkpoint_can_be_deleted(broken_off: Path, tmp_path: Path) -> None:
    """The line says so: the run then starts again, to the same bits."""
    whole = tmp_path / "whole"
    assert run(*FLAGS, "--out", whole).code == 0
    (broken_off / "checkpoint.safetensors").unlink()
    assert run(*FLAGS, "--resume", "--out", broken_off).code == 0
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (broken_off / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("damage", ["text", "json", "metadata", "state"])
def test_a_checkpoint_of_another_form(damage: str, broken_off: Path) -> None:
    """A checksum that agrees does not make a file a checkpoint of this program."""
    path = broken_off / "checkpoint.safetensors"
    content = path.read_bytes()[:-DIGEST]
    header = b'{"__metadata__": []}'
    changed = {
        "text": b"not a checkpoint at all, but long enough for a header",
        "json": len(header).to_bytes(8, "little") + header,
        "metadata": content.replace(b"records_length", b"records_lenght", 1),
        "state": content.replace(b"fedpmt.simulation.runner", b"fedpmt.simulation.runnex", 1),
    }[damage]
    assert changed != content
    path.write_bytes(changed + hashlib.sha256(changed).digest())
    before = tree(broken_off)
    assert str(path) in refused(*FLAGS, "--resume", "--out", broken_off)
    assert tree(broken_off) == before


def test_a_checkpoint_of_something_else(broken_off: Path) -> None:
    """A file in the right form with the wrong thing in it."""
    path = broken_off / "checkpoint.safetensors"
    write_value(path, Totals())
    assert f"{path} is not a checkpoint" in refused(*FLAGS, "--resume", "--out", broken_off)


@pytest.mark.parametrize("damage", ["gone", "shorter", "garbled", "other"])
def test_records_that_are_not_the_checkpoints(damage: str, broken_off: Path) -> None:
    """Rounds that the checkpoint counts on must be there: they cannot be made up."""
    path = broken_off / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {
                "shorter": b"".join(lines[:2]),
                "garbled": lines[0] + b"x" * (len(lines[1]) - 1) + b"\n" + lines[2],
                "other": lines[0] + lines[0] + b"".join(lines[1:]),
            }[damage]
        )
    before = tree(broken_off)
    assert str(path) in refused(*FLAGS, "--resume", "--out", broken_off)
    assert tree(broken_off) == before


@pytest.mark.parametrize("name", ["result.json", "rounds.jsonl"])
def test_a_finished_run_with_damaged_records(name: str, tmp_path: Path) -> None:
    """What cannot be read is not printed."""
    out = tmp_path / "run"
    assert run(*FLAGS, "--rounds", "1", "--out", out).code == 0
    (out / name).write_bytes(b'{"round": "one"}\n')
    before = tree(out)
    assert name in refused("--resume", "--out", out)
    assert tree(out) == before


def test_what_turns_out_to_be_impossible_takes_only_a_new_folder_away(
    broken_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose data has gone missing since is refused, but its records stay."""
    from fedpmt import api
    from fedpmt.types import SettingError

    def gone(*_: object) -> None:
        raise SettingError("data = 'embedded' is gone")

    before = tree(broken_off)
    with monkeypatch.context() as patch:
        patch.setattr(api, "paper_problem_of", gone)
        assert "is gone" in refused(*FLAGS, "--resume", "--out", broken_off)
        assert "is gone" in refused(*FLAGS, "--out", broken_off.with_name("new"))
    assert tree(broken_off) == before
    assert not broken_off.with_name("new").exists()


def test_the_configuration_is_as_it_was_resolved(broken_off: Path) -> None:
    """Flags and defaults, all of them, under the form's number."""
    config = json.loads((broken_off / "config.json").read_bytes())
    assert config["format"] == 1
    assert (config["settings"]["rounds"], config["settings"]["lr"]) == (6, 0.05)


def test_half_written_files_are_removed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rounds": 1,
        "devices": 5,
        "samples": 10,
        "cohort": 5,
        "out": tmp_path / "run",
    }
    api.run("fedavg", **settings)
    folder = tmp_path / "run"
    (folder / "result.json").unlink()
    left = [
        folder / ".checkpoint.safetensors.abc",
        folder / ".model.safetensors.abc",
        folder / ".result.json.abc",
    ]
    for path in left:
        path.write_bytes(b"half")
    assert api.run("fedavg", resume=True, **settings).result is not None
    assert not any(path.exists() for path in left)


def test_half_written_device_states_are_removed(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path)
    store.write(3, 0, {"bias": torch.ones(2)})
    store.write(3, 1, {"bias": torch.zeros(2)})
    left = next(tmp_path.glob("*")) / ".3-1.safetensors.abc"
    left.write_bytes(b"half")
    DeviceStore(tmp_path).recover({3: 0})
    assert [path.name for path in tmp_path.glob("*/*")] == ["3-0.safetensors"]
    assert DeviceStore(tmp_path).read(3, 0)["bias"].tolist() == [1, 1]
