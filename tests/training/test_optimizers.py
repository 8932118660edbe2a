"""Optimizers on devices take the steps of torch's, and rates follow their schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedpmt import api
from fedpmt.models.layered import layered
from fedpmt.parts.depth import full, suffix
from fedpmt.parts.part import GLOBAL
from fedpmt.seeds import Seeds
from fedpmt.settings import resolve
from fedpmt.training.local import Job, LocalSettings, LocalWork, Site, learning_rate, local_settings
from fedpmt.training.loop import train
from fedpmt.training.messages import Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.training.optimizers import SGD, Adam, Custom, Moments, Optimizer, clip
from fedpmt.types import MODEL, SettingError
from support import SMALL, samples, small_net

torch_sgd, torch_adam, torch_adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
PAIRS: dict[str, tuple[Optimizer, Any, dict[str, Any]]] = {
    "sgd": (SGD(), torch_sgd, {}),
    "decay": (SGD(weight_decay=0.05), torch_sgd, {"weight_decay": 0.05}),
    "momentum": (SGD(0.9), torch_sgd, {"momentum": 0.9}),
    "momentum-decay": (SGD(0.9, weight_decay=0.05), torch_sgd, {"momentum": 0.9, "weight_decay": 0.05}),
    "nesterov": (SGD(0.9, nesterov=True), torch_sgd, {"momentum": 0.9, "nesterov": True}),
    "adam": (Adam(), torch_adam, {}),
    "adam-decay": (Adam(0.01), torch_adam, {"weight_decay": 0.01}),
    "amsgrad": (Adam(amsgrad=True), torch_adam, {"amsgrad": True}),
    "betas": (Adam(betas=(0.8, 0.9), epsilon=1e-3), torch_adam, {"betas": (0.8, 0.9), "eps": 1e-3}),
    "adamw": (Adam(0.1, decoupled=True), torch_adamw, {"weight_decay": 0.1}),
    "amsgradw": (
        Adam(0.1, amsgrad=True, decoupled=True),
        torch_adamw,
        {"weight_decay": 0.1, "amsgrad": True},
    ),
}
RATE = 0.01


@pytest.mark.parametrize("name", PAIRS)
def test_steps_are_those_of_torch(name: str) -> None:
    """At a rate that changes from step to step."""
    how, kind, options = PAIRS[name]
    start = {"w": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64)}
    ours = {key: tensor.clone() for key, tensor in start.items()}
    theirs = [tensor.clone().requires_grad_() for tensor in start.values()]
    stepper, oracle = how.start(), kind(theirs, lr=RATE, **options)
    for step in range(10):
        gradients = {key: torch.randn_like(tensor) for key, tensor in ours.items()}
        stepper.step(ours, gradients, RATE / (1 + step))
        for parameter, gradient in zip(theirs, gradients.values(), strict=True):
            parameter.grad = gradient.clone()
        oracle.param_groups[0]["lr"] = RATE / (1 + step)
        oracle.step()
    for tensor, parameter in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_goes_on_from_moments_that_were_kept(amsgrad: bool) -> None:
    """Two goes of five steps are ten steps, and what was given is left as it was."""
    start, how = torch.randn(6, dtype=torch.float64), Adam(0.01, amsgrad=amsgrad)
    gradients = [{"w": torch.randn(6, dtype=torch.float64)} for _ in range(10)]
    whole, parts = {"w": start.clone()}, {"w": start.clone()}
    stepper = how.start()
    for gradient in gradients:
        stepper.step(whole, gradient, RATE)
    first = how.start(Moments())
    for gradient in gradients[:5]:
        first.step(parts, gradient, RATE)
    kept = first.moments()
    before = {key: tensor.clone() for key, tensor in kept.square.items()}
    second = how.start(kept)
    for gradient in gradients[5:]:
        second.step(parts, gradient, RATE)
    assert torch.equal(whole["w"], parts["w"])
    assert (kept.steps, second.moments().steps) == (5, 10)
    assert torch.equal(kept.square["w"], before["w"])


@pytest.mark.parametrize(
    "how", [SGD(0.9, nesterov=True, weight_decay=0.1), Adam(0.1), Adam(0.1, decoupled=True)]
)
def test_nothing_outside_of_a_corner_moves(how: Optimizer) -> None:
    """A step of a narrow net is that of the narrow net alone."""
    wide, narrow = {"w": torch.randn(4, 5)}, {}
    narrow["w"] = wide["w"][:2, :3].clone()
    before, corner = wide["w"].clone(), {"w": (slice(2), slice(3))}
    one, other = how.start(), how.start()
    for _ in range(3):
        gradient = torch.randn(4, 5)
        one.step(wide, {"w": gradient}, 0.1, corner)
        other.step(narrow, {"w": gradient[:2, :3]}, 0.1)
    assert torch.equal(wide["w"][:2, :3], narrow["w"])
    outside = torch.ones(4, 5, dtype=torch.bool)
    outside[:2, :3] = False
    assert torch.equal(wide["w"][outside], before[outside])


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_is_that_of_torch(limit: float) -> None:
    gradients = {"w": torch.randn(4, 3), "b": torch.randn(4)}
    parameters = [torch.zeros_like(gradient).requires_grad_() for gradient in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(parameters, limit)
    for clipped, parameter in zip(clip(gradients, limit).values(), parameters, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(clipped, parameter.grad)
    assert clip(gradients, None) is gradients


ROUNDS: dict[str, tuple[Optimizer, float | None]] = {
    **{name: (how, None) for name, (how, _, _) in PAIRS.items()},
    "clipped": (SGD(0.9), 0.2),
    "adam": (Adam(), 0.2),
    "custom": (Custom(lambda params: torch.optim.RMSprop(params, alpha=0.9)), None),
}


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("fast", [False, True], ids=["plain", "auto"])
def test_a_local_round_is_that_of_torch(name: str, fast: bool) -> None:
    """The same batches through nn.Module, autograd and torch.optim; with `auto` as compiled code, where it can."""
    how, limit = ROUNDS[name]
    model = layered(small_net())
    settings = LocalSettings(2, 5, RATE, how, limit)
    part, site = full(model.structure), Site({GLOBAL: model}, CLASSIFICATION, settings, fast=fast)
    job: Job[None] = Job(
        site, Task((part,), {MODEL: model.initial()}), part, None, samples(23), Seeds(3, 0), 1
    )
    reply, _ = train(LocalWork(), job)
    reference = small_net()
    before = {key: value.clone() for key, value in reference.state_dict().items()}
    if isinstance(how, Custom):
        optimizer: Any = torch.optim.RMSprop(reference.parameters(), lr=RATE, alpha=0.9)
    else:
        _, kind, options = PAIRS["momentum" if name == "clipped" else name]
        optimizer = kind(reference.parameters(), lr=RATE, **options)
    data, order = samples(23), Seeds(3, 0)("order")
    for _ in range(2):
        positions = order.permutation(23)
        for start in range(0, 23, 5):
            batch = data.take(positions[start : start + 5])
            optimizer.zero_grad()
            nn.functional.cross_entropy(reference(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            if limit is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), limit)
            optimizer.step()
    for key, value in reference.state_dict().items():
        # Adam divides by the root of tiny squares, which magnifies rounding.
        torch.testing.assert_close(
            reply.update[key], value - before[key], rtol=1e-3, atol=2e-5 if fast else 2e-6
        )
        assert not torch.equal(value, before[key])


def test_a_user_s_optimizer_sees_trained_tensors_only_and_the_round_s_rate() -> None:
    seen: list[Any] = []

    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        seen.append(torch.optim.SGD(params, lr=99.0))
        found: torch.optim.Optimizer = seen[-1]
        return found

    model = layered(small_net())
    site = Site({GLOBAL: model}, CLASSIFICATION, LocalSettings(1, 5, RATE, Custom(make)))
    part = suffix(model.structure, 1, "some")
    job: Job[None] = Job(site, Task((part,), {MODEL: model.initial()}), part, None, samples(10), Seeds(0, 0))
    train(LocalWork(), job)
    (optimizer,) = seen
    assert [tuple(one.shape) for one in optimizer.param_groups[0]["params"]] == [(8, 36), (8,), (3, 8), (3,)]
    assert optimizer.param_groups[0]["lr"] == RATE
    assert all(one.grad is None for one in optimizer.param_groups[0]["params"])


def test_runs_take_them_by_name_and_as_functions() -> None:
    """A torch optimizer that is SGD gives what SGD gives, within rounding; each way gives weights of its own."""
    settings: dict[str, Any] = {**SMALL, "executor": "plain"}
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "sgd": {},
        "adam": {"optimizer": "adam", "lr": 0.001},
        "adamw": {"optimizer": "adamw", "lr": 0.001, "weight_decay": 0.1},
        "momentum": {"momentum": 0.9},
        "nesterov": {"momentum": 0.9, "nesterov": True},
        "clipped": {"clip_norm": 0.1},
        "custom": {"optimizer": lambda params: torch.optim.SGD(params, lr=1.0)},
        "schedule": {"schedule": lambda round_index: 0.05 / (1 + round_index)},
    }
    for name, changes in ways.items():
        run = api.run("fedpmt", **{**settings, **changes})
        assert run.result is not None
        found[name] = run.result
    assert len({one.weights_sha256 for name, one in found.items() if name != "custom"}) == len(ways) - 1
    assert found["custom"].loss == pytest.approx(found["sgd"].loss, rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.1] * 5),
        ("inverse:9", [0.1, 0.1 * 10 / 11, 0.1 * 10 / 12, 0.1 * 10 / 13, 0.1 * 10 / 14]),
        ("step:2,0.5", [0.1, 0.1, 0.05, 0.05, 0.025]),
        ("cosine", [0.05 * (1 + math.cos(math.pi * t / 5)) for t in range(5)]),
        ("cosine:0.2", [0.02 + 0.08 * (1 + math.cos(math.pi * t / 5)) / 2 for t in range(5)]),
    ],
)
def test_rates_by_hand(schedule: str, rates: list[float]) -> None:
    settings = resolve({"schedule": schedule, "lr": 0.1, "rounds": 5})
    assert [local_settings(settings, t).learning_rate for t in range(5)] == pytest.approx(rates)


def test_cosine_is_torch_s() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.02)
    for t in range(8):
        assert learning_rate("cosine:0.2", 0.1, t, rounds=8) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def test_a_warm_up_rises_to_the_schedule() -> None:
    """Linear and never zero; a cosine starts when it is over."""
    settings = resolve({"schedule": "cosine", "lr": 0.1, "rounds": 7, "warmup": 3})
    found = [local_settings(settings, t).learning_rate for t in range(7)]
    assert found[:3] == pytest.approx([0.025, 0.05, 0.075])
    assert found[3:] == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 4)) for t in range(4)])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"nesterov": True}, "nesterov"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum = 0.9 is SGD's"),
        ({"optimizer": "adams"}, "optimizer"),
        ({"clip_norm": 0}, "clip-norm"),
        ({"schedule": "cosine:1,2"}, "schedule"),
        ({"schedule": "linear"}, "schedule"),
        ({"warmup": -1}, "warmup"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        resolve(given)
