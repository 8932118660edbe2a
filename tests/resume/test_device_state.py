"""What devices keep between rounds, and how any state goes to disk and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fedpmt.simulation.checkpoint import DIGEST, DeviceStore, read_value, write_value
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Kept:
    """A state as a method might have it."""

    name: str
    weights: dict[str, torch.Tensor]
    history: tuple[float, ...]
    mean: np.ndarray
    nothing: None = None


def test_a_value_comes_back_as_it_was(tmp_path: Path) -> None:
    """Dataclasses, dicts with any keys, tuples and lists, tensors of any type, arrays and scalars."""
    weights = {"w": torch.randn(3, 2), "count": torch.tensor(7), "bits": torch.tensor([True, False])}
    value = {
        3: [Kept("a", weights, (0.1, float(np.pi)), np.arange(4.0))],
        "flag": True,
        "empty": {},
        "none": (),
    }
    write_value(tmp_path / "state", value)
    found = read_value(tmp_path / "state")
    kept = found[3][0]
    assert isinstance(kept, Kept)
    assert (kept.name, kept.history, kept.nothing) == ("a", (0.1, float(np.pi)), None)
    for name, tensor in weights.items():
        assert kept.weights[name].dtype == tensor.dtype
        assert torch.equal(kept.weights[name], tensor)
    assert isinstance(kept.mean, np.ndarray)
    np.testing.assert_array_equal(kept.mean, np.arange(4.0))
    assert (found["flag"], found["empty"], found["none"]) == (True, {}, ())


def test_two_tensors_that_share_memory_are_both_kept(tmp_path: Path) -> None:
    """Views of one tensor come back whole."""
    base = torch.arange(6.0)
    write_value(tmp_path / "state", [base[:3], base[3:], base])
    first, second, whole = read_value(tmp_path / "state")
    assert torch.equal(torch.cat([first, second]), whole)


def test_what_a_state_may_not_hold_is_refused(tmp_path: Path) -> None:
    """Nothing is pickled, so nothing unknown is written."""
    with pytest.raises(TypeError, match="may not hold a set"):
        write_value(tmp_path / "state", {1, 2})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_state_names_its_file(tmp_path: Path) -> None:
    """As every other file that cannot be read."""
    with pytest.raises(SettingError, match="nowhere cannot be read"):
        read_value(tmp_path / "nowhere")


@pytest.mark.parametrize("part", ["length", "header", "tensors", "checksum"])
def test_a_flipped_bit_anywhere_is_found(part: str, tmp_path: Path) -> None:
    """Each part of a device's file is damaged in several places; none of them is read as if it were sound."""
    store = DeviceStore(tmp_path / "devices")
    store.write(3, 0, {"weights": torch.arange(20.0), "round": 7})
    (path,) = tmp_path.rglob("3-0.safetensors")
    content = path.read_bytes()
    tensors = 8 + int.from_bytes(content[:8], "little")
    places = {
        "length": range(8),
        "header": range(8, tensors, 5),
        "tensors": range(tensors, len(content) - DIGEST, 7),
        "checksum": range(len(content) - DIGEST, len(content)),
    }[part]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(SettingError, match=r"3-0\.safetensors is damaged: its checksum does not match"):
            store.read(3, 0)
    path.write_bytes(content)
    assert store.read(3, 0)["round"] == 7


def test_a_file_cut_short_anywhere_is_found(tmp_path: Path) -> None:
    """Also one that lost everything, or nothing but its checksum."""
    path = tmp_path / "state"
    write_value(path, torch.arange(20.0))
    content = path.read_bytes()
    for length in (*range(0, len(content), 9), len(content) - DIGEST, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(SettingError, match="state is damaged: its checksum does not match"):
            read_value(path)
    path.write_bytes(content + b"0")
    with pytest.raises(SettingError, match="state is damaged: its checksum does not match"):
        read_value(path)


def test_a_device_goes_back_to_its_last_accepted_round(tmp_path: Path) -> None:
    """What it wrote in a round whose reply was lost does not count: server and device stay together."""
    store = DeviceStore(tmp_path)
    assert store.read(7, None) is None
    store.write(7, 0, "after round 0")
    store.settle({7: 0})
    store.write(7, 4, "after round 4, whose reply was lost")
    assert store.read(7, 0) == "after round 0"
    store.settle({7: 0})
    assert store.read(7, 0) == "after round 0"
    with pytest.raises(SettingError, match="cannot be read"):
        store.read(7, 4)


def test_an_accepted_state_replaces_the_one_before(tmp_path: Path) -> None:
    """One file per device remains once a checkpoint names the round."""
    store = DeviceStore(tmp_path)
    for round_index in (0, 3):
        store.write(12, round_index, round_index)
        store.write(1, round_index, round_index)
    assert store.read(12, 0) == 0
    store.settle({12: 3, 1: 3})
    assert sorted(path.name for path in tmp_path.rglob("*.safetensors")) == [
        "1-3.safetensors",
        "12-3.safetensors",
    ]
    assert (store.read(12, 3), store.read(1, 3)) == (3, 3)


def test_between_checkpoints_a_device_keeps_two_states(tmp_path: Path) -> None:
    """The checkpoint's, which a resume needs, and the last accepted one, however often it is asked."""
    store = DeviceStore(tmp_path)
    store.write(5, 0, "of the checkpoint")
    store.settle({5: 0})
    for round_index in (1, 2, 3):
        store.write(5, round_index, round_index)
        store.write(6, round_index, round_index)
        store.outdate({5: round_index, 6: 1})
        assert (store.read(5, 0), store.read(5, round_index)) == ("of the checkpoint", round_index)
        assert sorted(path.stem for path in tmp_path.rglob("*.safetensors")) == [
            "5-0",
            f"5-{round_index}",
            "6-1",
        ]
    store.settle({5: 3, 6: 1})
    assert sorted(path.stem for path in tmp_path.rglob("*.safetensors")) == ["5-3", "6-1"]


def test_a_kill_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """A new process drops what was written after the checkpoint, also of devices the checkpoint does not know."""
    before = DeviceStore(tmp_path)
    before.write(5, 1, "kept")
    before.settle({5: 1})
    before.write(5, 2, "lost")
    before.write(6000, 2, "lost too")
    after = DeviceStore(tmp_path)
    after.recover({5: 1})
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["5-1.safetensors"]
    assert after.read(5, 1) == "kept"
