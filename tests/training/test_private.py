"""Differential privacy on the device: what is promised, and that it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.methods.feddrop import FedDrop
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.methods.registry import METHODS, create
from fedpmt.training.local import LocalWork, Outcome
from fedpmt.training.privacy import Privacy, epsilon
from fedpmt.types import SettingError
from support import Bench

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.training.local import Run
    from fedpmt.training.messages import Reply

RUN: dict[str, Any] = {"devices": 4, "samples": 20, "cohort": 4, "batch": 10, "rounds": 3, "lr": 0.1}


def worked(method: Any, clip: float, noise: float, budget: float = math.inf) -> tuple[Reply, torch.Tensor]:
    """A device's reply, and its update as one vector."""
    bench = Bench(method, learning_rate=0.5, privacy=Privacy(clip, noise))
    reply = bench.reply(0, budget=budget)
    assert set(reply.update) == set(reply.part.trained)
    return reply, torch.cat([change.reshape(-1) for change in reply.update.values()])


@pytest.mark.parametrize("budget", [math.inf, 40.0])
@pytest.mark.parametrize("method", [FedPMT(), FedDrop(keep=0.5)])
def test_one_clip_holds_over_all_that_a_device_trained(method: Any, budget: float) -> None:
    reply, change = worked(method, clip=0.01, noise=0.0, budget=budget)
    assert float(change.norm()) == pytest.approx(0.01, rel=1e-3)
    assert reply.metrics == {}


def test_a_small_update_is_not_made_larger() -> None:
    _, free = worked(FedPMT(), clip=1e9, noise=0.0)
    _, plain = worked(FedPMT(), clip=float(free.norm()) * 1.001, noise=0.0)
    assert torch.allclose(free, plain, atol=1e-6)


def test_the_noise_has_the_size_that_was_promised() -> None:
    _, quiet = worked(FedPMT(), clip=0.5, noise=0.0)
    _, noisy = worked(FedPMT(), clip=0.5, noise=4.0)
    noise = (noisy - quiet).double()
    count = len(noise)
    # The sample deviation of n normal draws is σ within 5 σ / √(2 n).
    assert float(noise.std()) == pytest.approx(2.0, abs=5 * 2.0 / math.sqrt(2 * count))
    assert abs(float(noise.mean())) < 5 * 2.0 / math.sqrt(count)


@pytest.mark.parametrize(("noise", "releases", "delta"), [(1.0, 1, 1e-5), (10.0, 5, 1e-5), (30.0, 500, 1e-6)])
def test_epsilon_is_the_least_over_all_orders(noise: float, releases: int, delta: float) -> None:
    """min over α of T α s² / (2 z²) + log(1/δ) / (α - 1), with s = 2, on a grid."""
    orders = 1 + np.logspace(-3, 4, 200_001)
    bound = releases * orders * 4 / (2 * noise**2) + math.log(1 / delta) / (orders - 1)
    assert epsilon(noise, releases, delta) == pytest.approx(float(bound.min()), rel=1e-6)


def test_no_noise_promises_nothing() -> None:
    assert epsilon(0.0, 1, 1e-5) == math.inf


def test_a_run_states_its_epsilon(tmp_path: Path) -> None:
    run = api.run("fedpmt", **RUN, dp_clip=1.0, dp_noise=2.0, out=tmp_path / "run")
    assert [step.metrics["epsilon"] for step in run.rounds] == [epsilon(2.0, t, 1e-5) for t in (1, 2, 3)]
    assert all("train_loss" not in step.metrics for step in run.rounds)


REFUSED = ("scaffold", "prunefl", "fedmp", "comet", "fedgkt", "fedgen")


def test_those_that_send_more_or_learn_from_losses_are_these() -> None:
    """The contract holds what replies carry to what traits say."""
    traits = {name: create(name, {}, {}).traits for name in METHODS}
    assert {name for name, one in traits.items() if one.sends_more or one.needs_losses} == set(REFUSED)


@pytest.mark.parametrize("method", REFUSED)
def test_they_are_refused_before_anything_is_made(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingError, match="dp-clip"):
        api.run(method, **RUN, dp_clip=1.0, out=tmp_path / "run")
    for command in ("run", "deploy"):
        flags = ["--method", method, "--dp-clip", "1", "--out", str(tmp_path / "here")]
        assert program([command, *flags]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f"dp-clip = 1: {method} " in line
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class Broken(LocalWork[None]):
    """Training that leaves the finite numbers."""

    value: float

    def reply(self, run: Run[None]) -> tuple[Outcome, None]:
        with torch.no_grad():
            for parameter in run.params.values():
                parameter.add_(1e6)
            next(iter(run.params.values())).view(-1)[0] = self.value
        return Outcome(), None


@dataclass(frozen=True)
class BrokenMethod(FedPMT):
    value: float = math.nan

    @property
    def local(self) -> LocalWork[Any]:
        return Broken(self.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_is_not_a_number_leaves_as_noise_alone(value: float) -> None:
    """‖Δ‖ is NaN, and min(1, C / NaN) would be 1: no clip at all on what is still finite."""
    _, quiet = worked(BrokenMethod(value=value), clip=0.5, noise=0.0)
    assert torch.equal(quiet, torch.zeros_like(quiet))
    _, noisy = worked(BrokenMethod(value=value), clip=0.5, noise=2.0)
    assert float(noisy.std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * len(noisy)))
