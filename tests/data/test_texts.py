"""Data sets of texts, as tokens that are made once."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fedpmt.data import DATASETS, federate, load
from fedpmt.data.description import DataFile
from fedpmt.own import load_example
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_files")

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "good", "bad", "film", "again", "gold", ".", "coffee", "rose"]
REVIEWS = ["bad", "good bad", "bad film", "bad bad", "film good", "good", "good film", "good good"]
ITEMS = [
    {"id": "1", "title": "gold", "body": "rose\n again", "topics": ["earn"]},
    {"id": "14818", "title": "coffee", "body": "rose", "topics": ["coffee"]},
    {"id": "2", "title": "gold", "body": "rose", "topics": ["coffee", "earn"]},  # two topics
    {"id": "3", "title": "gold", "body": "rose", "topics": ["cocoa"]},  # none of the ten
    {"id": "4", "title": "gold", "topics": ["earn"]},  # no text
    {"id": "14819", "title": "good", "body": "rose", "topics": ["acq"]},
    {"id": "14820", "title": "gold", "body": "rose again", "topics": ["earn"]},  # trained on
]
IDS = {word: place for place, word in enumerate(WORDS)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small sets of texts and a tokenizer that knows a dozen words."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordPiece(IDS, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    (tmp_path / "models" / "minilm").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "models" / "minilm" / "tokenizer.json"))
    contents = {
        "imdb": json.dumps([{"t": text, "s": place // 4} for place, text in enumerate(REVIEWS)]),
        "reuters": "\n".join(json.dumps(item) for item in ITEMS),
    }
    for name, content in contents.items():
        (file,) = DATASETS[name].files
        (tmp_path / name).mkdir()
        (tmp_path / name / file.name).write_text(content)
        made = DataFile(file.name, len(content), hashlib.sha256(content.encode()).hexdigest())
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], files=(made,)))
    return tmp_path


def words(ids: np.ndarray) -> list[str]:
    return [" ".join(WORDS[token] for token in row if token) for row in ids]


def refused(name: str, folder: Path, *parts: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(SettingError) as caught:
        load(name, folder)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    assert sorted(folder.rglob("*")) == before


def test_reviews_keep_the_original_split(folder: Path) -> None:
    """The file holds two to test and two to train on against films, then as many for them."""
    data = load("imdb", folder)
    assert isinstance(data.train.inputs, dict)
    ids, mask = (data.train.inputs[name] for name in ("input_ids", "attention_mask"))
    assert ids.shape == mask.shape == (4, 128)
    assert ids.dtype == mask.dtype == np.int64
    assert words(ids) == [f"[CLS] {text} [SEP]" for text in ("bad film", "bad bad", "good film", "good good")]
    assert np.array_equal(mask, ids != 0)
    assert data.train.targets.tolist() == [0, 0, 1, 1]
    assert words(data.test.inputs["input_ids"]) == [
        f"[CLS] {text} [SEP]" for text in ("bad", "good bad", "film good", "good")
    ]
    assert data.test.targets.tolist() == [0, 0, 1, 1]


def test_a_review_to_train_on_is_not_tested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps([{"t": text} for text in ["bad film", *REVIEWS[1:]]])
    (folder / "imdb" / "reviews.json").write_text(content)
    made = DataFile("reviews.json", len(content), hashlib.sha256(content.encode()).hexdigest())
    monkeypatch.setitem(DATASETS, "imdb", replace(DATASETS["imdb"], files=(made,)))
    data = load("imdb", folder)
    assert words(data.test.inputs["input_ids"])[0] == "[CLS] good bad [SEP]"
    assert data.test.targets.tolist() == [0, 1, 1]


def test_news_have_one_topic_and_are_split_by_number(folder: Path) -> None:
    data = load("reuters", folder)
    assert words(data.train.inputs["input_ids"]) == [
        "[CLS] gold . rose again [SEP]",
        "[CLS] coffee . rose [SEP]",
    ]
    assert data.train.targets.tolist() == [0, 8]
    assert words(data.test.inputs["input_ids"]) == ["[CLS] good . rose [SEP]"]
    assert data.test.targets.tolist() == [1]
    assert data.classes == 10


def test_tokens_are_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read without the package; those that are damaged or of another tokenizer are made again."""
    first = load("imdb", folder)
    (kept,) = (folder / "imdb").glob("*.npz")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    again = load("imdb", folder)
    assert np.array_equal(first.train.inputs["input_ids"], again.train.inputs["input_ids"])
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-30], whole[:300] + bytes([whole[300] ^ 1]) + whole[301:]):
        kept.write_bytes(damaged)
        refused("imdb", folder, "needs the package tokenizers; pip install 'fedpmt[text]'")
    monkeypatch.undo()


def test_damaged_tokens_are_made_again(folder: Path) -> None:
    first = load("imdb", folder)
    (kept,) = (folder / "imdb").glob("*.npz")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-30])
    again = load("imdb", folder)
    assert np.array_equal(first.test.inputs["input_ids"], again.test.inputs["input_ids"])
    assert kept.read_bytes() == whole
    rules = folder / "models" / "minilm" / "tokenizer.json"
    rules.write_text(rules.read_text().replace('"good"', '"fair"'))
    assert "[UNK]" in words(load("imdb", folder).train.inputs["input_ids"])[2]


def test_what_is_missing_or_damaged_is_refused(folder: Path) -> None:
    path = folder / "imdb" / "reviews.json"
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    refused("imdb", folder, "reviews.json is damaged", "checksum", "`fedpmt data get imdb`")
    path.write_bytes(content)
    rules = folder / "models" / "minilm" / "tokenizer.json"
    rules.write_text("{}")
    refused("imdb", folder, "tokenizer is damaged")
    rules.unlink()
    refused("imdb", folder, "needs the tokenizer of MiniLM", "`fedpmt model get minilm`")


def test_examples_for_pricing_are_tokens() -> None:
    tokens = load_example("shakespeare")
    assert (tokens.shape, tokens.dtype) == ((2, 80), np.int64)
    inputs = load_example("imdb")
    assert {name: array.shape for name, array in inputs.items()} == {
        "input_ids": (2, 128),
        "attention_mask": (2, 128),
    }
    assert load_example("hapt").dtype == np.float32


def test_a_net_for_images_refuses_tokens(folder: Path) -> None:
    with pytest.raises(
        SettingError, match="inputs of input_ids and attention_mask, but 1 x 28 x 28 are needed"
    ):
        federate(
            "imdb",
            partition="iid",
            partition_seed=0,
            devices=2,
            samples=2,
            data_dir=folder,
            input_shape=(1, 28, 28),
        )
