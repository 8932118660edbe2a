"""What a kill in the middle of a write leaves behind is gone after the resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fedpmt import api
from fedpmt.simulation.checkpoint import DeviceStore

if TYPE_CHECKING:
    from pathlib import Path


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
