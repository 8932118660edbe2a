from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, check_fast_path, takes_fast_path, work_cost
from torch import Tensor, nn
from torch.nn import functional

from fedpmt import api
from fedpmt.methods.fjord import DRAWS, FjORD, OrderedDropout
from fedpmt.methods.nested import outputs_at, statistics_of
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.parts.part import GLOBAL, Part, take
from fedpmt.parts.width import corners
from fedpmt.pricing.cost import RoundMemory, StepCost
from fedpmt.pricing.meter import upload_bytes
from fedpmt.simulation.loop import payload_bytes
from fedpmt.training.local import Job, Run
from fedpmt.training.messages import UPDATE
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.training.optimizers import SGD, Adam, Optimizer
from fedpmt.training.privacy import Privacy
from fedpmt.types import SettingError
from models.nets_of_users import ResNet
from support import SMALL, FlatPrice, samples

if TYPE_CHECKING:
    from fedpmt.training.messages import Reply


def job(bench: Bench, budget: float = float("inf")) -> Job[None]:
    """A device's local round."""
    task = bench.task(0, budget=budget)
    return Job(bench.site, task, task.offer[0], None, samples(8), lambda purpose: np.random.default_rng(0))


def started(bench: Bench, budget: float = float("inf")) -> Run[None]:
    run: Run[None] = bench.method.local.start(job(bench, budget))
    return run


class Always:
    """A generator that draws one width, or counts what it draws."""

    def __init__(self, level: int) -> None:
        self.level = level

    def integers(self, _: int) -> int:
        return self.level


def test_widths_are_nested_and_cost_no_index() -> None:
    bench = Bench(FjORD())
    widths = FjORD().widths(bench.model.structure)
    assert [len(part.inner) for part in widths] == [0, 1, 2, 3, 4]
    assert all(part.overhead_bytes == 0 for part in widths)
    # ⌈p · 8⌉ neurons
    shapes = [corners(bench.model.structure, part)["4.bias"][0].stop for part in widths]
    assert shapes == [2, 4, 5, 7, 8]


def test_a_narrow_output_is_that_of_the_sliced_weights() -> None:
    bench = Bench(FjORD())
    run, inputs = started(bench), samples(5).inputs
    for level, part in enumerate(FjORD().widths(bench.model.structure)):
        sliced = {name: take(bench.state.tensors[name], kept) for name, kept in part.sent.items()}
        torch.testing.assert_close(
            outputs_at(run, level, inputs), bench.model.forward(sliced, inputs), rtol=0, atol=0
        )


def test_widths_are_drawn_evenly_anew_for_each_batch_up_to_the_largest() -> None:
    bench = Bench(FjORD())
    run = started(bench, budget=120.0)
    allowed = len(run.part.inner) + 1
    assert 1 < allowed < 5
    seen: list[int] = []

    class Counting:
        rng = np.random.default_rng(1)

        def integers(self, high: int) -> int:
            seen.append(int(self.rng.integers(high)))
            return seen[-1]

    run.memo[DRAWS] = Counting()
    work = bench.method.local
    for _ in range(300):
        work.loss(run, samples(2))
    counts = np.bincount(seen, minlength=allowed)
    assert len(counts) == allowed
    assert counts.min() > 300 / allowed * 0.7


@pytest.mark.parametrize(
    "optimizer",
    [SGD(), SGD(weight_decay=0.5), SGD(0.9, weight_decay=0.5), SGD(0.9, nesterov=True), Adam(0.5)],
)
def test_nothing_outside_the_drawn_width_moves(optimizer: Optimizer) -> None:
    bench = Bench(FjORD(), optimizer=optimizer)
    run = started(bench)
    work, stepper = bench.method.local, optimizer.start()
    for level in (4, 1, 0):
        before = {name: tensor.detach().clone() for name, tensor in run.params.items()}
        run.memo[DRAWS] = Always(level)
        loss = work.loss(run, samples(4))
        gradients = dict(zip(run.params, torch.autograd.grad(loss, list(run.params.values())), strict=True))
        stepper.step(run.params, gradients, bench.settings.learning_rate, run.corner)
        part = (*run.part.inner, run.part)[level]
        assert any(not torch.equal(run.params[name], before[name]) for name in before)
        for name, corner in corners(bench.model.structure, part).items():
            rest = run.params[name].detach().clone()
            rest[corner] = before[name][corner]
            assert torch.equal(rest, before[name])


def test_a_device_sends_back_its_largest_width_and_the_rest_keeps_its_bits() -> None:
    bench = Bench(FjORD(), optimizer=SGD(weight_decay=0.1))
    reply = bench.reply(0, budget=150.0)
    assert 0 < len(reply.part.inner) < 4
    after = bench.aggregate([reply]).state.tensors
    for name, corner in corners(bench.model.structure, reply.part).items():
        rest = after[name].clone()
        rest[corner] = bench.state.tensors[name][corner]
        assert torch.equal(rest, bench.state.tensors[name])


