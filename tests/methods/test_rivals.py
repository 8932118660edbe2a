"""DepthFL, InclusiveFL, FIARSE and FeDepth: what each device gets, what it trains, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, Quadratics, trained, work_cost
from safetensors.torch import load_file
from torch import nn

import fedpmt
from fedpmt import api
from fedpmt.methods.depthfl import DepthFL, Distilling, InclusiveFL
from fedpmt.methods.exits import WithExits, pool
from fedpmt.methods.fedepth import BlockByBlock, FeDepth, block_part, blocks_of
from fedpmt.methods.fiarse import FIARSE
from fedpmt.models.build import build
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import full
from fedpmt.parts.mask import largest_entries, prunable
from fedpmt.parts.part import Mask
from fedpmt.pricing.meter import download_bytes, upload_bytes
from fedpmt.pricing.price import Price
from fedpmt.seeds import Seeds, generator
from fedpmt.testing import ON_A_BENCH, check_method, samples
from fedpmt.testing.checks import server_optimizer_skips_uncovered_entries
from fedpmt.training.local import Job
from fedpmt.training.loop import train
from fedpmt.types import MODEL, SettingError
from models.nets_of_users import ResNet
from models.zoo import ZOO
from support import FEW, SMALL, images

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FEDAVG: tuple[str, dict[str, Any]] = ("fedavg", {})
NET: dict[str, Any] = {**SMALL, "task": "cnn-mnist", "cohort": 3, "devices": 3}


def priced(task: str = "cnn-mnist") -> tuple[Any, Price]:
    """One of the paper's nets, and what its parts cost."""
    model = build(NETS[task], generator(0, "init"))
    example = torch.zeros(2, *NETS[task].input_shape)
    return model, Price(model, mode="exact", batch=10, samples=20, cached=False, example=example)


DEEP = {"exits.1.weight", "exits.2.weight"}


def deep_net() -> nn.Sequential:
    """Three hidden layers, so that two exits can stand before the classifier."""
    torch.manual_seed(0)
    hidden = [module for _ in range(2) for module in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), *hidden, nn.Linear(8, 3))


def entries(bench: Bench, net: str) -> float:
    """What a bench charges for a net: the entries it trains."""
    structure = bench.models[net].structure
    return float(structure.size(structure.parameters))


def test_depthfl_averages_a_tensor_over_the_devices_that_are_deep_enough() -> None:
    bench = Bench(DepthFL(), deep_net())
    budgets = [entries(bench, "until 1"), entries(bench, "until 2"), float("inf")]
    replies = [bench.reply(device, budget=budget) for device, budget in enumerate(budgets)]
    assert [reply.part.label for reply in replies] == [f"depth {depth} of 3" for depth in (1, 2, 3)]
    after = bench.aggregate(replies).state.tensors
    own = [trained(bench.state.tensors, reply) for reply in replies]
    for name, depth in [("1.weight", 1), ("3.weight", 2), ("5.weight", 3), ("7.weight", 3)]:
        holders = [one[name] for one in own if name in one]
        assert len(holders) == 4 - depth
        torch.testing.assert_close(after[name], torch.stack(holders).mean(dim=0))
    # An exit belongs to all devices that are deep enough in DepthFL, and to those that end there in InclusiveFL.
    assert [DEEP & set(one) for one in own] == [{"exits.1.weight"}, DEEP, DEEP]
    plain = Bench(InclusiveFL(), deep_net())
    held = [set(plain.task(0, budget=budget).offer[0].sent) & DEEP for budget in budgets]
    assert held == [{"exits.1.weight"}, {"exits.2.weight"}, set()]


def test_depthfl_minimises_its_formula() -> None:
    """Σ_i CE_i + w_t / (d - 1) Σ_{i≠j} KL(p_j || p_i), with no gradient into p_j, by hand for one step."""
    bench = Bench(DepthFL(ramp=0), deep_net(), batch=8, learning_rate=0.1)
    net, data = bench.models["all exits"], samples(8, seed=0)
    net.set_training([True] * len(net.structure.layers))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in bench.state.tensors.items()}
    outputs = net.forward(leaves, data.inputs)
    logs = [torch.log_softmax(one, dim=1) for one in outputs]
    loss = -torch.stack([log[torch.arange(8), data.targets].mean() for log in logs]).sum()
    for pupil in range(3):
        for teacher in {0, 1, 2} - {pupil}:
            said = logs[teacher].detach()
            loss = loss + (said.exp() * (said - logs[pupil])).sum(dim=1).mean() / 2
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for name, change in bench.reply(0).update.items():
        torch.testing.assert_close(change, -0.1 * gradients[name], rtol=1e-4, atol=1e-7)


