from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, check_fast_path, local_job, takes_fast_path, trained
from torch import nn

import fedpmt
from fedpmt.methods.averaging import Averaged
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.methods.ist import IST
from fedpmt.methods.slicing import HALVING
from fedpmt.models.build import build
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, Whole, size
from fedpmt.pricing.price import Price
from fedpmt.seeds import generator
from fedpmt.training.local import Job, LocalSettings
from fedpmt.training.loop import train
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.training.optimizers import SGD
from fedpmt.types import MODEL, SettingError
from models.nets_of_users import ResNet
from support import FEW, images, samples, stored_accuracy

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.training.messages import Reply, Task
    from fedpmt.types import Examples

FIRST = Bench(HeteroFL()).round(0)  # slices are the same in every round


def job(bench: Bench, task: Task, data: Examples) -> Job[Any]:
    """A device's local round."""
    rng = bench.round(0).rng
    return Job(bench.site, task, task.offer[0], None, data, lambda purpose: rng(purpose, 0))


def cnn() -> nn.Sequential:
    """The paper's CNN for one input channel: 64-128-256-512, each with bias and an affine norm."""
    modules: list[nn.Module] = []
    channels = 1
    for filters in (64, 128, 256, 512):
        modules += [nn.Conv2d(channels, filters, 3, padding=1), nn.BatchNorm2d(filters), nn.ReLU()]
        modules += [nn.MaxPool2d(2)] if filters < 512 else [nn.AdaptiveAvgPool2d(1)]
        channels = filters
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(512, 10))


def test_parameter_counts_of_levels_a_to_e() -> None:
    """64 + 9 · 64 = 640 and so on by hand for level a; the Flower baseline prints the same five counts."""
    model = layered(cnn())
    state = Averaged(model.structure, {})
    counts = []
    for rate in HALVING:
        part = HeteroFL().slice(state, rate, FIRST)
        shapes = model.structure.shapes
        counts.append(sum(size(part.sent[name], shapes[name]) for name in model.structure.parameters))
    assert counts == [1_556_874, 391_370, 98_922, 25_274, 6_594]


def test_a_narrow_device_never_touches_what_lies_behind_its_slice() -> None:
    bench = Bench(HeteroFL(rate=0.5))
    reply = bench.reply(0)
    assert reply.part.overhead_bytes == 0
    after = bench.aggregate([reply]).state.tensors
    before = bench.state.tensors
    # 4 filters and 8 neurons at r = 1/2; a filter owns 9 inputs of the linear layer.
    inside = {"0.weight": np.s_[:2], "0.bias": np.s_[:2], "4.weight": np.s_[:4, :18], "4.bias": np.s_[:4]}
    inside |= {"6.weight": np.s_[:, :4], "6.bias": np.s_[:]}
    for name, corner in inside.items():
        rest = after[name].clone()
        rest[corner] = before[name][corner]
        assert torch.equal(rest, before[name])
        assert not torch.equal(after[name], before[name])


def test_devices_count_the_same_whatever_they_hold() -> None:
    bench = Bench(HeteroFL(rate=1.0))
    small, large = bench.reply(0, count=4), bench.reply(1, count=20)
    after = bench.aggregate([small, large]).state.tensors
    one, other = (trained(bench.state.tensors, reply) for reply in (small, large))
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, (one[name] + other[name]) / 2, rtol=1e-5, atol=1e-7)


class TestMask:
    def with_classes(self, held: list[int], rate: float = 0.5, **options: Any) -> tuple[Bench, Reply]:
        bench = Bench(HeteroFL(rate=rate, **options), optimizer=SGD(weight_decay=0.1))
        counts = np.isin(np.arange(3), held).astype(int)
        client = replace(bench.client(0), label_counts=counts)
        task = bench.method.assign(bench.state, client, bench.round(0))
        data = samples(12)
        data = data.take(np.flatnonzero(np.isin(data.targets.numpy(), held)))
        reply, _ = train(bench.method.local, job(bench, task, data))
        return bench, reply

    def test_rows_of_absent_classes_are_neither_sent_back_nor_moved(self) -> None:
        bench, reply = self.with_classes([0, 2])
        assert reply.update["6.weight"].shape == (2, 4)
        assert reply.update["6.bias"].shape == (2,)
        after = bench.aggregate([reply]).state.tensors
        before = bench.state.tensors
        assert torch.equal(after["6.weight"][1], before["6.weight"][1])
        assert torch.equal(after["6.bias"][1], before["6.bias"][1])
        assert not torch.equal(after["6.bias"][[0, 2]], before["6.bias"][[0, 2]])

    def test_a_class_is_averaged_over_its_holders(self) -> None:
        bench, some = self.with_classes([0, 2])
        _, all_ = self.with_classes([0, 1, 2])
        after = bench.aggregate([some, all_]).state.tensors["6.bias"]
        one, other = (trained(bench.state.tensors, reply)["6.bias"] for reply in (some, all_))
        wanted = torch.stack([(one[0] + other[0]) / 2, other[1], (one[1] + other[2]) / 2])
        torch.testing.assert_close(after, wanted)

    def test_absent_logits_are_zero_and_get_no_gradient(self) -> None:
        bench = Bench(HeteroFL(rate=1.0))
        client = replace(bench.client(0), label_counts=np.array([3, 0, 1]))
        task = bench.method.assign(bench.state, client, bench.round(0))
        work, data = bench.method.local, samples(6)
        data = replace(data, targets=data.targets.clamp(max=0))
        run = work.start(job(bench, task, data))
        loss = work.loss(run, data)
        logits = bench.model.forward(bench.state.tensors, data.inputs)
        logits[:, 1] = 0
        # log Σ exp z - z_0 with z_1 = 0: the absent class keeps its exp(0) = 1 in the sum.
        wanted = (torch.log(logits[:, 0].exp() + 1 + logits[:, 2].exp()) - logits[:, 0]).mean()
        torch.testing.assert_close(loss, wanted)
        (gradient,) = torch.autograd.grad(loss, [run.params["6.bias"]])
        assert gradient[1] == 0
        assert (gradient[[0, 2]] != 0).all()

    def test_without_it_all_rows_are_trained(self) -> None:
        _, reply = self.with_classes([0, 2], masked=False)
        assert reply.update["6.bias"].shape == (3,)


