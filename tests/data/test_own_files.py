"""Samples of the user's: folders of images, and data sets of Hugging Face."""

from __future__ import annotations

import sys
import types
from collections import UserList
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import fedpmt
from fedpmt.data.hugging_face import load_hugging_face
from fedpmt.data.images import load_folder
from fedpmt.data.registry import find_dataset
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

Image = pytest.importorskip("PIL.Image")


def write_images(folder: Path, *, mode: str = "RGB", count: int = 4) -> None:
    """Images of 5 x 4 pixels: those of cats are dark, those of dogs bright."""
    for part in ("train", "test"):
        for name, value in (("dog", 200), ("cat", 50)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new(
                    mode, (5, 4), value + number if mode == "L" else (value + number, 10, value)
                )
                image.save(folder / part / name / f"{number}.png")


def refused(folder: Path | str, *parts: str) -> None:
    with pytest.raises(SettingError) as caught:
        load_folder(str(folder))
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_a_folder_of_images(mode: str, channels: int, tmp_path: Path) -> None:
    write_images(tmp_path, mode=mode)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (inputs, targets), (tested, labels) = load_folder(str(tmp_path))
    assert inputs.shape == tested.shape == (8, channels, 4, 5)
    assert inputs.dtype == np.float32
    assert targets.tolist() == labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]  # cats come first
    assert inputs[:, 0].mean() == pytest.approx(0, abs=1e-5)
    assert inputs[:, 0].std() == pytest.approx(1, abs=1e-5)
    reds = [50, 51, 52, 53, 200, 201, 202, 203]
    assert inputs[:, 0, 2, 3] == pytest.approx((np.array(reds) - np.mean(reds)) / np.std(reds), abs=1e-4)
    if channels == 3:
        assert not inputs[:, 1].any()  # a channel that is everywhere the same


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path / "none", f"data = 'folder:{tmp_path / 'none'}'", "train and test")
    (tmp_path / "train").mkdir()
    refused(tmp_path, "must hold a folder of images for each class")
    (tmp_path / "train").rmdir()
    write_images(tmp_path)
    whole = (tmp_path / "test" / "dog" / "1.png").read_bytes()
    for damaged in (b"", b"no image", whole[:40], whole[:-30]):
        (tmp_path / "test" / "dog" / "1.png").write_bytes(damaged)
        refused(tmp_path, "test/dog/1.png cannot be read as an image")
    Image.new("RGB", (5, 5)).save(tmp_path / "test" / "dog" / "1.png")
    refused(tmp_path, "must have one size", "5 x 4 pixels", "test/dog/1.png 5 x 5")
    (tmp_path / "test" / "dog").rename(tmp_path / "test" / "wolf")
    refused(tmp_path, "test holds the class 'wolf'")
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused(tmp_path, "needs the package pillow; pip install 'fedpmt[images]'")


def test_a_run_on_a_folder_of_images(tmp_path: Path) -> None:
    write_images(tmp_path)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(60, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    )
    run = fedpmt.run(
        "fedavg",
        model=model,
        data=f"folder:{tmp_path}",
        devices=2,
        cohort=2,
        samples=4,
        batch=4,
        rounds=5,
        lr=0.5,
    )
    assert run.result is not None
    assert run.result.score == 1.0


def test_own_sets_need_a_model_and_a_name() -> None:
    with pytest.raises(SettingError, match="data = 'folder:cats' needs a model of your own"):
        fedpmt.run("fedavg", data="folder:cats")
    with pytest.raises(SettingError, match=r"'hf:' is unknown; did you mean 'hf:NAME'"):
        find_dataset("hf:")


class Rows(UserList[dict[str, Any]]):
    """As a data set of Hugging Face: a row by its number, a column by its name, and features."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.features = features

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self.data] if isinstance(key, str) else self.data[key]


def feature(kind: str, dtype: str | None = None) -> Any:
    return type(kind, (), {"dtype": dtype})()


def saved(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    """The package `datasets`, which has this data set and no other."""
    module = types.ModuleType("datasets")

    def load(name: str) -> object:
        if not name.endswith("known"):
            raise ConnectionError("could not\nbe reached")
        return found

    module.load_dataset = module.load_from_disk = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


NUMBERS = {"x": feature("List"), "y": feature("Value", "float32"), "label": feature("Value", "int64")}


def test_columns_of_numbers_and_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"x": [1, place], "y": 0.5, "label": place % 2} for place in range(4)]
    saved(monkeypatch, {"train": Rows(NUMBERS, rows), "validation": Rows(NUMBERS, rows[:1])})
    (tmp_path / "known").mkdir()
    for name in ("someone/known", str(tmp_path / "known")):
        (inputs, targets), (tested, labels) = load_hugging_face(name, None)
        assert {column: array.shape for column, array in inputs.items()} == {"x": (4, 2), "y": (4,)}
        assert len(tested["x"]) == len(labels) == 1
        assert targets.tolist() == [0, 1, 0, 1]
    features = {
        "img": feature("Image"),
        "kind": feature("ClassLabel", "int64"),
        "label": feature("Value", "int64"),
    }
    pictures = [{"img": Image.new("L", (3, 2), 80 * place), "kind": place, "label": 7} for place in range(2)]
    saved(monkeypatch, {"train": Rows(features, pictures), "test": Rows(features, pictures)})
    (inputs, targets), _ = load_hugging_face("known", None)
    assert inputs[:, 0, 1, 1].tolist() == [-1, 1]
    assert targets.tolist() == [0, 1]
    assert "data = 'hf:known': the columns label are not used" in caplog.text


def test_hugging_face_sets_that_cannot_be_used_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(says: str, name: str = "known") -> None:
        with pytest.raises(SettingError, match=f"^data = 'hf:{name}' .*{says}") as caught:
            load_hugging_face(name, tmp_path)
        assert "\n" not in str(caught.value)

    monkeypatch.setitem(sys.modules, "datasets", None)
    refuse("needs the package datasets")
    rows = Rows(NUMBERS, [{"x": [1], "y": 0.5, "label": 0}])
    saved(monkeypatch, rows)
    refuse("it has no splits")
    refuse("cannot be loaded .could not be reached", "other")
    saved(monkeypatch, {"train": rows, "dev": rows})
    refuse("splits train and test .it has train, dev")
    unlabelled = Rows({"x": feature("List")}, [{"x": [1]}])
    saved(monkeypatch, {"train": unlabelled, "test": unlabelled})
    refuse("one column of targets: .* .its columns are x")
    texts = {
        "a": feature("Value", "string"),
        "b": feature("Value", "string"),
        "label": feature("Value", "int64"),
    }
    both = Rows(texts, [{"a": "x", "b": "y", "label": 0}])
    saved(monkeypatch, {"train": both, "test": both})
    refuse("one column of images or of texts, .* .its other columns are a, b")
    del texts["b"]
    saved(monkeypatch, {"train": Rows(texts, both.data), "test": Rows(texts, both.data)})
    refuse("needs the tokenizer of MiniLM")