def test_distillation_begins_slowly() -> None:
    work = Distilling(2.0, 300)
    assert work.weight(0) == pytest.approx(2 * np.exp(-5))
    assert work.weight(150) == pytest.approx(2 * np.exp(-5 / 4))
    assert work.weight(300) == work.weight(1000) == 2.0


def disagreement(distil: float) -> float:
    """How far apart the exits are after a few rounds: the mean KL between them."""
    bench = Bench(DepthFL(distil=distil, ramp=0), deep_net(), learning_rate=0.2, epochs=4)
    for index in range(4):
        bench.state = bench.aggregate([bench.reply(device, index) for device in range(4)], index).state
    net = bench.models["all exits"]
    net.set_training([True] * len(net.structure.layers))
    logs = [torch.log_softmax(one, dim=1) for one in net.forward(bench.state.tensors, samples(64).inputs)]
    pairs = [(one, other) for one in logs for other in logs if one is not other]
    return float(torch.stack([(one.exp() * (one - other)).sum(dim=1).mean() for one, other in pairs]).mean())


def test_exits_disagree_less_with_distillation_than_without() -> None:
    assert disagreement(1.0) < 0.8 * disagreement(0.0)


def test_a_device_runs_and_pays_for_nothing_behind_its_exit() -> None:
    model = layered(deep_net())
    nets = DepthFL().models(model, samples(2).inputs, generators)
    price = Price(
        model, mode="exact", batch=4, samples=8, cached=False, example=samples(2).inputs, others=nets
    )
    bench = Bench(DepthFL(), model)
    *early, whole, plain = bench.method.depths(bench.state.model.structure)
    # Of a sample: 64 · 8 of the first layer, 8 · 8 of each other hidden one, 8 · 3 of each classifier.
    assert [price(part).forward / 4 for part in early] == [512 + 24, 512 + 64 + 48]
    assert [price(part).forward / 4 for part in (whole, plain)] == [512 + 128 + 72, 512 + 128 + 24]
    assert price(early[0]).memory_bytes < price(early[1]).memory_bytes < price(whole).memory_bytes
    last, *_ = InclusiveFL().depths(bench.state.model.structure)
    assert price(replace(plain, label="")) == price.full
    assert last.sent.keys() == early[0].sent.keys()


def generators(purpose: str) -> np.random.Generator:
    return generator(0, purpose)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("depthfl", {"exits": 1}),
        ("inclusivefl", {"exits": 1}),
        ("inclusivefl", {}),  # where all devices can afford the whole model
        ("fiarse", {"size": 1}),
        ("fedepth", {"blocks": 1}),
        ("fedepth", {}),  # where memory has no limit
    ],
)
def test_it_is_fedavg_in_a_whole_run(method: str, options: dict[str, Any]) -> None:
    capable: dict[str, Any] = {**NET, "levels": "1", "depths": 1}
    ours, theirs = (api.run(name, options=own, **capable).result for name, own in ((method, options), FEDAVG))
    assert ours is not None
    assert theirs is not None
    assert ours.weights_sha256 == theirs.weights_sha256


def test_the_ensemble_is_the_mean_of_all_exits_and_is_saved_with_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = fedpmt.run(
        DepthFL(predicts="ensemble"),
        model=ResNet(),
        train=images(150),
        test=images(60, 1),
        out=tmp_path / "run",
        rounds=3,
        lr=0.1,
        **FEW,
    )
    assert run.result is not None
    model = layered(ResNet(), example=torch.zeros(2, 1, 6, 6))
    net = DepthFL().models(model, torch.zeros(2, 1, 6, 6), generators)["all exits"].module
    assert isinstance(net, WithExits)
    net.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    inputs, labels = (torch.from_numpy(one) for one in images(60, 1))
    ensemble = net.eval()(inputs)
    assert float((ensemble.argmax(1) == labels).float().mean()) == pytest.approx(run.result.score)
    each = [net.get_submodule("exits")[name](tap(net, path, inputs)) for name, path in net.taps.items()]  # type: ignore[index]
    torch.testing.assert_close(ensemble, torch.stack([*each, net.__dict__["net"].eval()(inputs)]).mean(dim=0))
    assert run.rounds[0].layers[model.structure.layers[0].name] == FEW["cohort"]


