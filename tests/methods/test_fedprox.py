"""FedProx: the proximal term, and less work for weak devices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from benches import Bench, Quadratics, trained, work_cost
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedpmt import api
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.fedprox import FedProx
from fedpmt.methods.proximal import Proximal
from fedpmt.parts.depth import full
from fedpmt.resources import ROUNDING
from fedpmt.seeds import Seeds
from fedpmt.training.local import Job, LocalWork
from fedpmt.training.loop import train
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.types import SettingError
from support import SMALL, samples

UNEVEN: dict[str, Any] = {**SMALL, "task": "cnn-mnist", "rounds": 1, "epochs": 2, "samples": 40}


def test_two_rounds_by_hand() -> None:
    """Two devices, μ = 0.5, η = 0.1, three steps; in round 2 device 0 alone is pulled to the w of round 2.

    def local(w, a, b):
        y = w
        for _ in range(3):
            y -= 0.1 * (a * (y - b) + 0.5 * (y - w))
        return y
    w = (local(0, 1, 1) + local(0, 2, -1)) / 2    # 0.25725, -0.4625
    w = local(w, 1, 1)
    """
    bench = Quadratics(FedProx(mu=0.5), [1, 2], [1, -1], steps=3)
    assert bench.play([0, 1]) == pytest.approx(-0.102625, abs=1e-12)
    assert bench.play([0]) == pytest.approx(0.18102528125, abs=1e-12)


def test_without_the_term_it_is_fedavg_bit_for_bit() -> None:
    """Through the whole simulation and on the fast path, with devices of all levels."""
    ours = api.run("fedprox", options={"mu": 0, "partial": False}, **UNEVEN)
    theirs = api.run("fedavg", **UNEVEN)
    assert ours.result is not None
    assert theirs.result is not None
    assert ours.result.weights_sha256 == theirs.result.weights_sha256
    assert ours.rounds[0].devices == theirs.rounds[0].devices


def test_the_hook_with_a_zero_term_changes_no_bit() -> None:
    bench = Bench(FedProx(mu=0.0), epochs=2)
    task = bench.method.assign(bench.state, bench.client(0), bench.round(0))
    found = []
    for work in (LocalWork[None](), Proximal(0.0)):
        job: Job[None] = Job(bench.site, task, task.offer[0], None, samples(8), Seeds(0, 0))
        found.append(train(work, job)[0].update)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("mu", [0.001, 1.0, 10.0])
def test_the_term_has_no_gradient_where_training_starts(mu: float) -> None:
    """Exactly zero at y = w, so the first step is FedAvg's to the bit."""
    ours, theirs = (Bench(method, batch=8) for method in (FedProx(mu=mu), FedAvg()))
    one, other = ours.reply(0).update, theirs.reply(0).update
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_larger_term_keeps_a_device_nearer() -> None:
    moved = []
    for mu in (0.0, 0.01, 0.1, 1.0, 10.0):
        bench = Bench(FedProx(mu=mu), epochs=5)
        moved.append(sum(float(change.square().sum()) for change in bench.reply(0).update.values()))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < moved[0] / 2


def test_running_statistics_are_left_alone() -> None:
    """The term is on parameters; buffers travel and are averaged as in FedAvg."""
    buffers = ["1.running_mean", "1.running_var"]
    found = []
    for method in (FedProx(mu=5.0), FedAvg()):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
        bench = Bench(method, module, learning_rate=0.0)
        step = bench.aggregate([bench.reply(0), bench.reply(1)])
        found.append([step.state.tensors[name] for name in buffers])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@given(steps=st.integers(1, 200), share=st.floats(1e-4, 3))
def test_steps_are_the_most_that_the_budget_pays_for(steps: int, share: float) -> None:
    """The price is that of all steps, and a step's is an equal share of it."""
    bench = Bench(FedProx(), epochs=steps, batch=8)
    part = full(bench.model.structure)
    whole = bench.cost(part).sustained
    budget = share * whole
    taken = bench.method.steps(bench.client(0, budget), part)
    assert 1 <= taken <= steps
    assert taken * whole <= budget * steps * (1 + 2 * ROUNDING) or taken == 1
    assert (taken + 1) * whole > budget * steps or taken == steps


