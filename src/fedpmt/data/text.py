"""Texts become the tokens of MiniLM. They are made once and kept next to the data set's files."""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedpmt.data.datasets import LoadedDataset
from fedpmt.data.folders import locate, read_content
from fedpmt.records import write_atomically
from fedpmt.types import Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fedpmt.data.description import Dataset

_TOKENIZER = ("models", "minilm", "tokenizer.json")


class Texts(NamedTuple):
    """Texts to train and to test on, each with its class."""

    train: Sequence[str]
    train_labels: Sequence[int]
    test: Sequence[str]
    test_labels: Sequence[int]


def load_tokens(dataset: Dataset, folder: Path, read: Callable[[list[bytes]], Texts]) -> LoadedDataset:
    """Load a data set of texts as tokens; all texts have the same length, cut or padded.

    Args:
        dataset: The description of the data set; the length is that of its inputs.
        folder: The data folder; MiniLM's tokenizer is looked for in it.
        read: Takes the contents of the data set's files, in order and of the right checksum; returns its texts.

    Raises:
        SettingError: Files are missing or damaged, or tokens must be made and `tokenizers` is not installed.
    """
    paths = locate(dataset, folder)
    contents = [_checked(path, dataset, place) for place, path in enumerate(paths)]
    label = f"data = '{dataset.name}'"
    rules = read_tokenizer(label, folder)
    source = hashlib.sha256(b"".join([*contents, rules, str(dataset.shape).encode()])).hexdigest()
    kept = paths[0].parent / f"tokens-{source[:16]}.npz"
    arrays = _read_kept(kept)
    if arrays is None:
        texts = read(contents)
        length = dataset.shape[0]
        arrays = {
            "train": encode(texts.train, length, rules, label),
            "train_labels": np.array(texts.train_labels, np.int64),
            "test": encode(texts.test, length, rules, label),
            "test_labels": np.array(texts.test_labels, np.int64),
        }
        _keep(kept, arrays)
    return LoadedDataset(
        dataset.name,
        _examples(arrays["train"], arrays["train_labels"]),
        _examples(arrays["test"], arrays["test_labels"]),
        dataset.classes,
    )


def _checked(path: Path, dataset: Dataset, place: int) -> bytes:
    content = read_content(path)
    if hashlib.sha256(content).hexdigest() != dataset.files[place].sha256:
        raise SettingError(
            f"{path} is damaged: it has a wrong checksum; run `fedpmt data get {dataset.name}`"
        )
    return content


def read_tokenizer(label: str, folder: Path) -> bytes:
    """Read the content of MiniLM's `tokenizer.json`, which comes with its weights.

    Raises:
        SettingError: It is not in the data folder; `label` says what needs it.
    """
    path = folder.joinpath(*_TOKENIZER)
    if not path.is_file():
        raise SettingError(f"{label} needs the tokenizer of MiniLM, {path}; run `fedpmt model get minilm`")
    return read_content(path)


def encode(texts: Sequence[str], length: int, rules: bytes, label: str) -> np.ndarray:
    """Split texts into tokens, cut or padded with zeros to a length.

    Args:
        texts: The texts.
        length: How many tokens each text gets.
        rules: The content of a `tokenizer.json`.
        label: What the texts are, for messages, e.g. "data = 'imdb'".

    Returns:
        An array of shape (texts, length), in two bytes each.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise SettingError(f"{label} needs the package tokenizers; pip install 'fedpmt[text]'") from error
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_str(rules.decode())
    except Exception as error:  # tokenizers raises plain exceptions
        raise SettingError(f"{label}: the tokenizer is damaged ({' '.join(str(error).split())})") from error
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    tokens = np.zeros((len(texts), length), np.uint16)
    for start in range(0, len(texts), 1_000):
        found = tokenizer.encode_batch(list(texts[start : start + 1_000]))
        tokens[start : start + 1_000] = [one.ids for one in found]
    return tokens


def inputs_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Make MiniLM's inputs; a token of 0 is padding and is not attended to.

    >>> inputs_of(np.array([[101, 102, 0]], np.uint16))["attention_mask"]
    array([[1, 1, 0]])
    """
    return {"input_ids": tokens.astype(np.int64), "attention_mask": (tokens != 0).astype(np.int64)}


def _examples(tokens: np.ndarray, labels: np.ndarray) -> Examples:
    return Examples(inputs_of(tokens), labels, np.arange(len(labels)))


def _read_kept(path: Path) -> dict[str, np.ndarray] | None:
    """The tokens kept in a file; None where there are none, or they are damaged and must be made again."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as kept:
            return {name: kept[name] for name in ("train", "train_labels", "test", "test_labels")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _keep(path: Path, arrays: dict[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    try:
        write_atomically(path, content.getvalue())
    except OSError:
        return  # a folder that cannot be written costs time, nothing else