def tap(net: nn.Module, path: str, inputs: Tensor) -> Tensor:
    """What a submodule gives."""
    heard: list[Tensor] = []
    handle = net.get_submodule(path).register_forward_hook(lambda *call: heard.append(call[2]))
    net.__dict__["net"](inputs)
    handle.remove()
    return heard[0]


@pytest.mark.parametrize(
    ("method", "reaches"), [(DepthFL(exits=1, dynamic=0.5), True), (DepthFL(exits=1), False)]
)
def test_feddyn_reaches_the_optimum_of_unequal_devices(method: DepthFL, reaches: bool) -> None:
    """Σ a_i b_i / Σ a_i, where FedAvg stops somewhere else, since each device takes several steps."""
    fleet = Quadratics(method, [1.0, 4.0], [0.0, 1.0], steps=5, learning_rate=0.1)
    for _ in range(200):
        fleet.play([0, 1])
    assert (abs(fleet.weight - 0.8) < 1e-6) == reaches


def test_feddyn_s_numbers() -> None:
    """One step of each device from 0, η = 0.1, α = 0.5, N = 2; then another.

    First: θ_k = (0, 0.4), λ_k = -α θ_k = (0, -0.2), mean 0.2, u = (0 + 0.4) / 2 = 0.2, θ = 0.4.
    Then:  g = (0.4, 4 (0.4 - 1) + 0.2 = -2.2), θ_k = (0.36, 0.62), mean 0.49, u = 0.2 + 0.18 / 2 = 0.29, θ = 0.78.
    """
    fleet = Quadratics(DepthFL(exits=1, dynamic=0.5), [1.0, 4.0], [0.0, 1.0], steps=1, learning_rate=0.1)
    assert fleet.play([0, 1]) == pytest.approx(0.4)
    assert fleet.play([0, 1]) == pytest.approx(0.78)


def test_momentum_distillation_by_hand() -> None:
    """Nets of one layer, of two, and the whole: the second layer has the third's shapes, and the first one's bias too.

    The whole net moves layers 2 and 3 by 2 and 4: m = 3. In the next round, with β = 0.25, a net of two layers that
    moves its last one by 1 is folded as 0.75 · 1 + 0.25 · 3 = 1.5, and what it says of its first layer stays.
    """
    bench = Bench(InclusiveFL(teaching=0.25), deep_net())
    assert [dict(lesson.tensors) for lesson in bench.method.lessons(bench.state.model.structure)] == [
        {"1.bias": ("1.bias", "3.bias")},
        {"3.weight": ("3.weight", "5.weight"), "3.bias": ("3.bias", "5.bias")},
    ]

    def moved(device: int, budget: float, **changes: float) -> Any:
        reply = bench.reply(device, budget=budget)
        update = {
            name: torch.full_like(change, changes.get(f"layer{name[0]}", 0.0))
            for name, change in reply.update.items()
        }
        return replace(reply, tensors={"update": update})

    weak = entries(bench, "until 2")
    first = bench.aggregate(
        [moved(0, float("inf"), layer3=2.0, layer5=4.0), moved(1, weak, layer3=1.0)]
    ).state
    plain = Bench(InclusiveFL(), deep_net())
    # Nothing was known before: the first round is as it is without.
    same = plain.aggregate([moved(0, float("inf"), layer3=2.0, layer5=4.0), moved(1, weak, layer3=1.0)]).state
    assert all(torch.equal(one, same.tensors[name]) for name, one in first.tensors.items())
    assert set(first.momentum["3.weight"].unique().tolist()) == {3.0}
    reply = moved(1, weak, layer1=1.0, layer3=1.0)
    bench.state = first
    after = bench.aggregate([reply]).state
    torch.testing.assert_close(after.tensors["3.weight"] - first.tensors["3.weight"], torch.full((8, 8), 1.5))
    torch.testing.assert_close(after.tensors["1.weight"] - first.tensors["1.weight"], torch.ones(8, 64))
    # Nobody had the whole net: what is known of it stays.
    assert torch.equal(after.momentum["3.weight"], first.momentum["3.weight"])