def test_the_widest_net_that_anybody_trains_is_evaluated() -> None:
    bench = Bench(FjORD())
    before = bench.method.predictor(bench.state).tensors
    assert all(torch.equal(before[name], tensor) for name, tensor in bench.state.tensors.items())
    reply = bench.reply(0, budget=150.0)
    assert 0 < len(reply.part.inner) < 4
    bench.state = bench.aggregate([reply]).state
    shown = bench.method.predictor(bench.state).tensors
    inputs = samples(5).inputs
    cut = {name: take(bench.state.tensors[name], kept) for name, kept in reply.part.sent.items()}
    torch.testing.assert_close(bench.model.forward(shown, inputs), bench.model.forward(cut, inputs))
    # A narrower device takes nothing back, and one of full width brings the whole net in.
    for budget, whole in ((60.0, False), (float("inf"), True)):
        bench.state = bench.aggregate([bench.reply(1, 1, budget)], 1).state
        found = bench.method.predictor(bench.state).tensors["4.weight"]
        assert bool((found != 0).all()) == whole
        assert torch.equal(
            found[shown["4.weight"] != 0] != 0, torch.ones(int((shown["4.weight"] != 0).sum())) == 1
        )


class TestDistillation:
    def loss(self, level: int) -> tuple[Bench, Run[None], Tensor]:
        bench = Bench(FjORD(distil=True))
        run = started(bench)
        run.memo[DRAWS] = Always(level)
        return bench, run, bench.method.local.loss(run, samples(6))

    def test_is_the_sum_with_a_teacher_that_learns_nothing_from_it(self) -> None:
        bench, run, loss = self.loss(1)
        part, batch = run.part.inner[1], samples(6)
        corner = corners(bench.model.structure, part)
        teacher = bench.model.forward(run.tensors, batch.inputs)
        pupil = bench.model.forward({name: run.params[name][corner[name]] for name in corner}, batch.inputs)
        fixed = teacher.detach().softmax(1)
        wanted = (
            functional.cross_entropy(teacher, batch.targets) - (fixed * pupil.log_softmax(1)).sum(1).mean()
        )
        torch.testing.assert_close(loss, wanted)
        parameters = list(run.params.values())
        ours = torch.autograd.grad(loss, parameters)
        for gradient, other in zip(ours, torch.autograd.grad(wanted, parameters), strict=True):
            torch.testing.assert_close(gradient, other)

    def test_its_own_width_has_nothing_to_learn(self) -> None:
        bench, run, loss = self.loss(4)
        batch = samples(6)
        wanted = functional.cross_entropy(bench.model.forward(run.tensors, batch.inputs), batch.targets)
        assert torch.equal(loss, wanted)
        assert not run.corner

    def test_is_not_for_other_losses(self) -> None:
        bench = Bench(FjORD(distil=True))
        other = replace(job(bench).site, objective=replace(CLASSIFICATION, loss=nn.functional.mse_loss))
        with pytest.raises(SettingError, match="cross-entropy"):
            bench.method.local.start(replace(job(bench), site=other))


def cost(operations: float, activations: int) -> StepCost:
    memory = RoundMemory(0, 0, activations, 0, step=activations)
    return StepCost(0, operations, 0, 0, 10, 0.5, memory, sustained=operations + 10)


def test_price_is_the_mean_over_widths_or_both_together() -> None:
    """Widths of 90 + 10, 190 + 10 and 290 + 10 operations: 200 a step, or 300 + (90 + 190) / 3 with a teacher."""
    empty = [Part(GLOBAL, {}, {}, str(level)) for level in range(2)]
    widest = Part(GLOBAL, {}, {}, "2", inner=tuple(empty))
    prices = {"0": cost(90, 5), "1": cost(190, 6), "2": cost(290, 8)}
    structure = Bench(FjORD()).model.structure

    def priced(part: Part, *, distil: bool = False) -> StepCost:
        return work_cost(OrderedDropout(distil), part, lambda one, samples=None: prices[one.label], structure)

    mean = priced(widest)
    assert mean.operations == pytest.approx(200)
    assert mean.sustained == pytest.approx(200)
    assert mean.memory_bytes == 8
    both = priced(widest, distil=True)
    assert both.operations == pytest.approx(300 + 280 / 3)
    assert both.memory_bytes == 8 + 6
    assert priced(empty[0], distil=True) == prices["0"]


def test_distillation_leaves_less_width_in_the_same_budget() -> None:
    plain, taught = Bench(FjORD()), Bench(FjORD(distil=True))
    labels = [len(bench.task(0, budget=300.0).offer[0].inner) for bench in (plain, taught)]
    assert labels[1] < labels[0]


