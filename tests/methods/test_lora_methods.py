"""FedRA and FlexLoRA: which adapters a device gets, and how the server makes one of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benches import Bench, trained
from torch import nn

import fedpmt
from fedpmt import api
from fedpmt.methods.fedra import FedRA, shortened
from fedpmt.methods.flexlora import FlexLoRA, lower_ranks
from fedpmt.models.adapters import find_adapters
from fedpmt.models.layered import layered
from fedpmt.parts.part import left_out
from fedpmt.pricing.price import Price
from fedpmt.testing import samples
from fedpmt.testing.bench import adapted_net
from fedpmt.training.local import Job, LocalWork
from fedpmt.training.loop import train
from fedpmt.types import SettingError
from models.zoo import labels_of, lora_bert, words
from support import SMALL

BLOCK = 4 * 8 * 2  # entries of an adapter of rank 4
HEAD = 8 * 3 + 3


def drawn(bench: Bench, device: int, index: int = 0, budget: float = float("inf")) -> tuple[int, ...]:
    """The blocks that a device is to train."""
    missing = left_out(bench.model.structure, bench.task(device, index, budget).offer[0])
    return tuple(place for place in range(3) if place not in missing)


def test_blocks_are_drawn_by_device_and_round_as_many_as_fit() -> None:
    bench = Bench(FedRA())
    for count in (1, 2, 3):
        draws = [drawn(bench, k, t, HEAD + count * BLOCK) for k in range(4) for t in range(8)]
        assert {len(draw) for draw in draws} == {count}
        assert {place for draw in draws for place in draw} == {0, 1, 2}
    assert len(drawn(bench, 0, budget=1)) == 1
    assert len(drawn(Bench(FedRA(blocks=2)), 0)) == 2


def test_a_device_trains_the_net_without_the_blocks_that_it_did_not_draw() -> None:
    """To the bit what it would be in a module that has only the others."""
    bench = Bench(FedRA())
    budget = HEAD + 2 * BLOCK
    device, index = next((k, t) for k in range(8) for t in range(8) if drawn(bench, k, t, budget) == (0, 2))
    reply = bench.reply(device, index, budget)
    shorter = [child for name, child in adapted_net().named_children() if name != "5"]
    model = layered(nn.Sequential(*shorter), example=samples(2).inputs)
    task = Bench(fedpmt.FedAvg(), model).task(device, index)
    site = Bench(fedpmt.FedAvg(), model).site
    seeds = bench.round(index).rng
    data = samples(8, seed=device)
    alone, _ = train(
        LocalWork(),
        Job(site, task, task.offer[0], None, data, lambda purpose: seeds(purpose, device), device),
    )
    names = dict(zip(reply.update, alone.update, strict=True))
    assert [name.partition(".")[0] for name in reply.update] == ["3"] * 2 + ["7"] * 2 + ["9"] * 2
    for ours, theirs in names.items():
        assert torch.equal(reply.update[ours], alone.update[theirs])
        assert reply.update[ours].any() or ours.endswith("lora_A")  # whose gradient is zero as long as B is


def test_price_goes_by_how_many_blocks_and_not_by_which() -> None:
    model = layered(adapted_net(), example=samples(2).inputs)
    price = Price(model, mode="exact", batch=4, samples=8, cached=False, example=samples(2).inputs)
    costs = {
        missing: price(shortened(model.structure, missing, 3))
        for missing in [(), (0,), (1,), (2,), (0, 1), (1, 2)]
    }
    assert costs[0,] == costs[1,] == costs[2,]
    assert costs[0, 1] == costs[1, 2]
    whole, two, one = costs[()], costs[0,], costs[0, 1]
    # A block's frozen weight and its adapter run forward, and the error passes through both again.
    assert whole.forward - two.forward == two.forward - one.forward == 4 * (8 * 8 + 2 * 8 * 4)
    assert whole.operations > two.operations > one.operations
    # Neither its frozen weight and bias are held, nor the adapter as received, as trained, and its gradient.
    assert whole.memory.weights - two.memory.weights == 4 * (8 * 8 + 8 + 2 * BLOCK)


def bert_run(method: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    module, inputs = lora_bert(initializer_range=0.3), words()
    data = (inputs, labels_of(inputs))
    given = {
        "devices": 6, "cohort": 4, "samples": 8, "batch": 4, "rounds": 3, "lr": 0.1, "workers": 1, **settings
    }  # fmt: skip
    return fedpmt.run(method, model=module, train=data, test=data, **given)


def test_devices_that_can_do_everything_are_fedavg_to_the_bit() -> None:
    runs = [bert_run(method, levels="1", depths=1) for method in ("fedra", "fedavg")]
    assert len({run.result.weights_sha256 for run in runs}) == 1
    assert runs[0].result.operations == runs[1].result.operations


def test_it_runs_on_a_model_wrapped_by_peft() -> None:
    run = bert_run(FedRA(blocks=1), rounds=12, optimizer="adam", lr=0.02, levels="1/3,1/2,1", assign="level")
    assert run.result.loss < 0.95 * run.rounds[0].loss
    # Query and value of one block of two, 4 bytes each, and the head.
    assert {one.bytes_up for one in run.rounds[0].devices} == {4 * (2 * 2 * 2 * 16 + 16 * 4 + 4)}
    blocks = [sum(step.layers[name] for step in run.rounds) for name in list(run.rounds[0].layers)[:2]]
    assert sum(blocks) == 12 * 4
    assert min(blocks) > 0


@pytest.mark.parametrize("method", ["fedra", "flexlora"])
def test_a_model_without_adapters_is_refused(method: str, tmp_path: Any) -> None:
    with pytest.raises(SettingError, match="needs a model with LoRA adapters") as refused:
        api.run(method, out=tmp_path / "run", **SMALL)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_no_block_is_refused() -> None:
    with pytest.raises(SettingError, match=r"fedra\.blocks must be >= 1 \(got 0\)"):
        FedRA(blocks=0)


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