def test_momentum_is_refused_where_no_layers_are_alike() -> None:
    with pytest.raises(SettingError, match=r"inclusivefl\.teaching must be 0 for this model \(got 0\.2\)"):
        Bench(InclusiveFL(teaching=0.2))


@pytest.mark.parametrize("name", ["BERT", "timm resnet18", "timm vit_tiny", "LSTM"])
def test_exits_on_published_models(name: str) -> None:
    torch.manual_seed(0)
    published = ZOO[name]
    inputs = published.inputs()
    few = {key: one[:2] for key, one in inputs.items()} if isinstance(inputs, dict) else inputs[:2]
    model = layered(published.make(), example=few)
    nets = DepthFL().models(model, few, generators)
    whole = nets["all exits"].structure
    assert {name for name in whole.tensors if not name.startswith("exits.")} == set(model.structure.tensors)
    for depth, net in enumerate(nets.values(), start=1):
        assert set(net.structure.tensors) <= set(whole.tensors)
        net.set_training([True] * len(net.structure.layers))
        outputs = net.forward({**net.initial(), **net.local_buffers()}, few)
        assert [one.shape for one in outputs] == [(2, 4)] * depth


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
    masks = [one for name in weights if isinstance(one := by_layer[name], Mask)]
    shares = [one.bits.mean() for one in masks]
    assert len(masks) == len(weights)
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


def test_fiarse_scores_the_papers_sizes() -> None:
    result = api.run("fiarse", **NET).result
    assert result is not None
    assert list(result.score_by_width or {}) == ["1", "0.25", "0.0625", "0.015625"]
    assert (result.score_by_width or {})["1"] == result.score