@pytest.mark.parametrize("net", NETS)
def test_the_fast_path_does_what_the_oracle_does(net: str) -> None:
    check_fast_path(FjORD(), net, epochs=2, optimizer=SGD(weight_decay=0.01))
    check_fast_path(FjORD(), net, epochs=2, optimizer=SGD(0.9, nesterov=True, weight_decay=0.01))


def test_what_the_fast_path_leaves_to_the_oracle() -> None:
    assert takes_fast_path(FjORD(), "fcnn-mnist")
    assert not takes_fast_path(FjORD(distil=True), "fcnn-mnist")
    assert not takes_fast_path(FjORD(), "fcnn-mnist", optimizer=Adam())


class QuarterPrice(FlatPrice):
    """The whole net's size for its whole width, and a quarter of it for half the width."""

    def __call__(self, part: Part, samples: int | None = None) -> StepCost:
        structure = self.models[GLOBAL].structure
        whole = float(structure.size(structure.tensors))
        return cost(whole / 4 if part.label == "p 0.50" else whole, 0)


class TestBatchNorm:
    def bench(self) -> Bench:
        torch.manual_seed(0)
        model = layered(ResNet(), example=torch.zeros(2, 1, 8, 8))
        bench = Bench(FjORD(sizes=2), model, epochs=3, learning_rate=0.05)
        bench.price = QuarterPrice(model)
        return bench

    def stored(self, bench: Bench, reply: Reply, level: int) -> dict[str, Tensor]:
        """The statistics of a width that a reply stands for."""
        sent, changes = bench.state.statistics[statistics_of(level)], reply.tensors[statistics_of(level)]
        return {name: sent[name] + change for name, change in changes.items()}

    def test_each_width_has_its_own_statistics(self) -> None:
        bench = self.bench()
        reply = bench.reply(0, count=12)
        assert not any("running" in name for name in reply.update)
        narrow, wide = (reply.tensors[statistics_of(level)] for level in (1, 2))
        assert narrow["bn.running_mean"].shape == (2,)
        assert wide["bn.running_mean"].shape == (4,)
        assert payload_bytes(reply.tensors) == upload_bytes(reply.part, bench.model.structure)

    def test_statistics_do_not_travel_where_updates_are_private(self) -> None:
        """A clip and noise are on the update alone."""
        bench = self.bench()
        bench.settings = replace(bench.settings, privacy=Privacy(1.0, 1.0))
        with pytest.raises(
            SettingError, match="OrderedDropout sends in addition: statistics 1, statistics 2"
        ):
            bench.reply(0)
        plain = Bench(FjORD(), privacy=Privacy(1.0, 1.0)).reply(0)
        assert set(plain.tensors) == {UPDATE}
        assert not plain.metrics

    def test_a_width_is_averaged_over_those_that_train_it(self) -> None:
        bench = self.bench()
        small, large = bench.reply(0, budget=500.0, count=12), bench.reply(1, count=12)
        assert (len(small.part.inner), len(large.part.inner)) == (0, 1)
        assert statistics_of(2) not in small.tensors
        state = bench.aggregate([small, large]).state
        one, two = (self.stored(bench, reply, 1)["bn.running_var"] for reply in (small, large))
        torch.testing.assert_close(state.statistics[statistics_of(1)]["bn.running_var"], (one + two) / 2)
        widest = self.stored(bench, large, 2)["bn.running_var"]
        shown = bench.method.predictor(state).tensors["bn.running_var"]
        torch.testing.assert_close(shown, widest)

    def test_a_narrow_net_is_evaluated_with_its_own_statistics(self) -> None:
        bench = self.bench()
        small = bench.reply(0, budget=500.0, count=12)
        state = bench.aggregate([small]).state
        shown = bench.method.predictor(state).tensors
        own = self.stored(bench, small, 1)["bn.running_var"]
        torch.testing.assert_close(shown["bn.running_var"], torch.cat([own, torch.zeros(2)]))
        cut = {name: take(state.tensors[name], kept) for name, kept in small.part.sent.items()}
        cut |= self.stored(bench, small, 1)
        bench.model.set_training([False] * len(bench.model.structure.layers))
        inputs = samples(3).inputs
        torch.testing.assert_close(bench.model.forward(shown, inputs), bench.model.forward(cut, inputs))


def test_an_optimizer_that_cannot_step_a_corner_is_refused() -> None:
    """One of a user's own steps whole tensors, as distillation does."""
    own: dict[str, Any] = {**SMALL, "rounds": 1, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    with pytest.raises(SettingError, match=r"^optimizer = 'custom' cannot be combined with fjord"):
        api.run(FjORD(), **own)
    assert len(api.run(FjORD(distil=True), **own).rounds) == 1


def test_no_width_at_all_is_refused() -> None:
    with pytest.raises(SettingError, match=r"fjord\.sizes must be >= 1 \(got 0\)"):
        FjORD(sizes=0)
