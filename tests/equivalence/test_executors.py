"""The fast executor learns what the oracle learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedpmt import api, kernels
from fedpmt.methods.registry import METHODS
from fedpmt.types import SettingError
from support import STAGES


def weights(**settings: Any) -> dict[str, torch.Tensor]:
    run = api.run(**settings)
    assert run.result is not None
    loaded: dict[str, torch.Tensor] = load_file(Path(run.result.run) / "model.safetensors")
    return loaded


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", ["fcnn-mnist", "cnn-mnist"])
def test_one_round_agrees_within_rounding(method: str, task: str) -> None:
    options = STAGES.get(method, {})
    # With seed 0 rounding flips a max-pool of SlimFL's: a difference that is none of the executor's.
    settings: dict[str, Any] = {"method": method, "task": task, "samples": 40, "lr": 0.05, "seed": 1}
    settings |= {"options": options, "rounds": 2 if options else 1}
    fast, oracle = weights(**settings), weights(**settings, executor="plain")
    # Else they were one and the same.
    assert not kernels.available() or any(
        not torch.equal(fast[name], tensor) for name, tensor in oracle.items()
    )
    for name, tensor in oracle.items():
        assert (fast[name] - tensor).norm() / tensor.norm() <= 1e-5, name


def test_many_rounds_reach_the_same_accuracy() -> None:
    found = [
        api.run("fedpmt", rounds=50, eval_every=50, executor=executor).result
        for executor in ("auto", "plain")
    ]
    fast, oracle = (result.score for result in found if result is not None and result.score is not None)
    assert oracle > 0.6
    assert fast == pytest.approx(oracle, abs=0.03)


def test_a_run_is_not_resumed_by_another_executor(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rounds": 1,
        "devices": 5,
        "samples": 10,
        "cohort": 5,
        "out": tmp_path / "run",
    }
    api.run("fedavg", **settings)
    with pytest.raises(SettingError, match="executor"):
        api.run("fedavg", resume=True, executor="plain", **settings)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    absent: Any = "cuda" if not torch.cuda.is_available() else "mps"
    with pytest.raises(SettingError, match=f"device = '{absent}' is refused"):
        api.run("fedavg", rounds=1, device=absent, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert api.run("fedavg", rounds=1, device="auto", devices=5, samples=10, cohort=5).result is not None
