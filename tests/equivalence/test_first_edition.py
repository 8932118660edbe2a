"""The first edition's weights, to the bit, wherever the second edition was to leave them alone.

`first_edition.json` was written before the frame was rebuilt: `weights_sha256` after five rounds of every method on the
embedded data, i.i.d. and with two classes per device, by compiled code (`auto`) and by autograd (`plain`). Bits hold
for one kind of processor and one version of torch; elsewhere there is nothing to compare with.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import fedpmt
from fedpmt.kernels import available

KEPT: dict[str, Any] = json.loads((Path(__file__).parent / "first_edition.json").read_text())
FORMER: dict[str, dict[str, Any]] = {
    "scaffold": {"option": "II"},
    "comet": {"asked": 1000},
    "fedgkt": {"rate": 1e-3},
    "fedgen": {"latent": 10.0},
}
"""Defaults that the first edition had and the second has not."""

CHANGED = {
    "fjord auto": "was written in torch operations, and is compiled code now",
    "fedgen auto": "adds differences to what it sent, to get the devices' heads",
    "fedgen plain": "adds differences to what it sent, to get the devices' heads",
}
"""What has other bits than in the first edition, and why."""

QUICK = ("fedavg", "fedpmt", "heterofl", "scaffold", "fedprox")


def processor() -> str:
    """What rounding may depend on: the processor's model and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:16]


elsewhere = pytest.mark.skipif(
    KEPT["processor"] != processor() or KEPT["torch"] != torch.__version__ or not available(),
    reason="bits of another processor, or another version of torch",
)


def case(key: str) -> Any:
    return key if key.split(maxsplit=1)[0] in QUICK else pytest.param(key, marks=pytest.mark.slow)


@elsewhere
@pytest.mark.parametrize("key", [case(key) for key in KEPT["weights"]])
def test_five_rounds_have_the_bits_they_had(key: str) -> None:
    method, partition, way = key.split()
    executor: Literal["auto", "plain"] = "auto" if way == "auto" else "plain"
    options = FORMER.get(method, {})
    run = fedpmt.run(
        method, rounds=5, eval_every=5, partition=partition, executor=executor, workers=1, options=options
    )
    assert run.result is not None
    same = run.result.weights_sha256 == KEPT["weights"][key]
    assert same == (f"{method} {way}" not in CHANGED)
