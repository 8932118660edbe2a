"""The fast path does what the oracle does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fedpmt.kernels.fused import fused_train, fusible, stackable
from torch import nn

from fedpmt.models.build import build
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import full, suffix, suffixes
from fedpmt.parts.part import GLOBAL, Part, take
from fedpmt.parts.width import random_channels, thinned
from fedpmt.seeds import Seeds, generator
from fedpmt.training.local import LocalSettings, LocalWork, Site, train
from fedpmt.training.messages import Task
from fedpmt.training.objective import CLASSIFICATION, Objective
from fedpmt.types import MODEL, Examples
from support import samples, small_net

LOCAL = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "epochs": 2},
    {"prefix": "recompute"},
]


def both(model: LayeredModel, part: Part, data: Examples, **settings: Any) -> tuple[Any, Any]:
    """The same unit by the oracle and by the fast path."""
    site = Site(
        {GLOBAL: model},
        CLASSIFICATION,
        LocalSettings(**{"epochs": 1, "batch": 7, "learning_rate": 0.1, **settings}),
    )
    weights = {
        name: take(tensor, part.sent[name]).to(data.inputs.dtype) for name, tensor in model.initial().items()
    }
    task = Task((part,), {MODEL: weights})
    assert fusible(LocalWork(), site, task, part, data)
    oracle, _ = train(LocalWork(), site, task, part, None, data, Seeds(0, 0), device=0, round_index=0)
    return oracle, fused_train(site, [task], [part], [data], [Seeds(0, 0)])[0]


def in_double(data: Examples) -> Examples:
    return replace(data, inputs=data.inputs.double())


@pytest.mark.parametrize("settings", LOCAL)
@pytest.mark.parametrize("name", NETS)
def test_agrees_in_double_precision(name: str, settings: dict[str, Any]) -> None:
    """Where rounding cannot flip a max-pool or a ReLU, the two are the same algebra."""
    net = NETS[name]
    model = build(net, generator(1, "init"))
    for part in suffixes(model.structure, net.depths[0]):
        oracle, fast = both(model, part, in_double(samples(40, net.input_shape, 10)), **settings)
        assert set(oracle.tensors[MODEL]) == set(fast.tensors[MODEL]) == set(part.trained)
        for key, tensor in oracle.tensors[MODEL].items():
            torch.testing.assert_close(fast.tensors[MODEL][key], tensor, rtol=1e-9, atol=1e-11)
        assert fast.metrics["train_loss"] == pytest.approx(oracle.metrics["train_loss"])


@pytest.mark.parametrize("name", NETS)
def test_agrees_within_rounding(name: str) -> None:
    """In single precision rounding may flip a max-pool or a ReLU now and then; mostly it does not."""
    net, close = NETS[name], 0
    for seed in range(5):
        model = build(net, generator(seed, "init"))
        data = samples(4 * net.batch, net.input_shape, 10, seed)
        oracle, fast = both(model, full(model.structure), data, batch=net.batch)
        pairs = [(fast.tensors[MODEL][key], tensor) for key, tensor in oracle.tensors[MODEL].items()]
        close += all((ours - theirs).norm() <= 1e-5 * theirs.norm() for ours, theirs in pairs)
        assert all((ours - theirs).norm() <= 1e-2 * theirs.norm() for ours, theirs in pairs)
    assert close >= 3


def test_agrees_on_narrow_parts() -> None:
    model = build(NETS["cnn-mnist"], generator(0, "init"))
    rng = generator(0, "channels")
    axes = model.structure.require_axes("this test")
    part = thinned(
        model.structure, axes, 0.4, ("linear", "conv"), lambda size, count: random_channels(size, count, rng)
    )
    oracle, fast = both(model, part, in_double(samples(30, (1, 28, 28), 10)))
    for key, tensor in oracle.tensors[MODEL].items():
        torch.testing.assert_close(fast.tensors[MODEL][key], tensor, rtol=1e-9, atol=1e-11)


def test_leaves_what_it_was_given_alone() -> None:
    model = layered(small_net())
    before = {name: tensor.clone() for name, tensor in model.initial().items()}
    weights = model.initial()
    data = samples(30)
    inputs = data.inputs.clone()
    site = Site({GLOBAL: model}, CLASSIFICATION, LocalSettings(1, 7, 0.1))
    for frozen in range(3):
        part = suffix(model.structure, frozen, "some")
        fused_train(site, [Task((part,), {MODEL: weights})], [part], [data], [Seeds(0, 0)])
    assert torch.equal(data.inputs, inputs)
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_fewer_steps_can_be_asked_for() -> None:
    model = layered(small_net())
    part = full(model.structure)
    site = Site({GLOBAL: model}, CLASSIFICATION, LocalSettings(3, 5, 0.1))
    task = Task((part,), {MODEL: model.initial()}, steps=2)
    oracle, _ = train(LocalWork(), site, task, part, None, samples(23), Seeds(0, 0), device=0, round_index=0)
    fast = fused_train(site, [task], [part], [samples(23)], [Seeds(0, 0)])[0]
    for key, tensor in oracle.tensors[MODEL].items():
        torch.testing.assert_close(fast.tensors[MODEL][key], tensor, rtol=1e-5, atol=1e-6)


class OwnWork(LocalWork[None]):
    """A hook may be changed, so this is not plain SGD any more."""


@pytest.mark.parametrize(
    ("module", "work", "objective"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)), LocalWork(), CLASSIFICATION),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Linear(3, 3)), LocalWork(), CLASSIFICATION),
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), LocalWork(), CLASSIFICATION),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), LocalWork(), CLASSIFICATION),
        (nn.Sequential(nn.Linear(4, 3)), OwnWork(), CLASSIFICATION),
        (nn.Sequential(nn.Linear(4, 3)), LocalWork(), Objective(loss=nn.functional.mse_loss)),
    ],
)
def test_what_it_does_not_know_is_left_to_the_oracle(
    module: nn.Module, work: LocalWork[None], objective: Objective
) -> None:
    model = layered(module)
    site = Site({GLOBAL: model}, objective, LocalSettings(1, 5, 0.1))
    part = full(model.structure)
    data = samples(10, (4,))
    assert not fusible(work, site, Task((part,), {MODEL: model.initial()}), part, data)
    known = layered(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    part = full(known.structure)
    site = Site({GLOBAL: known}, CLASSIFICATION, site.settings)
    assert fusible(LocalWork(), site, Task((part,), {MODEL: known.initial()}), part, data)


@pytest.mark.parametrize("settings", LOCAL)
def test_devices_computed_together_agree_with_the_oracle(settings: dict[str, Any]) -> None:
    """Also when the last batch is short, and for parts that are narrow in different places."""
    model = build(NETS["fcnn-mnist"], generator(1, "init"))
    momentum = LocalSettings(1, 7, 0.1, momentum=0.9)  # which compiled code does not know
    assert stackable(model, momentum)
    assert not stackable(build(NETS["cnn-mnist"], generator(1, "init")), momentum)
    axes, rng = model.structure.require_axes("this test"), generator(0, "channels")
    narrow = [
        thinned(
            model.structure, axes, 0.3, ("linear",), lambda size, count: random_channels(size, count, rng)
        )
        for _ in range(2)
    ]
    for parts in ([suffix(model.structure, 2, "some")] * 2, [full(model.structure)] * 2, narrow):
        site = Site(
            {GLOBAL: model},
            CLASSIFICATION,
            LocalSettings(**{"epochs": 1, "batch": 7, "learning_rate": 0.1, **settings}),
        )
        data = [in_double(samples(40, (1, 28, 28), 10, seed)) for seed in (0, 1)]
        weights = {name: tensor.double() for name, tensor in model.initial().items()}
        tasks = [
            Task((part,), {MODEL: {name: take(weights[name], part.sent[name]) for name in weights}})
            for part in parts
        ]
        seeds = [Seeds(4, 0), Seeds(5, 0)]
        together = fused_train(site, tasks, parts, data, seeds)
        for place, outcome in enumerate(together):
            oracle, _ = train(
                LocalWork(),
                site,
                tasks[place],
                parts[place],
                None,
                data[place],
                seeds[place],
                device=0,
                round_index=0,
            )
            assert outcome.metrics == pytest.approx(oracle.metrics)
            for key, tensor in oracle.tensors[MODEL].items():
                torch.testing.assert_close(outcome.tensors[MODEL][key], tensor, rtol=1e-9, atol=1e-11)
        assert all(torch.equal(weights[name], tensor.double()) for name, tensor in model.initial().items())
