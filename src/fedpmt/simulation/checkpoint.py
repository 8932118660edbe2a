"""State on disk, without pickle: tensors as safetensors, everything else as JSON in their header.

A value may be made of dataclasses, mappings, sequences, tensors, NumPy arrays and scalars. A file ends in the
SHA-256 of all that stands before: safetensors itself has no checksum, and a flipped bit in a weight would
otherwise be trained on without anybody noticing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedpmt.records import CHECKPOINT, write_atomically
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

STATE = "state"
CPU = torch.device("cpu")
DIGEST = hashlib.sha256().digest_size


def write_value(path: Path, value: Any) -> None:
    """Write a value and its checksum in one step."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_encode(value, tensors))
    # safetensors keeps no empty file: one tensor is always there.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data = save(tensors or {"empty": torch.zeros(0)}, metadata={STATE: plain})
    write_atomically(path, data, hashlib.sha256(data).digest())


def read_value(path: Path, device: torch.device = CPU) -> Any:
    """Read a value back, its tensors on a device.

    Raises:
        SettingError: The file is missing, or its content is not what was written.
    """
    data = _checked(path)
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return _decode(json.loads(header["__metadata__"][STATE]), load(data), device)
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise SettingError(f"{path} cannot be read ({error})") from error


def _checked(path: Path) -> bytes:
    """The content of a file without its checksum, which must agree."""
    try:
        with path.open("rb") as file:
            data = file.read(max(0, path.stat().st_size - DIGEST))
            digest = file.read()
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).digest() != digest:
        culprit = "it" if path.name == CHECKPOINT else f"the run's {CHECKPOINT}"
        raise SettingError(
            f"{path} is damaged: its checksum does not match; delete {culprit} to start the run again from round 1"
        )
    return data


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, partial):
        return None  # how to find the axes of a model, which nobody has asked for yet
    if isinstance(value, Tensor | np.ndarray):
        name = f"t{len(tensors)}"
        tensors[name] = value if isinstance(value, Tensor) else torch.from_numpy(value)
        return {"tensor": name, "numpy": isinstance(value, np.ndarray)}
    if isinstance(value, np.integer | np.floating):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {
            field.name: _encode(getattr(value, field.name), tensors) for field in dataclasses.fields(value)
        }
        return {"dataclass": [kind.__module__, kind.__qualname__], "fields": fields}
    if isinstance(value, Mapping):
        return {"mapping": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_encode(item, tensors) for item in value]}
    raise TypeError(f"a state may not hold a {type(value).__name__}")


def _decode(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = tensors[value["tensor"]]
        return tensor.numpy() if value["numpy"] else tensor.to(device)
    if "dataclass" in value:
        fields = {name: _decode(item, tensors, device) for name, item in value["fields"].items()}
        return _state_class(*value["dataclass"])(**fields)
    if "mapping" in value:
        return {
            _decode(key, tensors, device): _decode(item, tensors, device) for key, item in value["mapping"]
        }
    items = [_decode(item, tensors, device) for item in value["tuple" if "tuple" in value else "list"]]
    return tuple(items) if "tuple" in value else items


def _state_class(module: str, name: str) -> Any:
    """Only dataclasses of modules that the program itself has loaded: a file cannot name other code."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"unknown state {module}.{name}")
    return found


class DeviceStore:
    """What devices keep between rounds: one file per device and round, none for those that never took part.

    What a device wrote in a round is provisional until the server names that round as accepted; until
    then the state before it is kept too, so a lost reply or a kill can never split server and device.
    """

    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        self._folder, self._device = folder, device
        # Rounds that devices have written since the last checkpoint.
        self._written: dict[int, list[int]] = {}

    def read(self, device: int, accepted_round: int | None) -> Any:
        """The state after this round; None before the first."""
        return (
            None if accepted_round is None else read_value(self._path(device, accepted_round), self._device)
        )

    def write(self, device: int, round_index: int, value: Any) -> None:
        """Keep a state, provisionally."""
        path = self._path(device, round_index)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_value(path, value)
        self._written.setdefault(device, []).append(round_index)

    def outdate(self, accepted: Mapping[int, int]) -> None:
        """Forget what was written since the last checkpoint and has been replaced: two states stay, at most."""
        for device, rounds in self._written.items():
            for round_index in rounds:
                if round_index != accepted.get(device):
                    self._path(device, round_index).unlink(missing_ok=True)
            rounds[:] = [round_index for round_index in rounds if round_index == accepted.get(device)]

    def settle(self, accepted: Mapping[int, int]) -> None:
        """Forget every state but the accepted ones, once a checkpoint names those."""
        for device in self._written:
            keep = self._path(device, accepted[device]) if device in accepted else None
            for path in self._path(device, 0).parent.glob(f"{device}-*.safetensors"):
                if path != keep:
                    path.unlink(missing_ok=True)
        self._written.clear()

    def recover(self, accepted: Mapping[int, int]) -> None:
        """Drop what was written after the checkpoint that names these rounds."""
        for leftover in self._folder.glob("*/.*"):
            leftover.unlink(missing_ok=True)
        self._written = {int(path.name.split("-")[0]): [] for path in self._folder.glob("*/*.safetensors")}
        self.settle(accepted)

    def confirm(self, device: int, accepted: int | None, before: int) -> None:
        """On the device itself: of the states before this round only the accepted one counts.

        Later ones stay: a task that was long on its way cannot take away what has been accepted since.
        """
        for path in self._path(device, 0).parent.glob(f"{device}-*.safetensors"):
            if accepted != (written := int(path.stem.split("-")[1])) and written < before:
                path.unlink(missing_ok=True)

    def _path(self, device: int, round_index: int) -> Path:
        return self._folder / f"{device // 1000:06d}" / f"{device}-{round_index}.safetensors"
