"""The run that secure aggregation is tried on: four devices of depths 4, 4, 2, 2, and what it is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from fedpmt.flower.secure.layer_vector import Scale
from fedpmt.records import MODEL_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

REACH, SAMPLES = 8.0, 20
RUN: dict[str, Any] = {
    "method": "fedpmt",
    "devices": 4,
    "samples": SAMPLES,
    "cohort": 4,
    "batch": 10,
    "rounds": 1,
    "lr": 0.1,
    "levels": "1/2x2,1x2",
    "deadline": 1000.0,
    "full_seconds": 1000.0,
    "executor": "plain",
}
WIDE, NARROW = (0, 3), (1, 2)
PARTS = ["depth 4", "depth 2", "depth 2", "depth 4"]
FLOAT = 2.0**-24
"""Half a step of a float below one: both results are rounded to floats, a few times each."""


def model_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "run" / MODEL_FILE)


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor], rounds: int = 1) -> None:
    """Equal but for quantisation, n R / 2³² an entry and round with equal weights, and the rounding of floats.

    What one round is off by, training in the next makes more of: at these rates less than ten times as much.
    """
    bound = Scale(REACH, RUN["devices"], SAMPLES).error(1, SAMPLES) * 10 ** (rounds - 1)
    assert set(ours) == set(plain)
    for name, tensor in plain.items():
        off = (ours[name].double() - tensor.double()).abs()
        assert bool(
            (off <= bound + 8 * 10 ** (rounds - 1) * FLOAT * tensor.double().abs().clamp(min=0.1)).all()
        ), (
            name,
            off.max(),
        )