def test_scaler_divides_hidden_outputs_by_the_rate_in_training_only() -> None:
    bench = Bench(HeteroFL(rate=0.4))
    task = bench.method.assign(bench.state, bench.client(0), bench.round(0))
    run = bench.method.local.start(job(bench, task, samples(5)))
    local, inputs = task.tensors[MODEL], samples(5).inputs
    hidden = nn.functional.conv2d(inputs, local["0.weight"], local["0.bias"]) / 0.4
    hidden = nn.functional.max_pool2d(hidden.relu(), 2).flatten(1)
    hidden = (nn.functional.linear(hidden, local["4.weight"], local["4.bias"]) / 0.4).relu()
    wanted = nn.functional.linear(hidden, local["6.weight"], local["6.bias"])
    torch.testing.assert_close(run.forward(run.tensors, inputs), wanted)
    plain = bench.method.predictor(bench.state)
    torch.testing.assert_close(
        bench.model.forward(plain.tensors, inputs), bench.model.module(inputs), rtol=0, atol=0
    )


def test_gradients_are_clipped_to_a_norm() -> None:
    work = HeteroFL(clip=1.0).local
    large = {"a": torch.full((3,), 4.0), "b": torch.full((2,), -3.0)}
    clipped = work.correct(None, large)  # type: ignore[arg-type]
    norm = torch.cat(list(clipped.values())).norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-5)
    small = {"a": torch.full((3,), 0.01)}
    assert torch.equal(work.correct(None, small)["a"], small["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("rates", "among"), [("matched", None), ("halving", HALVING)])
def test_budget_gives_the_largest_rate_that_fits(rates: Any, among: tuple[float, ...] | None) -> None:
    bench = Bench(HeteroFL(rates=rates))
    grid = sorted(among or [step / 100 for step in range(1, 101)])
    method = HeteroFL(rates=rates)
    for budget in (1.0, 40.0, 150.0, 260.0, 1000.0):
        chosen = method.rate_of(bench.state, bench.client(0, budget), bench.round(0))
        fitting = [r for r in grid if bench.price(method.slice(bench.state, r, FIRST)).operations <= budget]
        assert chosen == (fitting[-1] if fitting else grid[0])


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("held", [10, 4])
def test_the_fast_path_does_what_the_oracle_does(net: str, held: int) -> None:
    check_fast_path(HeteroFL(), net, held=held)


def test_the_fast_path_knows_momentum_and_decay_but_no_clipping() -> None:
    check_fast_path(HeteroFL(), "cnn-mnist", held=5, optimizer=SGD(0.9, weight_decay=0.01))
    assert not takes_fast_path(HeteroFL(clip=1.0), "cnn-mnist")
    # Where there is no norm, none has to be frozen.
    assert takes_fast_path(HeteroFL(norm="frozen"), "cnn-mnist")


def test_full_width_is_whole() -> None:
    part = local_job(HeteroFL(), "cnn-mnist", share=2.0).part
    assert all(isinstance(selection, Whole) for selection in part.trained.values())


def test_a_rate_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SettingError, match=r"heterofl\.rate must be > 0 and <= 1 \(got 0\)"):
        HeteroFL(rate=0)


class TestBatchNorm:
    def test_statistics_are_not_sent_back_and_what_was_received_stays(self) -> None:
        torch.manual_seed(0)
        bench = Bench(HeteroFL(rate=0.5), layered(ResNet(), example=torch.zeros(2, 1, 8, 8)))
        before = {name: tensor.clone() for name, tensor in bench.state.tensors.items()}
        reply = bench.reply(0)
        assert not any("running" in name for name in reply.update)
        assert "blocks.0.bn1.weight" in reply.update
        assert all(torch.equal(bench.state.tensors[name], before[name]) for name in before)

    @pytest.mark.parametrize("method", [HeteroFL(rate=0.5, norm="frozen"), IST(norm="frozen", scaling=False)])
    def test_frozen_statistics_are_used_and_stay(self, method: HeteroFL | IST) -> None:
        torch.manual_seed(0)
        module = ResNet()
        module.bn.running_mean = torch.full((4,), 0.3)  # as a model that was trained before has them
        bench = Bench(method, layered(module, example=torch.zeros(2, 1, 8, 8)))
        reply = bench.reply(0)
        assert not any("running" in name for name in reply.update)
        after = bench.aggregate([reply]).state.tensors
        assert all(torch.equal(after[name], bench.state.tensors[name]) for name in after if "running" in name)
        assert not torch.equal(after["bn.weight"], bench.state.tensors["bn.weight"])
        assert method.predictor(bench.state).statistics == "stored"
        # In training as in evaluation: what a sample gives does not depend on its batch.
        task = method.assign(bench.state, bench.client(0), bench.round(0))
        data = samples(6)
        run = method.local.start(job(bench, task, data))
        alone, among = (run.forward(run.tensors, data.inputs[:count])[0] for count in (1, 6))
        torch.testing.assert_close(alone, among)

    def test_layers_before_a_frozen_norm_are_not_scaled(self) -> None:
        """Its statistics are of outputs as they were: scaled ones would come out of it far from the mean."""
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3)),
        )
        scaled = {}
        for norm in ("static", "frozen"):
            bench = Bench(HeteroFL(rate=0.5, norm=norm), net)
            task = bench.method.assign(bench.state, bench.client(0), bench.round(0))
            scaled[norm] = bench.method.local.factors(task, task.offer[0], bench.model.structure)
        hidden = {"4.weight": 2.0, "4.bias": 2.0}
        assert scaled == {"static": {"0.weight": 2.0, "0.bias": 2.0, **hidden}, "frozen": hidden}

    def test_a_resnet_is_evaluated_with_the_statistics_of_devices_data(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        run = fedpmt.run(
            "heterofl",
            model=ResNet(),
            train=images(120),
            test=images(60, 1),
            out=tmp_path / "run",
            rounds=8,
            lr=0.1,
            **FEW,
        )
        assert run.result is not None
        assert run.result.accuracy is not None
        assert run.result.accuracy > 0.6
        # The stored model is the one that was evaluated.
        fresh = ResNet()
        assert stored_accuracy(tmp_path / "run", fresh, images(60, 1)) == pytest.approx(run.result.accuracy)
        assert not torch.equal(fresh.state_dict()["bn.running_mean"], torch.zeros(4))


def test_statistics_found_anew_are_means_over_batches() -> None:
    from fedpmt.methods.base import Predictor
    from fedpmt.simulation.evaluation import with_statistics
    from fedpmt.simulation.executors import Plain

    torch.manual_seed(0)
    model = layered(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)))
    executor = Plain({GLOBAL: model}, CLASSIFICATION, LocalSettings(1, 4, 0.1))
    shards = [samples(count, (4,), 2, seed) for seed, count in enumerate((5, 9))]
    weights = model.initial()
    found = with_statistics(executor, Predictor("global", GLOBAL, weights), model.structure, shards)
    hidden = [nn.functional.linear(one.inputs, weights["0.weight"], weights["0.bias"]) for one in shards]
    torch.testing.assert_close(found.tensors["1.running_mean"], (hidden[0].mean(0) + hidden[1].mean(0)) / 2)
    torch.testing.assert_close(found.tensors["1.running_var"], (hidden[0].var(0) + hidden[1].var(0)) / 2)
    assert torch.equal(weights["1.running_mean"], torch.zeros(3))
    assert model.module[1].momentum == 0.1  # type: ignore[index]


def test_cost_grows_with_the_rate_up_to_that_of_the_whole_model() -> None:
    model = build(NETS["cnn-mnist"], generator(0, "init"))
    price = Price(
        model,
        mode="exact",
        batch=12,
        samples=60,
        cached=True,
        example=np.zeros((2, 1, 28, 28)),
    )
    state = Averaged(model.structure, model.initial())
    costs = [price(HeteroFL().slice(state, rate, FIRST)) for rate in (0.1, 0.25, 0.5, 0.75, 1.0)]
    operations = [cost.operations for cost in costs]
    assert operations == sorted(set(operations))
    assert [cost.memory_bytes for cost in costs] == sorted({cost.memory_bytes for cost in costs})
    assert costs[-1] == price(full(model.structure))
