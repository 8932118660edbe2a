"""DepthFL, InclusiveFL, FIARSE and FeDepth: what each device gets, what it trains, and what that costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benches import Bench, trained, work_cost

from fedpmt import api
from fedpmt.methods.fiarse import FIARSE
from fedpmt.models.build import build
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import full
from fedpmt.parts.mask import largest_entries, prunable
from fedpmt.parts.part import Mask
from fedpmt.pricing.meter import download_bytes, upload_bytes
from fedpmt.pricing.price import Price
from fedpmt.seeds import generator
from fedpmt.testing import samples
from fedpmt.types import MODEL, SettingError
from support import SMALL

NET: dict[str, Any] = {**SMALL, "task": "cnn-mnist", "cohort": 3, "devices": 3}


def priced(task: str = "cnn-mnist") -> tuple[Any, Price]:
    """One of the paper's nets, and what its parts cost."""
    model = build(NETS[task], generator(0, "init"))
    example = torch.zeros(2, *NETS[task].input_shape)
    return model, Price(model, mode="exact", batch=10, samples=20, cached=False, example=example)


def test_fiarse_gives_a_device_the_largest_weights() -> None:
    bench = Bench(FIARSE(size=0.25))
    weights = {name: bench.state.tensors[name].abs().numpy() for name in prunable(bench.model.structure)}
    every = np.sort(np.concatenate([one.reshape(-1) for one in weights.values()]))
    least = every[-(-3 * len(every) // 4)]
    sent = bench.task(0).offer[0].sent
    for name, selection in sent.items():
        if name in weights and isinstance(selection, Mask):
            np.testing.assert_array_equal(selection.bits, weights[name] >= least)
        else:
            assert name.endswith("bias") or bool((weights[name] >= least).all())
    by_layer = Bench(FIARSE(size=0.25, scope="layer")).task(0).offer[0].sent
    shares = [by_layer[name].bits.mean() for name in weights]
    assert shares == pytest.approx([0.25] * len(shares), abs=0.05)


def test_fiarse_takes_the_step_of_its_formula() -> None:
    """θ <- θ - η g (1 + 2 τ |θ| / (|θ| + τ)²), with g the gradient of the net whose other weights are zero."""
    bench = Bench(FIARSE(size=0.3), batch=8, learning_rate=0.1)
    reply, task = bench.reply(0), bench.task(0)
    cut = bench.method.cut(bench.state, 0.3)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in cut.items()}
    data = samples(8, seed=0)
    loss = bench.site.objective.loss(bench.model.forward(leaves, data.inputs), data.targets)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    masks = {name: one for name, one in task.offer[0].sent.items() if isinstance(one, Mask)}
    threshold = min(float(task.tensors[MODEL][name].abs().min()) for name in masks)
    for name, change in reply.update.items():
        bits = torch.from_numpy(masks[name].bits) if name in masks else torch.ones_like(cut[name]).bool()
        own, gradient = cut[name][bits], gradients[name][bits]
        size = own.abs()
        factor = 1 + 2 * threshold * size / (size + threshold) ** 2 if name in masks else 1
        torch.testing.assert_close(change.reshape(own.shape), -0.1 * gradient * factor)


def test_fiarse_averages_a_weight_over_the_devices_that_had_it() -> None:
    bench = Bench(FIARSE())
    replies = [bench.reply(0, budget=90), bench.reply(1)]
    after = bench.aggregate(replies).state.tensors["4.weight"]
    selection = replies[0].part.trained["4.weight"]
    assert isinstance(selection, Mask)
    bits = torch.from_numpy(selection.bits)
    weak, strong = (trained(bench.state.tensors, reply)["4.weight"] for reply in replies)
    assert 0 < bits.float().mean() < 0.5
    torch.testing.assert_close(after[bits], (weak + strong[bits]) / 2)
    torch.testing.assert_close(after[~bits], strong[~bits])


def test_fiarse_saves_bytes_and_no_time() -> None:
    model, price = priced()
    bench = Bench(FIARSE(size=0.1), model)
    structure, work = model.structure, bench.method.local
    whole, part = full(structure), bench.task(0).offer[0]
    assert download_bytes(part, structure) + part.overhead_bytes < 0.2 * download_bytes(whole, structure)
    assert upload_bytes(part, structure) < 0.2 * upload_bytes(whole, structure)
    dense, sparse = work_cost(work, whole, price, structure), work_cost(work, part, price, structure)
    assert (sparse.forward, sparse.error, sparse.gradient) == (dense.forward, dense.error, dense.gradient)
    assert sparse.memory_bytes > dense.memory_bytes


def test_fiarse_of_full_size_is_fedavg_in_a_whole_run() -> None:
    runs = [
        api.run(name, options=options, **NET) for name, options in (("fiarse", {"size": 1}), ("fedavg", {}))
    ]
    ours, theirs = (run.result for run in runs)
    assert ours is not None
    assert theirs is not None
    assert ours.weights_sha256 == theirs.weights_sha256
    assert list(ours.score_by_width or {}) == ["1", "0.25", "0.0625", "0.015625"]
    assert (ours.score_by_width or {})["1"] == ours.score


def test_at_least_one_weight_is_kept() -> None:
    assert largest_entries({"a": np.array([1.0, 3.0, 2.0])}, 0.01)["a"].tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (FIARSE, {"size": 0.0}, r"fiarse\.size must be > 0 and <= 1 \(got 0\.0\)"),
    ],
)
def test_wrong_settings_are_refused(method: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        method(**options)
