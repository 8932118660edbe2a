"""Differential privacy on the device: what is promised, and that it is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fedpmt.training.private import PrivateWork, epsilon

from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.methods.feddrop import FedDrop
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.methods.registry import METHODS, method_class
from fedpmt.methods.scaffold import Scaffold
from fedpmt.parts.part import GLOBAL
from fedpmt.seeds import Seeds
from fedpmt.training.local import LocalWork, Outcome, Site, received, train
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.types import MODEL, SettingError
from support import Bench, samples

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.training.messages import Reply

RUN: dict[str, Any] = {"devices": 4, "samples": 20, "cohort": 4, "batch": 10, "rounds": 3, "lr": 0.1}


def worked(method: Any, clip: float, noise: float, budget: float = math.inf) -> tuple[Reply, torch.Tensor]:
    """A device's reply, and its change as one vector."""
    bench = Bench(method, learning_rate=0.5)
    task = method.assign(bench.state, bench.client(0, budget), bench.round(0))
    site = Site({GLOBAL: bench.model}, CLASSIFICATION, bench.settings)
    work = PrivateWork(method.local(), clip, noise)
    rng = Seeds(0, 0)
    part = task.offer[0]
    reply, _ = train(
        work, site, task, part, None, samples(8), lambda purpose: rng(purpose, 0), device=0, round_index=0
    )
    sent = received(task, part, bench.model.structure)
    assert set(reply.tensors[MODEL]) == set(part.trained)
    change = torch.cat([(reply.tensors[MODEL][name] - sent[name]).reshape(-1) for name in part.trained])
    return reply, change


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


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_send_more_than_tensors_are_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="dp-clip"):
        api.run(method, **RUN, dp_clip=1.0, out=tmp_path / "run")


@pytest.mark.parametrize("command", ["run", "deploy"])
@pytest.mark.parametrize("method", REFUSED)
def test_they_are_refused_before_anything_is_made(
    command: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--method", method, "--dp-clip", "1", "--out", str(tmp_path / "here")]
    assert program([command, *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "dp-clip = 1 is refused: " in line
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_whether_it_sends_more_than_tensors(name: str) -> None:
    """What is refused by its word is what could not be made private, and nothing else is."""
    kind = method_class(name)
    try:
        PrivateWork(api.method_of(api.settings_of({**RUN, "method": name})).local(), 1.0, 1.0)
    except SettingError:
        assert kind.sends_more or kind.needs_losses
    else:
        assert (
            not kind.sends_more or name == "fedgen"
        )  # its counts are in the task's answers, not in its work


def test_only_work_that_sends_nothing_else_is_made_private() -> None:
    with pytest.raises(SettingError, match="sends more than trained tensors"):
        PrivateWork(Scaffold().local(), 1.0, 1.0)
    assert PrivateWork(LocalWork(), 1.0, 1.0).measures == ()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_an_update_that_is_not_a_number_leaves_as_noise_alone(broken: float) -> None:
    """‖Δ‖ is NaN, and min(1, C / NaN) would be 1: no clip at all on what is still finite."""

    class Broken(LocalWork[None]):
        def reply(self, run: Any, own: None, data: Any) -> tuple[Outcome, None]:
            outcome, _ = super().reply(run, own, data)
            trained = {name: tensor + 1e6 for name, tensor in outcome.tensors[MODEL].items()}
            next(iter(trained.values())).view(-1)[0] = broken
            return replace(outcome, tensors={MODEL: trained}), None

    class BrokenMethod(FedPMT):
        def local(self) -> LocalWork[None]:
            return Broken()

    _, quiet = worked(BrokenMethod(), clip=0.5, noise=0.0)
    assert torch.equal(quiet, torch.zeros_like(quiet))
    _, noisy = worked(BrokenMethod(), clip=0.5, noise=2.0)
    assert float(noisy.std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * len(noisy)))
