"""PruneFL: the mask, what it is chosen by, and what devices do under it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, work_cost
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fedpmt import api
from fedpmt.methods.base import Prototype, Setup
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.prunefl import SQUARES, Initial, Masked, PruneFL, Sparse
from fedpmt.parts.depth import full
from fedpmt.parts.mask import rearranged, strongest, worthwhile
from fedpmt.parts.part import GLOBAL, Mask, Whole
from fedpmt.pricing.meter import upload_bytes
from fedpmt.pricing.price import Price
from fedpmt.simulation.assemble import assemble
from fedpmt.simulation.checkpoint import read_value, write_value
from fedpmt.simulation.loop import payload_bytes
from fedpmt.training.optimizers import SGD, Adam
from fedpmt.types import SettingError
from support import SMALL, FlatPrice, samples

if TYPE_CHECKING:
    from fedpmt.pricing.cost import StepCost

POSITIVE = st.floats(0.01, 10)


def dense_problem(draw: Any, count: int) -> dict[str, Any]:
    """Two tensors of different price per weight; half of the first is active."""
    shapes = {"a": (count,), "b": (2, 2)}
    numbers = {
        kind: {
            name: np.array(
                draw(st.lists(POSITIVE, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
            ).reshape(shape)
            for name, shape in shapes.items()
        }
        for kind in ("weights", "squares")
    }
    masks = {name: np.arange(int(np.prod(shape))).reshape(shape) % 2 == 0 for name, shape in shapes.items()}
    return {
        **numbers,
        "masks": masks,
        "times": {"a": draw(POSITIVE), "b": draw(POSITIVE)},
        "fixed": draw(st.floats(0, 10)),
        "constant": draw(POSITIVE),
    }


def gamma(problem: dict[str, Any], chosen: dict[str, np.ndarray]) -> float:
    """Γ = Σ g² / (c + Σ t) of a mask, with what cannot be pruned."""
    gain = problem["fixed"] + sum(problem["squares"][name][bits].sum() for name, bits in chosen.items())
    time = problem["constant"] + sum(problem["times"][name] * bits.sum() for name, bits in chosen.items())
    return float(gain / time)


@given(st.data(), st.sampled_from([0.0, 0.3, 0.5]))
@settings(max_examples=40)
def test_greedy_is_as_good_as_every_subset_tried(data: st.DataObject, drop: float) -> None:
    problem = dense_problem(data.draw, 5)
    found = rearranged(**problem, drop=drop, most=99)
    kept = {name: strongest(problem["weights"][name], bits, drop) for name, bits in problem["masks"].items()}
    free = [(name, place) for name, bits in kept.items() for place in np.flatnonzero(~bits)]
    best = 0.0
    for chosen in itertools.product((False, True), repeat=len(free)):
        tried = {name: bits.copy() for name, bits in kept.items()}
        for (name, place), on in zip(free, chosen, strict=True):
            tried[name].reshape(-1)[place] = on
        best = max(best, gamma(problem, tried))
    assert gamma(problem, found) == pytest.approx(best)
    assert all((found[name] | ~bits).all() for name, bits in kept.items())  # what was to stay did


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=30), st.floats(0, 10), POSITIVE)
def test_gamma_never_falls_while_weights_are_added(
    pairs: list[tuple[float, float]], gain: float, time: float
) -> None:
    pairs.sort(key=lambda pair: -pair[0] / pair[1])
    gains, prices = np.array(pairs).T
    count = worthwhile(gains, prices, gain, time)
    course = [(gain + gains[:some].sum()) / (time + prices[:some].sum()) for some in range(len(pairs) + 1)]
    assert all(course[some + 1] >= course[some] * (1 - 1e-12) for some in range(count))
    if count < len(pairs):
        assert course[count + 1] <= course[count] * (1 + 1e-12)


def test_a_weight_that_is_worth_just_as_much_is_left_out() -> None:
    assert worthwhile(np.array([2.0, 2.0]), np.ones(2), gain=4.0, time=2.0) == 0
    assert worthwhile(np.array([2.1, 2.0]), np.ones(2), gain=4.0, time=2.0) == 1


@given(st.data(), st.integers(0, 9))
@settings(max_examples=30)
def test_a_limit_stops_additions_but_takes_nothing_that_stays(data: st.DataObject, most: int) -> None:
    problem = dense_problem(data.draw, 5)
    free = rearranged(**problem, drop=0.4, most=99)
    limited = rearranged(**problem, drop=0.4, most=most)
    kept = sum(
        int(strongest(problem["weights"][name], bits, 0.4).sum()) for name, bits in problem["masks"].items()
    )
    assert sum(int(bits.sum()) for bits in limited.values()) == max(
        kept, min(most, sum(int(bits.sum()) for bits in free.values()))
    )
    assert all((free[name] | ~bits).all() for name, bits in limited.items())


def sparse_state(bench: Bench, share: float = 0.5, **changes: Any) -> Sparse:
    """A state in further pruning under a random mask."""
    rng, state = np.random.default_rng(0), bench.state
    assert isinstance(state, Sparse)
    masks = {name: rng.random(bits.shape) < share for name, bits in state.masks.items()}
    tensors = {
        name: tensor * torch.from_numpy(masks[name]) if name in masks else tensor
        for name, tensor in state.tensors.items()
    }
    return replace(state, masks=masks, tensors=tensors, initial=None, version=1, **changes)


def test_pruned_entries_are_zero_on_every_device_and_on_the_server() -> None:
    bench = Bench(PruneFL(), optimizer=SGD(0.9, weight_decay=0.1))
    bench.state = sparse_state(bench)
    replies = [bench.reply(device) for device in range(3)]
    for reply in replies:
        for name, bits in bench.state.masks.items():
            selection = reply.part.trained[name]
            assert isinstance(selection, Mask)
            assert (selection.bits == bits).all()  # so nothing else can come back
            assert reply.update[name].shape == (bits.sum(),)
    state = bench.aggregate(replies).state
    for name, bits in bench.state.masks.items():
        assert not state.tensors[name][~torch.from_numpy(bits)].any()
        assert state.tensors[name][torch.from_numpy(bits)].all()


@pytest.mark.parametrize("optimizer", [SGD(0.9, weight_decay=0.1), Adam(0.1)])
def test_devices_work_at_zero_too(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device trains with, after its steps: the whole tensors, masked-out entries at zero to the bit."""
    bench = Bench(PruneFL(), optimizer=optimizer)
    bench.state = sparse_state(bench)
    seen: list[dict[str, torch.Tensor]] = []

    class Watching(Masked):
        def reply(self, run: Any) -> Any:
            seen.append({name: tensor.detach().clone() for name, tensor in run.tensors.items()})
            return super().reply(run)

    monkeypatch.setattr(PruneFL, "local", Watching())
    bench.reply(0)
    for name, bits in bench.state.masks.items():
        assert not seen[0][name][~torch.from_numpy(bits)].any()
        assert seen[0][name].any()


