"""The fast executor learns what the oracle learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedpmt import api, kernels
from fedpmt.methods.registry import general_methods
from fedpmt.types import SettingError
from support import STAGES, images, kinds_fast, presets_slow


def weights(**settings: Any) -> dict[str, torch.Tensor]:
    run = api.run(**settings)
    assert run.result is not None
    loaded: dict[str, torch.Tensor] = load_file(Path(run.result.run) / "model.safetensors")
    return loaded


NEVER_COMPILED = ("depthfl",)
"""Methods whose every device trains a net that compiled code does not know."""


@pytest.mark.parametrize(
    ("task", "method"),
    [
        pytest.param(task, *one.values, marks=one.marks)
        for task, few in {"fcnn-mnist": presets_slow, "cnn-mnist": kinds_fast}.items()
        for one in few(general_methods())
    ],
)
def test_one_round_agrees_within_rounding(method: str, task: str) -> None:
    options = STAGES.get(method, {})
    # With seed 0 rounding flips a max-pool of SlimFL's: a difference that is none of the executor's.
    settings: dict[str, Any] = {"method": method, "task": task, "samples": 40, "lr": 0.05, "seed": 1}
    settings |= {"options": options, "rounds": 2 if options else 1}
    fast, oracle = weights(**settings), weights(**settings, executor="plain")
    # Else they were one and the same.
    assert (
        method in NEVER_COMPILED
        or not kernels.available()
        or any(not torch.equal(fast[name], tensor) for name, tensor in oracle.items())
    )
    for name, tensor in oracle.items():
        assert (fast[name] - tensor).norm() / tensor.norm() <= 1e-5, name


@pytest.mark.slow
def test_many_rounds_reach_the_same_accuracy() -> None:
    found = [
        api.run("fedpmt", rounds=50, eval_every=50, executor=executor).result
        for executor in ("auto", "plain")
    ]
    fast, oracle = (result.score for result in found if result is not None and result.score is not None)
    assert oracle > 0.6
    assert fast == pytest.approx(oracle, abs=0.03)


def unknown_net() -> dict[str, Any]:
    """A user's own problem; compiled code knows no tanh."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 3))
    return {"model": net, "train": images(200), "test": images(50, seed=1)}


@pytest.mark.skipif(not kernels.available(), reason="there is no C compiler here")
@pytest.mark.parametrize(
    ("method", "more", "path", "said"),
    [
        ("fedavg", {}, "compiled", None),
        ("fedavg", {"momentum": 0.9, "weight_decay": 0.01}, "compiled", None),
        ("fjord", {"momentum": 0.9}, "compiled", None),
        ("fedavg", {"executor": "plain"}, "autograd", None),
        ("fedavg", unknown_net(), "autograd", None),
        ("slimfl", {}, "autograd", "slimfl: compiled code does not support its local steps"),
        ("fedavg", {"dp_clip": 1.0, "dp_noise": 1.0}, "compiled", None),  # noise comes after the steps
        ("fedavg", {"clip_norm": 1.0}, "autograd", "does not support its local steps with these settings"),
        ("feddrop", {"options": {"scaling": True}}, "compiled", None),
        ("cocofl", {}, "compiled", None),  # layers behind the trained ones are frozen
        ("fiarse", {}, "mixed", "fiarse: compiled code does not support its local steps"),
    ],
)
def test_the_path_is_recorded_and_leaving_the_compiled_one_is_said_once(
    method: str, more: dict[str, Any], path: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {
        "rounds": 2,
        "devices": 10,
        "samples": 20,
        "cohort": 5,
        "eval_every": 2,
        **more,
    }
    result = api.run(method, **settings).result
    assert result is not None
    assert result.path == path
    assert json.loads(result.model_dump_json())["path"] == path
    assert [record.levelname for record in caplog.records] == ([] if said is None else ["WARNING"])
    assert said is None or said in caplog.text


def test_a_finished_run_keeps_its_path(tmp_path: Path) -> None:
    """A resume computes no unit, and still knows how those before it were computed."""
    settings: dict[str, Any] = {
        "devices": 10,
        "samples": 20,
        "cohort": 5,
        "rounds": 1,
        "out": tmp_path / "run",
    }
    before = api.run("fedavg", **settings).result
    (tmp_path / "run" / "result.json").unlink()
    assert api.run("fedavg", resume=True, **settings).result == before


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