def test_at_least_one_weight_is_kept() -> None:
    assert largest_entries({"a": np.array([1.0, 3.0, 2.0])}, 0.01)["a"].tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (FIARSE, {"size": 0.0}, r"fiarse\.size must be > 0 and <= 1 \(got 0\.0\)"),
        (FeDepth, {"blocks": 0}, r"fedepth\.blocks must be >= 1 \(got 0\)"),
        (DepthFL, {"exits": 0}, r"depthfl\.exits must be >= 1 \(got 0\)"),
        (InclusiveFL, {"teaching": 1.0}, r"inclusivefl\.teaching must be >= 0 and < 1 \(got 1\.0\)"),
        (
            InclusiveFL,
            {"teaching": 0.2, "mean": "median"},
            r"inclusivefl\.teaching must be 0 with a robust mean",
        ),
        (InclusiveFL, {"distil": -1.0}, r"inclusivefl\.distil must be >= 0 \(got -1\.0\)"),
        (
            DepthFL,
            {"dynamic": 0.1, "server": fedpmt.Momentum()},
            r"depthfl\.dynamic must be 0 with a server optimizer or a robust mean \(got 0\.1\)",
        ),
    ],
)
def test_wrong_settings_are_refused(method: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        method(**options)


def test_models_without_a_place_for_exits_are_refused() -> None:
    with pytest.raises(SettingError, match=r"depthfl\.exits must be <= 3 for a model of 4 layers \(got 4\)"):
        Bench(DepthFL(exits=4), deep_net())
    with pytest.raises(SettingError, match=r"fedepth\.blocks must be <= 3 for this model \(got 4\)"):
        Bench(FeDepth(blocks=4), deep_net())
    few = {key: one[:2] for key, one in ZOO["GPT-2"].inputs().items()}
    tied = layered(ZOO["GPT-2"].make(), example=few)
    with pytest.raises(SettingError, match="inclusivefl needs a model whose layers share no tensors"):
        InclusiveFL().models(tied, few, generators)


def test_images_are_pooled_and_few_features_are_not() -> None:
    grid = torch.arange(64.0).reshape(1, 1, 8, 8)
    assert pool(grid)[0, 0] == grid[0, 0, :2, :2].mean()
    assert torch.equal(pool(grid[0]), grid.reshape(1, -1))


def test_fedepth_trains_one_block_at_a_time() -> None:
    """After the steps of the first block only its layers have moved; the last block leaves it as it is."""
    bench = Bench(FeDepth(blocks=3), deep_net(), batch=4, epochs=3)
    structure = bench.state.model.structure
    blocks = blocks_of(structure, bench.task(0).offer[0])
    assert [block.label for block in blocks] == ["layers 1-1", "layers 2-2", "layers 3-4"]
    moved = [step_of(bench, steps) for steps in (2, 4, 6)]
    assert moved[0] == set(blocks[0].trained) == {"1.weight", "1.bias", "exits.1.weight", "exits.1.bias"}
    assert moved[1] == moved[0] | set(blocks[1].trained)
    assert moved[2] == set(structure.tensors)
    first, last = (update_of(bench, steps)["1.weight"] for steps in (2, 6))
    torch.testing.assert_close(first, last)


def update_of(bench: Bench, steps: int) -> dict[str, Tensor]:
    """What a local round has changed after some of its steps: the rest is taken at a rate of 0."""

    class Stopped(BlockByBlock):
        def start(self, job: Any) -> Any:
            run = super().start(job)
            run.rate = lambda step: 0.1 if step < steps else 0.0
            return run

    task = bench.task(0)
    job: Job[None] = Job(bench.site, task, task.offer[0], None, samples(8), Seeds(0, 0, 0), 0, 0)
    return dict(train(Stopped(), job)[0].update)


def step_of(bench: Bench, steps: int) -> set[str]:
    return {name for name, change in update_of(bench, steps).items() if bool(change.any())}


def test_fedepth_pays_for_its_largest_block_in_memory_and_for_all_of_them_in_operations() -> None:
    model, _ = priced()
    example = torch.zeros(2, *NETS["cnn-mnist"].input_shape)
    nets = FeDepth().models(model, example, generators)
    price = Price(model, mode="exact", batch=10, samples=20, cached=False, example=example, others=nets)
    structure, method = nets["all exits"].structure, FeDepth()
    part = method.part(structure, (1, 2))
    cost = work_cost(method.local, part, price, structure)
    each = [price(block_part(structure, first, last)) for first, last in ((0, 1), (1, 2), (2, 4))]
    largest = max(one.memory.step for one in each)
    assert cost.memory_bytes == cost.memory.weights + largest
    assert cost.memory_bytes < price.full.memory_bytes
    assert cost.operations == pytest.approx(sum(one.operations for one in each) / 3)
    assert 3 * cost.operations > price.full.operations
    # The layers behind a block don't run, those before it run forward.
    assert each[0].inference < each[1].inference < price.full.inference


@pytest.mark.parametrize(("share", "count"), [(1.0, 1), (0.9, 2), (0.1, 3)])
def test_fedepth_takes_as_few_blocks_as_fit_into_memory(share: float, count: int) -> None:
    """Where not even single layers fit, it has as many blocks as can be, and is marked."""
    run = api.run("fedepth", budget=f"memory={share}", **{**NET, "rounds": 1})
    devices = run.rounds[0].devices
    assert {int(device.part.split()[0]) for device in devices} == {count}
    whole = api.run("fedavg", **{**NET, "rounds": 1}).rounds[0].devices[0]
    for device in devices:
        assert device.over_budget == (share == 0.1)
        assert device.memory_bytes < whole.memory_bytes or count == 1
        assert device.operations > 0.9 * whole.operations
    assert run.rounds[0].layers == dict.fromkeys(run.rounds[0].layers, 3)


@pytest.mark.parametrize("method", [FeDepth(blocks=2), DepthFL(dynamic=0.1, predicts="ensemble")])
def test_other_settings_keep_the_contract(method: Any) -> None:
    checks = [check for check in ON_A_BENCH if check is not server_optimizer_skips_uncovered_entries]
    check_method(method, checks=checks)


def test_a_robust_mean_reaches_first_layers_and_exits() -> None:
    bench = Bench(DepthFL(mean="median"), deep_net())
    replies = [bench.reply(device) for device in range(3)]
    replies[0] = replace(replies[0], tensors={"update": {n: -100 * d for n, d in replies[0].update.items()}})
    after, honest = bench.aggregate(replies).state.tensors, bench.aggregate(replies[1:]).state.tensors
    largest = max(float(change.abs().max()) for reply in replies[1:] for change in reply.update.values())
    for name in ("1.weight", "exits.1.weight"):
        assert float((after[name] - honest[name]).abs().max()) <= 2 * largest
