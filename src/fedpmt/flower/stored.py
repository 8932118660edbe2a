"""What a frozen base makes of a node's samples, in a file: each message starts a fresh process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.models.trees import tensors_in
from fedpmt.simulation.checkpoint import read_value, write_value
from fedpmt.simulation.runner import weights_sha256
from fedpmt.training.kept import KeptOutputs
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from fedpmt.simulation.problem import Problem
    from fedpmt.types import Arrays, Examples

FILE = "base-outputs.safetensors"


class StoredOutputs(KeptOutputs):
    """Outputs of one node in its folder; made anew where its samples, its base or the precision are others."""

    def __init__(self, folder: Path, digest: str, device: torch.device) -> None:
        super().__init__(limit=0)
        self._path, self._digest, self._device = folder / FILE, digest, device

    def get(self, device: int, compute: Callable[[], Arrays]) -> Arrays:
        """What the file holds, or else is computed now and written to it."""
        try:
            digest, outputs = read_value(self._path, self._device)
        except SettingError:
            digest, outputs = "", None  # not there yet, or damaged
        if digest != self._digest:
            outputs = compute()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_value(self._path, (self._digest, outputs))
        return outputs


def outputs_digest(problem: Problem, samples: Examples, precision: str) -> str:
    """One number for all that the outputs are made of."""
    inputs = {f"input {place}": one for place, one in enumerate(tensors_in(samples.inputs))}
    return f"{precision} {weights_sha256({**problem.model.base(), **inputs})}"
