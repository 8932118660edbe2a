"""The compiled fast path does what the torch one does; without a compiler nothing is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fedpmt.training.control import CONTROL, Control, ControlledWork
from fedpmt.training.proximal import ProximalWork
from torch import nn

from fedpmt.kernels import fused, native
from fedpmt.models.build import build
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import full, suffix, suffixes
from fedpmt.parts.part import GLOBAL, Indices, Part, add_at, local_shape, take
from fedpmt.parts.width import random_channels, thinned
from fedpmt.seeds import Seeds, generator
from fedpmt.training.local import LocalSettings, LocalWork, Site, train
from fedpmt.training.messages import Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.types import MODEL, Examples
from support import samples

if TYPE_CHECKING:
    from pathlib import Path

needs_compiler = pytest.mark.skipif(native.library() is None, reason="there is no C compiler here")


def both(
    monkeypatch: pytest.MonkeyPatch, model: LayeredModel, part: Part, data: Examples, **settings: Any
) -> tuple[Any, Any]:
    """The same unit by compiled code and by torch operations."""
    task = Task(
        (part,),
        {MODEL: {name: take(tensor, part.sent[name]) for name, tensor in model.initial().items()}},
        steps=settings.pop("steps", None),
    )
    chosen = LocalSettings(**{"epochs": 1, "batch": 7, "learning_rate": 0.1, **settings})
    site = Site({GLOBAL: model}, CLASSIFICATION, chosen)
    used: list[int] = []
    train = native.native_train
    monkeypatch.setattr(fused, "native_train", lambda *given: used.append(1) or train(*given))  # type: ignore[func-returns-value]
    compiled = fused.fused_train(site, [task], [part], [data], [Seeds(0, 0)])[0]
    assert used == [1]
    monkeypatch.setattr(fused, "shapes_of", lambda *_: None)
    by_torch = fused.fused_train(site, [task], [part], [data], [Seeds(0, 0)])[0]
    assert used == [1]
    monkeypatch.undo()
    return compiled, by_torch


def assert_alike(compiled: Any, by_torch: Any, part: Part, tolerance: float = 2e-5) -> None:
    assert set(compiled.tensors[MODEL]) == set(part.trained)
    for name, tensor in by_torch.tensors[MODEL].items():
        own = compiled.tensors[MODEL][name]
        assert own.shape == tensor.shape
        assert own.is_contiguous()
        assert (own - tensor).norm() <= tolerance * tensor.norm() + 1e-7, name
    assert compiled.metrics["train_loss"] == pytest.approx(by_torch.metrics["train_loss"], rel=1e-4)


@needs_compiler
@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.1, "epochs": 2}, {"prefix": "recompute"}, {"steps": 3, "epochs": 2}]
)
@pytest.mark.parametrize("name", NETS)
def test_the_papers_nets(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All depths; the last batch is short. Few samples, so that rounding has no time to flip a max-pool."""
    net = NETS[name]
    model = build(net, generator(1, "init"))
    for part in suffixes(model.structure, net.depths[0]):
        data = samples(17, net.input_shape, 10)
        assert_alike(*both(monkeypatch, model, part, data, **settings), part)


@needs_compiler
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "epochs": 2}])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", ["control", "proximal"])
def test_a_pull_beside_the_gradient(kind: str, name: str, settings: dict[str, Any]) -> None:
    """SCAFFOLD's and FedProx's steps, against the oracle; what is sent beside the weights and kept is the same, too."""
    net = NETS[name]
    model, data = build(net, generator(1, "init")), samples(17, net.input_shape, 10)
    part, weights = full(model.structure), model.initial()
    drawn = torch.Generator().manual_seed(0)
    c, mine = (
        {name: 0.1 * torch.randn(one.shape, generator=drawn) for name, one in weights.items()}
        for _ in range(2)
    )
    work: LocalWork[Any] = ControlledWork("II") if kind == "control" else ProximalWork(2.0)
    own = Control(mine) if kind == "control" else None
    task = Task((part,), {MODEL: weights, **({CONTROL: c} if kind == "control" else {})})
    chosen = LocalSettings(**{"epochs": 1, "batch": 7, "learning_rate": 0.1, **settings})
    site = Site({GLOBAL: model}, CLASSIFICATION, chosen)
    assert fused.fusible(work, site, task, part, data)
    oracle, kept = train(work, site, task, part, own, data, Seeds(0, 0), device=0, round_index=0)
    outcome = fused.fused_train(site, [task], [part], [data], [Seeds(0, 0)], work, [own])[0]
    steps = fused.steps_taken(chosen, len(data), None)
    sent, left = work.concluded(outcome, site, task, own, steps)
    assert_alike(sent, oracle, part, 5e-5)
    if isinstance(kept, Control):
        assert isinstance(left, Control)
        assert set(sent.tensors) == set(oracle.tensors)
        for key, one in kept.variate.items():
            assert (left.variate[key] - one).norm() <= 1e-3 * one.norm()