def batch_gradients(bench: Bench, device: int, count: int, index: int = 0) -> list[dict[str, torch.Tensor]]:
    """The gradients of each batch at the state's weights, in the order in which the device meets them."""
    data = samples(count, seed=device)
    order = bench.round(index).rng("order", device).permutation(count)
    found = []
    for start in range(0, count, bench.settings.batch):
        batch = data.take(order[start : start + bench.settings.batch])
        weights = {name: tensor.clone().requires_grad_() for name, tensor in bench.state.tensors.items()}
        loss = functional.cross_entropy(bench.model.forward(weights, batch.inputs), batch.targets)
        found.append(dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))
    return found


def test_initial_pruning_is_done_by_a_device_of_the_fastest_level() -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 1, "devices": 20, "levels": "1/4,1/2,1"}
    for seed in range(4):
        [device] = api.run("prunefl", seed=seed, **settings).rounds[0].devices
        assert (device.level, device.speed) == (3, 1.0)
    # Where devices tell no speeds, anyone may be drawn.
    drawn = {
        Bench(PruneFL()).method.cohort(Bench(PruneFL()).state, Bench(PruneFL()).round(n))[0]
        for n in range(30)
    }
    assert drawn == set(range(8))


@pytest.mark.parametrize("initial", [False, True])
def test_squares_are_of_the_summed_gradient_of_all_entries(initial: bool) -> None:
    """n (Σ g)² after the first phase, Σ g² in it; without training the weights stay, so the sum is plain."""
    bench = Bench(PruneFL(interval=1, sweeps=1), learning_rate=0.0)
    bench.state = sparse_state(bench)
    if initial:
        bench.state = replace(bench.state, initial=Initial(1))
    reply = bench.reply(2, count=10)
    gradients = batch_gradients(bench, 2, 10)
    assert len(gradients) == 3
    for name, square in reply.tensors[SQUARES].items():
        each = torch.stack([gradient[name] for gradient in gradients])
        expected = each.square().sum(0) if initial else 10 * each.sum(0).square()
        torch.testing.assert_close(square, expected, rtol=1e-4, atol=1e-8)
        if name in bench.state.masks:
            # Masked-out weights have gradients too: else nothing could come back.
            assert square[~torch.from_numpy(bench.state.masks[name])].any()


