from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benches import Bench, trained
from test_fedra import HEAD, bert_run
from torch import nn

import fedpmt
from fedpmt.methods.flexlora import FlexLoRA, lower_ranks
from fedpmt.models.adapters import find_adapters
from fedpmt.models.layered import layered
from fedpmt.testing import samples
from fedpmt.types import SettingError

COHORT = range(4)


def best(product: np.ndarray, rank: int) -> np.ndarray:
    """The nearest matrix of this rank, by NumPy."""
    u, s, v = np.linalg.svd(product, full_matrices=False)
    found: np.ndarray = (u[:, :rank] * s[:rank]) @ v[:rank]
    return found


def advanced(method: FlexLoRA, model: Any = None) -> Bench:
    """A bench after two rounds, so that no factor is zero any more."""
    bench = Bench(method, model, learning_rate=0.1)
    for index in range(2):
        bench.state = bench.aggregate([bench.reply(device, index) for device in COHORT], index).state
    return bench


def convolutions() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 64, 3),
    )  # fmt: skip
    module = fedpmt.lora(net, rank=4, targets=["2"])
    return layered(module, example=samples(2).inputs)


@pytest.mark.parametrize("model", [None, convolutions()], ids=["linear", "conv"])
@pytest.mark.parametrize("budgets", [(9e9,) * 4, (9e9, 150, 100, 80)], ids=["equal ranks", "unequal ranks"])
def test_new_factors_are_the_best_for_the_mean_of_products(model: Any, budgets: tuple[float, ...]) -> None:
    bench = advanced(FlexLoRA(), model)
    replies = [
        bench.reply(device, 2, budget, count=8 + device)
        for device, budget in zip(COHORT, budgets, strict=True)
    ]
    after = bench.aggregate(replies, 2).state.tensors
    models = [trained(bench.tensors, reply) for reply in replies]
    weights = np.array([reply.samples for reply in replies]) / sum(reply.samples for reply in replies)
    ranks = set()
    for adapter in find_adapters(bench.model.structure):
        products = []
        for one in models:
            up, down = (one[name].flatten(1).double().numpy() for name in (adapter.up, adapter.down))
            ranks.add(len(down))
            products.append(up @ down)
        mean = np.tensordot(weights, np.stack(products), 1)
        up, down = (after[name].flatten(1).numpy() for name in (adapter.up, adapter.down))
        np.testing.assert_allclose(up @ down, best(mean, adapter.rank), atol=1e-5)
        np.testing.assert_allclose(down @ down.T, np.eye(adapter.rank), atol=1e-5)
        # The first components matter most: what a device of a lower rank gets is the best it can get.
        np.testing.assert_allclose(up[:, :1] @ down[:1], best(mean, 1), atol=1e-5)
    assert (len(ranks) > 1) == (len(set(budgets)) > 1)
    head = next(name for name in reversed(list(bench.tensors)) if name.endswith("weight"))
    mean_head = sum(float(a) * one[head] for a, one in zip(weights, models, strict=True))
    torch.testing.assert_close(after[head], mean_head)


def test_what_nobody_trained_keeps_its_bits() -> None:
    bench = advanced(FlexLoRA())
    replies = [bench.reply(device, 2, HEAD + 3 * 16) for device in COHORT]  # rank one
    after = bench.aggregate(replies, 2).state.tensors
    for adapter in find_adapters(bench.model.structure):
        before_up, before_down = bench.tensors[adapter.up], bench.tensors[adapter.down]
        assert torch.equal(after[adapter.up][:, 1:], before_up[:, 1:])
        assert torch.equal(after[adapter.down][1:], before_down[1:])
        assert not torch.equal(after[adapter.up][:, :1], before_up[:, :1])
    still = [
        replace(
            reply,
            tensors={"update": {name: torch.zeros_like(one) for name, one in reply.update.items()}},
        )
        for reply in replies
    ]
    unchanged = bench.aggregate(still, 2).state.tensors
    assert all(torch.equal(one, bench.tensors[name]) for name, one in unchanged.items())


def test_a_lower_rank_saves_bytes_by_its_share() -> None:
    structure = Bench(FlexLoRA()).model.structure
    sizes = {
        rate: sum(
            structure.size([name]) if not hasattr(one, "axes") else 8 * 4 * rate
            for name, one in lower_ranks(structure, rate).trained.items()
        )
        for rate in (1, 0.5, 0.25)
    }
    assert sizes == {1: HEAD + 3 * 64, 0.5: HEAD + 3 * 32, 0.25: HEAD + 3 * 16}
    run = bert_run(FlexLoRA(rate=0.5), rounds=1, levels="1", depths=1)
    # Query and value of two blocks, rank one of two: 16 + 16 numbers each.
    assert {one.bytes_up for one in run.rounds[0].devices} == {4 * (2 * 2 * 32 + 16 * 4 + 4)}


def test_it_learns_with_unequal_ranks_on_a_model_wrapped_by_peft() -> None:
    run = bert_run(
        "flexlora", rounds=12, optimizer="adam", lr=0.02, levels="1/2,1", depths=2, budget="upload"
    )  # fmt: skip
    assert run.result.loss < 0.95 * run.rounds[0].loss
    assert len({one.part for one in run.rounds[0].devices}) == 2
    assert not any(one.over_budget for step in run.rounds for one in step.devices)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(SettingError, match=r"flexlora\.rate must be > 0 and <= 1 \(got 2\)"):
        FlexLoRA(rate=2)
    with pytest.raises(SettingError, match="does not average parts"):
        fedpmt.run("flexlora", server_optimizer="adam", rounds=1)