@needs_compiler
def test_a_pull_needs_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch operations do not know it: the oracle takes such work."""
    model = build(NETS["fcnn-mnist"], generator(1, "init"))
    part, data = full(model.structure), samples(9, NETS["fcnn-mnist"].input_shape, 10)
    site = Site({GLOBAL: model}, CLASSIFICATION, LocalSettings(1, 7, 0.1, momentum=0.5))
    task = Task((part,), {MODEL: model.initial()})
    assert fused.fusible(LocalWork(), site, task, part, data)
    assert not fused.fusible(ProximalWork(1.0), site, task, part, data)
    monkeypatch.setattr(fused, "shapes_of", lambda *_: None)
    assert not fused.fusible(
        ProximalWork(1.0), replace(site, settings=LocalSettings(1, 7, 0.1)), task, part, data
    )


CHAINS = {
    "odd sizes": (nn.Sequential(nn.Linear(13, 11), nn.ReLU(), nn.Linear(11, 3)), (13,)),
    "no bias": (
        nn.Sequential(nn.Linear(9, 17, bias=False), nn.ReLU(), nn.Linear(17, 5, bias=False)),
        (9,),
    ),
    "no ReLU": (nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Linear(7, 3)), (3, 2, 2)),
    "ReLU before the pool": (
        nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3)),
        (2, 6, 7),
    ),
    "no pool": (
        nn.Sequential(nn.Conv2d(3, 9, (2, 3)), nn.ReLU(), nn.Conv2d(9, 4, 1), nn.Flatten(), nn.Linear(80, 3)),
        (3, 6, 6),
    ),
    "pool without ReLU, odd leftovers": (
        nn.Sequential(
            nn.Conv2d(1, 3, 2), nn.MaxPool2d(2), nn.Conv2d(3, 17, 2), nn.Flatten(), nn.Linear(68, 4)
        ),
        (1, 8, 8),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", CHAINS)
def test_other_chains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, shape = CHAINS[name]
    model = layered(module)
    data = samples(23, shape, 3)
    for frozen in range(len(model.structure.layers)):
        part = suffix(model.structure, frozen, "some")
        assert_alike(*both(monkeypatch, model, part, data), part)


@needs_compiler
def test_narrow_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(NETS["cnn-mnist"], generator(0, "init"))
    rng, axes = generator(0, "channels"), model.structure.require_axes("this test")
    part = thinned(
        model.structure, axes, 0.4, ("linear", "conv"), lambda size, count: random_channels(size, count, rng)
    )
    assert_alike(*both(monkeypatch, model, part, samples(12, (1, 28, 28), 10)), part)


@needs_compiler
def test_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cnn-mnist", "cnn-cifar10"):
        model = build(NETS[name], generator(0, "init"))
        inputs = samples(131, NETS[name].input_shape, 10).inputs
        compiled = fused.fused_forward(model, model.initial(), inputs)
        monkeypatch.setattr(fused, "shapes_of", lambda *_: None)
        by_torch = fused.fused_forward(model, model.initial(), inputs)
        monkeypatch.undo()
        assert compiled is not None
        assert by_torch is not None
        torch.testing.assert_close(compiled, by_torch, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Flatten(), nn.Linear(192, 3)),
        nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.Flatten(), nn.Linear(27, 3)),
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(12, 3)),
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(75, 3)),
    ],
)
def test_what_it_does_not_know_is_left_to_torch(module: nn.Module) -> None:
    model = layered(module)
    inputs = torch.rand(5, 1, 8, 8)
    assert native.shapes_of(model, model.initial(), inputs) is None
    assert native.shapes_of(layered(nn.Sequential(nn.Linear(4, 3))), {}, torch.rand(5, 4).double()) is None


def test_inputs_are_left_alone() -> None:
    model = build(NETS["cnn-mnist"], generator(0, "init"))
    weights = {name: tensor.clone() for name, tensor in model.initial().items()}
    data, part = samples(10, (1, 28, 28), 10), full(model.structure)
    inputs = data.inputs.clone()
    site = Site({GLOBAL: model}, CLASSIFICATION, LocalSettings(1, 7, 0.1))
    fused.fused_train(site, [Task((part,), {MODEL: weights})], [part], [data], [Seeds(0, 0)])
    assert torch.equal(data.inputs, inputs)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.initial().items())


@pytest.mark.parametrize("compiler", ["", "#!/bin/sh\nexit 1\n"])
def test_without_a_working_compiler_there_is_none(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler:
        (tmp_path / "cc").write_text(compiler)
        (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()


def test_a_label_that_is_no_class_is_refused_and_not_read() -> None:
    model = build(NETS["fcnn-mnist"], generator(0, "init"))
    data, part = samples(10, (1, 28, 28), 10), full(model.structure)
    site = Site({GLOBAL: model}, CLASSIFICATION, LocalSettings(1, 7, 0.1))
    for label in (-1, 10, 2**40):
        data.targets[3] = label
        with pytest.raises(RuntimeError):
            fused.fused_train(site, [Task((part,), {MODEL: model.initial()})], [part], [data], [Seeds(0, 0)])


@needs_compiler
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("entries", [1, 1000, 3 * native.SLICE + 17])
def test_replies_are_summed_to_the_bits_of_torch(entries: int, fresh: bool) -> None:
    draw = torch.Generator().manual_seed(entries)
    before, now, *replies = (torch.randn(entries, generator=draw) for _ in range(5))
    shares = [1.0, 0.3, 7.0]
    wanted = torch.zeros(entries) if fresh else before.clone()
    for reply, share in zip(replies, shares, strict=True):
        wanted += (reply - now) * share
    assert native.native_fold(before, now, replies, shares, fresh=fresh)
    assert torch.equal(before, wanted)


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((7,), ([0, 3, 6],)),
        ((5, 9), ([1, 4], None)),
        ((5, 9), (None, [0, 2, 8])),
        ((5, 9), ([], [0, 2])),
        ((4, 6, 3, 3), ([0, 3], [1, 2, 5], None, None)),
        ((4, 6, 3, 3), (None, None, None, None)),
    ],
)
def test_cut_replies_are_added_to_the_bits_of_torch(
    shape: tuple[int, ...], axes: tuple[list[int] | None, ...]
) -> None:
    draw = torch.Generator().manual_seed(len(shape))
    sums, covers = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
    places = tuple(None if kept is None else np.array(kept, dtype=np.int64) for kept in axes)
    values = torch.randn(local_shape(Indices(places), shape), generator=draw)
    wanted, covered = sums.clone(), covers.clone()
    add_at(wanted, Indices(places), values)
    add_at(covered, Indices(places), 0.3)
    assert native.native_add_at(sums, covers, places, values, 0.3)
    assert torch.equal(sums, wanted)
    assert torch.equal(covers, covered)


@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        ((np.array([0, 4]), None), (2, 4)),
        ((np.array([-1, 2]), None), (2, 4)),
        ((np.array([0, 1]), None), (3, 4)),
    ],
)
def test_no_cut_reply_is_written_outside_its_tensor(
    axes: tuple[np.ndarray | None, ...], cut: tuple[int, ...]
) -> None:
    sums, covers = torch.zeros(4, 4), torch.zeros(4, 4)
    assert not native.native_add_at(sums, covers, axes, torch.ones(cut), 1.0)
    assert not sums.any()
    assert not covers.any()


def test_what_the_compiled_sum_does_not_know_is_left_to_torch() -> None:
    single, double = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float64)
    assert not native.native_fold(double, double, [double], [1.0], fresh=True)
    assert not native.native_fold(single.t()[:2], single.t()[:2], [single.t()[:2]], [1.0], fresh=True)
    assert torch.equal(double, torch.ones_like(double))