def test_devices_add_up_squares_until_they_are_asked() -> None:
    bench = Bench(PruneFL(interval=3), learning_rate=0.0)
    bench.state = sparse_state(bench)
    own: Any = None
    expected: dict[str, torch.Tensor] | None = None
    for index in range(3):
        reply, own = bench.work(1, index, own=own)
        gained = {
            name: 8 * sum(gradient[name] for gradient in batch_gradients(bench, 1, 8, index)).square()  # type: ignore[union-attr]
            for name in bench.model.structure.parameters
        }
        expected = gained if expected is None else {name: expected[name] + gained[name] for name in gained}
        assert (SQUARES in reply.tensors) == (index == 2)
        bench.state = bench.aggregate([], index, state=replace(bench.state, version=1)).state
    assert expected is not None
    for name, square in reply.tensors[SQUARES].items():
        torch.testing.assert_close(square, expected[name], rtol=1e-4, atol=1e-8)
    assert own.sums == {}  # told, and forgotten


def test_sums_of_an_older_mask_are_dropped() -> None:
    bench = Bench(PruneFL(interval=9), learning_rate=0.0)
    bench.state = sparse_state(bench)
    _, own = bench.work(1, 0)
    fresh = bench.work(1, 1)[1]
    bench.state = replace(bench.state, version=2)
    again = bench.work(1, 1, own=own)[1]
    assert own.version == 1
    assert again.version == 2
    assert all(torch.equal(again.sums[name], fresh.sums[name]) for name in fresh.sums)


def test_a_weight_that_comes_back_starts_from_zero() -> None:
    bench = Bench(PruneFL(interval=1, drop=0.5))
    state = sparse_state(bench, share=0.3)
    # Stale values must not come back either.
    squares = {name: np.ones(state.structure.shapes[name]) for name in state.structure.parameters}
    for name, bits in state.masks.items():
        squares[name][~bits] = 1000.0
    changed = bench.method.changed(state, squares, 0.5, bench.price)
    back = {name: changed.masks[name] & ~bits for name, bits in state.masks.items()}
    assert all(bits.any() for bits in back.values())
    assert all(not changed.tensors[name][torch.from_numpy(bits)].any() for name, bits in back.items())
    assert changed.version == state.version + 1
    assert changed.holders == ()
    for name, bits in changed.masks.items():
        assert not changed.tensors[name][~torch.from_numpy(bits)].any()


def test_no_pruning_is_fedavg_through_changes_of_the_mask() -> None:
    ours, theirs = Bench(PruneFL(interval=1, drop=0.0, initial_rounds=0)), Bench(FedAvg())
    for index in range(3):
        for bench in (ours, theirs):
            replies = [bench.reply(device, index, count=6 + device) for device in range(3)]
            bench.state = bench.aggregate(replies, index).state
    assert ours.state.version == 3
    for name, tensor in theirs.state.tensors.items():
        assert torch.equal(ours.state.tensors[name], tensor)