def test_without_a_budget_all_steps_are_taken() -> None:
    bench = Bench(FedProx(), epochs=20, batch=8)
    part = full(bench.model.structure)
    client = bench.client(0, bench.cost(part).sustained / 10)
    assert FedProx().steps(client, part) == 2
    assert FedProx(partial=False).steps(client, part) == 20
    assert FedProx().steps(replace(client, plan=None), part) == 20
    assert FedProx().steps(bench.client(0), part) == 20


def test_a_weak_device_really_stops_there() -> None:
    """With a budget for three of eight steps it has what FedAvg has after three."""
    bench = Bench(FedProx(mu=0.0), batch=2, epochs=2)
    whole = bench.price(bench.task(0).offer[0]).operations
    task = bench.task(0, budget=0.4 * whole)
    assert (task.steps, task.offer[0].label) == (3, "full, 3 of 8 steps")
    reply = bench.reply(0, budget=0.4 * whole)
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in bench.state.tensors.items()}
    data, order = samples(8), Seeds(0, 0)("order", 0).permutation(8)
    for step in range(3):
        batch = data.take(order[2 * step : 2 * step + 2])
        loss = CLASSIFICATION.loss(bench.model.forward(tensors, batch.inputs), batch.targets)
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        with torch.no_grad():
            for tensor, gradient in zip(tensors.values(), gradients, strict=True):
                tensor.sub_(gradient, alpha=0.1)
    found = trained(bench.state.tensors, reply)
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor.detach())


@pytest.mark.parametrize("mode", ["exact", "paper"])
def test_no_device_works_longer_than_its_budget_allows(mode: str) -> None:
    """The clock charges steps by their share: nobody is slower than FedPMT, which the budgets are made of."""
    settings: dict[str, Any] = {**UNEVEN, "task": "fcnn-mnist", "batch": 5, "mode": mode}
    ours, theirs = (api.run(name, **settings).rounds[0].devices for name in ("fedprox", "fedpmt"))
    parts = {device.level: device.part for device in ours}
    assert len(set(parts.values())) > 2, parts
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.device == other.device
        assert mine.seconds <= other.seconds * (1 + ROUNDING)
        # In mode paper the clock pays for frozen layers in every epoch, records for what is really run.
        assert mine.operations <= other.operations * (1 + ROUNDING) or mode == "paper"


def test_the_term_is_paid_for() -> None:
    """A difference and a multiply-add more per trained parameter and step."""
    bench = Bench(FedProx())
    part = full(bench.model.structure)
    price, cost = bench.price(part), bench.cost(part)
    assert cost.operations == cost.sustained == 3 * price.operations
    assert work_cost(FedProx(mu=0.0).local, part, bench.price, bench.model.structure) == price


@pytest.mark.parametrize("mu", [-0.1, math.nan, math.inf])
def test_a_term_that_cannot_be_is_refused(mu: float) -> None:
    with pytest.raises(SettingError, match=r"fedprox\.mu must be >= 0 and finite \(got"):
        FedProx(mu=mu)


def test_a_term_that_overshoots_is_refused() -> None:
    """y - w is multiplied by 1 - η μ in each step: from η μ = 2 on that grows."""
    with pytest.raises(SettingError, match=r"fedprox\.mu must be < 20 .* \(got 20\)"):
        Bench(FedProx(mu=20.0), learning_rate=0.1).reply(0)
    Bench(FedProx(mu=19.0), learning_rate=0.1).reply(0)


def test_the_server_must_know_the_budget() -> None:
    with pytest.raises(SettingError, match="fedprox needs speeds"):
        api.check(api.settings_of({"method": "fedprox", "splitting": "device"}))