def test_the_mask_changes_every_interval_and_only_then_squares_travel() -> None:
    bench = Bench(PruneFL(interval=3, initial_rounds=0, density=0.6))
    structure, dense = bench.model.structure, 4 * bench.model.structure.size(bench.model.structure.parameters)
    for index in range(7):
        reply = bench.reply(0, index)
        told = index % 3 == 2
        assert bool(reply.part.reported) == told
        active = 4 * sum(tensor.numel() for tensor in reply.update.values())
        assert payload_bytes(reply.tensors) == active + (dense if told else 0)
        assert payload_bytes(reply.tensors) == upload_bytes(reply.part, structure)
        version = bench.state.version
        bench.state = bench.aggregate([reply], index).state
        assert bench.state.version == version + told
    assert bench.state.density < 1


def test_what_may_go_halves_with_its_half_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """q_t = 0.3 · 0.5^(t / 10000)"""
    asked = []

    def changed(_: PruneFL, state: Sparse, squares: Any, drop: float, price: Any) -> Sparse:
        asked.append(drop)
        return state

    monkeypatch.setattr(PruneFL, "changed", changed)
    bench = Bench(PruneFL(interval=1, initial_rounds=0))
    for further in (0, 5000, 10000, 20000):
        bench.aggregate([bench.reply(0)], state=replace(bench.state, further=further))
    assert asked == pytest.approx([0.3, 0.3 * 0.5**0.5, 0.15, 0.075])


def test_a_mask_travels_once_to_each_device() -> None:
    bench = Bench(PruneFL(interval=9))
    bench.state = sparse_state(bench)
    prunable = sum(bits.size for bits in bench.state.masks.values())
    assert bench.method.part(bench.state, 0).overhead_bytes == -(-prunable // 8)
    bench.state = bench.aggregate([bench.reply(0)]).state
    assert bench.method.part(bench.state, 0).overhead_bytes == 0
    assert bench.method.part(bench.state, 1).overhead_bytes == -(-prunable // 8)
    dense = Bench(PruneFL())
    assert dense.method.part(dense.state, 0).overhead_bytes == 0  # nothing to say


def initial_bench(accuracy: float, **options: Any) -> tuple[Bench, Any]:
    """A bench whose one device answers with this accuracy."""
    bench = Bench(PruneFL(**options))

    def play(index: int, *, answers: bool = True) -> None:
        asked = bench.method.cohort(bench.state, bench.round(index))
        assert asked is not None
        assert len(asked) == 1
        replies = [bench.reply(device, index) for device in asked if answers]
        replies = [replace(reply, metrics={**reply.metrics, "train_accuracy": accuracy}) for reply in replies]
        bench.state = bench.aggregate(replies, index).state

    return bench, play


def test_initial_pruning_is_done_by_one_device_until_the_density_is_steady() -> None:
    bench, play = initial_bench(0.9, density=0.5)
    asked: set[int] = set()
    densities = []
    for index in range(20):
        asked.update(bench.method.cohort(bench.state, bench.round(index)) or ())
        play(index)
        densities.append(bench.state.density)
        if bench.state.initial is None:
            break
    assert len(asked) == 1
    assert bench.method.cohort(bench.state, bench.round(20)) is None  # now the sampler decides
    changes = [abs(after / before - 1) <= 0.1 for before, after in itertools.pairwise(densities)]
    assert changes[-5:] == [True] * 5
    assert not any(all(changes[end - 5 : end]) for end in range(5, len(changes)))  # not sooner
    assert densities[0] < 1
    assert densities[-1] <= 0.5


def test_initial_pruning_waits_until_something_is_learned() -> None:
    """1.5 times a guess among three classes is 0.5."""
    bench, play = initial_bench(0.49, initial_rounds=3)
    for index in range(2):
        play(index)
        assert bench.state.density == 1
        assert bench.state.version == 0
        assert bench.state.initial is not None
    play(2)
    assert bench.state.initial is None  # no longer than it may take
    assert bench.state.version == 1  # what was summed until now is of another kind
    bench, play = initial_bench(0.5)
    play(0)
    assert bench.state.version == 1


def test_another_device_is_asked_where_one_does_not_answer() -> None:
    bench, play = initial_bench(0.4)
    drawn = [tuple(bench.method.cohort(bench.state, bench.round(index)) or ()) for index in range(8)]
    assert len(set(drawn)) > 1
    play(0, answers=False)
    assert bench.state.initial.device is None
    play(1)
    assert bench.state.initial.device == drawn[1][0]
    assert all(bench.method.cohort(bench.state, bench.round(index)) == [drawn[1][0]] for index in range(8))


def test_sweeps_are_on_the_clock_and_fewer_where_they_took_too_long() -> None:
    """One device, five sweeps of the usual one; under a deadline that allows for two, the second try has two."""
    settings: dict[str, Any] = {**SMALL, "task": "cnn-mnist", "levels": "1", "depths": 1}
    options = {"sweeps": 5, "start_factor": 0.0}
    one = api.run("prunefl", options={"initial_rounds": 0}, **settings).rounds[0]
    free = api.run("prunefl", options=options, **settings).rounds[0]
    assert len(free.devices) == 1
    assert free.devices[0].seconds == pytest.approx(5 * one.devices[0].seconds)
    assert free.devices[0].operations == pytest.approx(5 * one.devices[0].operations)
    settings["rounds"] = 4
    rounds = api.run("prunefl", options=options, deadline=2.5 * one.round_seconds, **settings).rounds
    assert [record.devices[0].outcome for record in rounds] == ["late", "arrived", "arrived", "arrived"]
    assert rounds[1].round_seconds == pytest.approx(2 * one.round_seconds)
    # The mask changes when there have been five of them all the same, and only then are squares sent.
    assert [record.metrics["density"] < 1 for record in rounds] == [False, False, False, True]
    assert rounds[3].bytes_up > rounds[2].bytes_up


class WholePrice(FlatPrice):
    """Knows the whole model's price too, which amounts that no part has are measured by."""

    @property
    def full(self) -> StepCost:
        return self(full(self.models[GLOBAL].structure))


def test_the_limit_is_the_weakest_devices_share() -> None:
    bench = Bench(PruneFL())
    bench.price = WholePrice(bench.model)
    whole = bench.price(full(bench.model.structure)).sustained
    prototypes = {GLOBAL: Prototype(bench.model.structure, bench.model.initial())}

    def limit(method: PruneFL, share: float | None) -> float:
        plan = None if share is None else bench.client(0, share * whole).plan
        # A planner knows of plain SGD alone.
        weakest = None if plan is None else replace(plan, meter=replace(plan.meter, extra=None))
        return method.init(Setup(prototypes, 8, bench.price, weakest=weakest)).limit

    assert [limit(PruneFL(), share) for share in (0.423, 0.5, 1.0, None)] == [0.42, 0.5, 1.0, 1.0]
    assert limit(PruneFL(density=0.3), 0.9) == 0.3


@pytest.mark.parametrize("assign", ["deadline", "level"])
def test_the_weakest_budget_is_the_least_of_all(assign: str, tmp_path: Any) -> None:
    settings = api.settings_of(
        {"method": "prunefl", "assign": assign, "depths": 5, "levels": "1/5,1/4,1/3,1/2,1"}
    )
    problem = api.paper_problem_of(settings)
    with assemble(settings, problem, PruneFL(), tmp_path) as federation:
        planner, samples_ = federation.planner, settings.samples
        fleet = federation.fleet
        limits = [planner.plan(fleet.device(index), samples_).limit.operations for index in range(len(fleet))]
        found = planner.weakest(fleet, samples_)
        assert found.limit.operations == min(limits)
        state = federation.start().state
        share = found.limit.operations / found.meter.usage(full(problem.model.structure)).operations
        assert share - 0.01 < state.limit <= share + 1e-9


def real_price(bench: Bench) -> Price:
    return Price(bench.model, mode="exact", batch=4, samples=8, cached=True, example=samples(2).inputs)


def test_time_coefficients() -> None:
    """Products of one sample: 36 · 36, 288, 24 for 36, 288, 24 weights, so 36, 1 and 1 a weight."""
    bench = Bench(PruneFL(constant=0.5, communication=2.0))
    price, total = real_price(bench), 36 + 288 + 24
    constant, times = bench.method.coefficients(bench.state, price)
    products = 36 * 36 + 288 + 24
    assert constant == 0.5
    assert times["0.weight"] == pytest.approx(36 / products + 2 / total)
    assert times["4.weight"] == times["6.weight"] == pytest.approx(1 / products + 2 / total)
    assert sum(time * bench.state.masks[name].size for name, time in times.items()) == pytest.approx(3.0)

    dense = PruneFL(times="dense", communication=0.0)
    constant, times = dense.coefficients(bench.state, price)
    operations = price(full(bench.model.structure)).operations
    assert times == dict.fromkeys(times, 1 / operations)
    assert constant == pytest.approx(1 - total / operations)


def test_products_are_paid_for_as_dense() -> None:
    bench = Bench(PruneFL())
    bench.state = sparse_state(bench)
    price, structure = real_price(bench), bench.model.structure
    part, dense = bench.method.part(bench.state, 0), price(full(structure))
    cost = work_cost(bench.method.local, part, price, structure)
    masked_out = sum(int((~bits).sum()) for bits in bench.state.masks.values())
    entries = structure.size(structure.parameters)
    assert (cost.forward, cost.error, cost.gradient) == (dense.forward, dense.error, dense.gradient)
    assert cost.update == dense.update - masked_out + entries  # a sum for each gradient
    assert cost.memory_bytes == dense.memory_bytes + 2 * 4 * entries


def test_a_run_prunes_and_resumes_to_the_same_bits(tmp_path: Any) -> None:
    settings: dict[str, Any] = {
        **SMALL,
        "rounds": 10,
        "lr": 0.2,
        "task": "cnn-mnist",
        "checkpoint_seconds": 0,
    }
    options = {"interval": 3, "initial_rounds": 3, "start_factor": 0.0}
    whole = api.run("prunefl", out=tmp_path / "whole", options=options, **settings)
    assert whole.result is not None
    densities = [record.metrics["density"] for record in whole.rounds]
    assert densities[0] < 1
    assert [len(record.devices) for record in whole.rounds] == [1] * 3 + [5] * 7

    class StopError(Exception):
        pass

    def stop(record: Any) -> None:
        if record.round == 5:
            raise StopError

    with pytest.raises(StopError):
        api.run("prunefl", out=tmp_path / "cut", options=options, on_round=stop, **settings)
    resumed = api.run("prunefl", out=tmp_path / "cut", resume=True, options=options, **settings)
    assert resumed.result is not None
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    assert [record.metrics["density"] for record in resumed.rounds] == densities


def test_its_state_survives_the_disk(tmp_path: Any) -> None:
    bench = Bench(PruneFL())
    state = sparse_state(bench)
    write_value(tmp_path / "state", replace(state, initial=Initial(50, 2, 5, 0.4, 1)))
    back = read_value(tmp_path / "state")
    assert isinstance(back, Sparse)
    assert back.initial == Initial(50, 2, 5, 0.4, 1)
    assert all((back.masks[name] == bits).all() for name, bits in state.masks.items())


def test_whole_tensors_stay_whole() -> None:
    bench = Bench(PruneFL())
    part = bench.method.part(bench.state, 0)
    assert all(isinstance(selection, Whole) for selection in part.trained.values())
    bench.state = sparse_state(bench)
    kinds = {name: type(selection) for name, selection in bench.method.part(bench.state, 0).trained.items()}
    assert {name for name, kind in kinds.items() if kind is Mask} == {"0.weight", "4.weight", "6.weight"}


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("density", 0.0, "> 0 and <= 1"),
        ("density", 1.1, "> 0 and <= 1"),
        ("interval", 0, ">= 1"),
        ("drop", 1.0, ">= 0 and < 1"),
        ("half_life", 0.0, "> 0"),
        ("initial_rounds", -1, ">= 0"),
        ("steady", 0, ">= 1"),
        ("sweeps", 0, ">= 1"),
        ("change", -0.1, ">= 0"),
        ("start_factor", -1.0, ">= 0"),
        ("constant", 0.0, "> 0"),
        ("communication", -1.0, ">= 0"),
    ],
)
def test_refusals(key: str, value: float, rule: str) -> None:
    with pytest.raises(SettingError, match=rf"^prunefl\.{key} must be {rule} \(got {value}\)$"):
        PruneFL(**{key: value})  # type: ignore[arg-type]
