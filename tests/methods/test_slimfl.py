"""SlimFL: what comes through the channel, and how several widths learn in one step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, trained, work_cost
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedpmt.devices.fleet import Device
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.nested import statistics_of
from fedpmt.methods.slimfl import SlimFL
from fedpmt.parts.part import GLOBAL, Whole, take
from fedpmt.parts.width import corners
from fedpmt.pricing.meter import Meter, Plan, Times
from fedpmt.pricing.price import Price
from fedpmt.resources import Resources
from fedpmt.seeds import Seeds
from fedpmt.simulation.loop import payload_bytes
from fedpmt.training.local import Job
from fedpmt.training.messages import UPDATE
from fedpmt.training.objective import Objective
from fedpmt.types import SettingError
from support import samples, small_net

if TYPE_CHECKING:
    from fedpmt.methods.base import Method

SHARES = st.floats(0.02, 0.98)
RATES = st.floats(0.05, 4.0)


def sinr_decodes(method: SlimFL, gains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """LH and RH by their ratios of signal to noise and interference, as the paper writes them."""
    lh = method.power * gains / ((1 - method.power) * gains + method.noise) >= method.threshold
    return lh, lh & ((1 - method.power) * gains / method.noise >= method.threshold)


@pytest.mark.parametrize(
    ("power", "rate", "noise"), [(0.8, 1.0, 0.1), (0.6, 1.0, 0.05), (0.7, 0.5, 0.3), (0.95, 2.0, 0.02)]
)
def test_decoding_rates_are_those_of_the_formulas(power: float, rate: float, noise: float) -> None:
    method = SlimFL(power=power, rate=rate, noise=noise)
    gains = np.random.default_rng(3).exponential(size=200_000)
    lh, both = sinr_decodes(method, gains)
    # Five standard deviations of a share of 200,000 draws are below 0.0056.
    assert method.chance(1, 2) == pytest.approx(lh.mean(), abs=0.0056)
    assert method.chance(2, 2) == pytest.approx(both.mean(), abs=0.0056)
    counts = [method.decoded(gain, 2) for gain in gains[:2000]]
    assert counts == (lh[:2000].astype(int) + both[:2000]).tolist()


def test_rates_by_hand() -> None:
    """u' = 1, q = 0.1: exp(-0.1 / (0.8 - 0.2)) and exp(-0.1 / min(0.6, 0.2))."""
    method = SlimFL(power=0.8, rate=1.0, noise=0.1)
    assert method.chance(1, 2) == pytest.approx(0.8464817)
    assert method.chance(2, 2) == pytest.approx(0.6065307)


@given(SHARES, RATES, st.floats(0, 2), st.floats(0, 10))
def test_the_right_half_never_comes_alone(power: float, rate: float, noise: float, gain: float) -> None:
    method = SlimFL(power=power, rate=rate, noise=noise)
    assert method.chance(2, 2) <= method.chance(1, 2)
    assert method.decoded(gain, 2) <= method.decoded(gain + 1, 2)  # a better channel never loses a message
    if power <= method.threshold / (1 + method.threshold):
        assert method.decoded(gain, 2) == 0
        assert method.chance(1, 2) == 0
    elif noise == 0:
        assert method.decoded(gain, 2) == 2
        assert method.chance(2, 2) == 1


@given(RATES)
def test_both_halves_are_likeliest_at_the_best_power(rate: float) -> None:
    threshold = 2**rate - 1
    best = (1 + threshold) / (2 + threshold)
    chances = [SlimFL(power=power, rate=rate).chance(2, 2) for power in np.linspace(0.01, 0.99, 50)]
    assert SlimFL(power=best, rate=rate).chance(2, 2) >= max(chances)


def test_more_widths_share_what_power_is_left() -> None:
    """λ = 0.75, u' = 1: 0.75 - 0.25, 0.1875 - 0.0625 and the rest, 0.0625; alone a message has all the power."""
    method = SlimFL(slim_widths="0.25,0.5,1", power=0.75, rate=1.0)
    assert method.margins(3) == pytest.approx((0.5, 0.125, 0.0625))
    assert method.margins(1) == (1.0,)


def test_the_left_half_is_the_leading_channels() -> None:
    half, whole = SlimFL().nets(Bench(SlimFL()).model.structure)
    assert whole.inner == (half,)
    assert all(isinstance(selection, Whole) for selection in whole.sent.values())
    shapes = {
        name: take(tensor, half.sent[name]).shape for name, tensor in Bench(SlimFL()).state.tensors.items()
    }
    assert shapes == {
        "0.weight": (2, 1, 3, 3),  # all inputs
        "0.bias": (2,),
        "4.weight": (4, 18),  # a channel is nine inputs behind the flatten
        "4.bias": (4,),
        "6.weight": (3, 4),  # all classes
        "6.bias": (3,),
    }
    assert half.overhead_bytes == whole.overhead_bytes == 0
    for name, tensor in Bench(SlimFL()).state.tensors.items():
        cut = corners(Bench(SlimFL()).model.structure, half)[name]
        assert torch.equal(take(tensor, half.sent[name]), tensor[cut])


@pytest.mark.parametrize("distill", [True, False])
def test_one_step_along_the_sum_of_both_gradients(distill: bool) -> None:
    """w_1 ∇ of the half net's loss on its own tensors, set into the corner, plus w_2 ∇ of the full net's."""
    method = SlimFL(narrow_weight=0.5, full_weight=2.0, distill=distill)
    bench, batch = Bench(method), samples(4)
    task, work = bench.task(0), method.local
    run = work.start(Job(bench.site, task, task.offer[0], None, batch, Seeds(0, 0)))
    found = torch.autograd.grad(work.loss(run, batch), list(run.params.values()))

    whole = {name: tensor.clone().requires_grad_() for name, tensor in bench.state.tensors.items()}
    outputs = bench.model.forward(whole, batch.inputs)
    full = torch.autograd.grad(functional.cross_entropy(outputs, batch.targets), list(whole.values()))
    half = method.nets(bench.model.structure)[0]
    cut = {
        name: take(tensor.detach(), half.sent[name]).clone().requires_grad_()
        for name, tensor in whole.items()
    }
    said = bench.model.forward(cut, batch.inputs)
    target = outputs.detach().softmax(1)
    loss = (
        -(target * said.log_softmax(1)).sum(1).mean()
        if distill
        else functional.cross_entropy(said, batch.targets)
    )
    narrow = dict(zip(cut, torch.autograd.grad(loss, list(cut.values())), strict=True))
    for name, gradient, expected in zip(run.params, found, full, strict=True):
        wanted = 2.0 * expected
        wanted[corners(bench.model.structure, half)[name]] += 0.5 * narrow[name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


def fading(bench: Bench, device: int) -> float:
    return float(bench.round(0).rng("fading", device).exponential())


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_each_half_is_the_mean_over_those_it_was_decoded_from(noise: float) -> None:
    method = SlimFL(noise=noise, weight="samples")
    bench, counts = Bench(method), range(6, 16)
    replies = [bench.reply(device, count=count) for device, count in enumerate(counts)]
    step = bench.aggregate(replies)
    decoded = [method.decoded(fading(bench, device), 2) for device in range(len(replies))]
    assert step.metrics["decoded_0.5x"] == sum(got >= 1 for got in decoded)
    assert step.metrics["decoded_1x"] == sum(got == 2 for got in decoded)
    cut = corners(bench.model.structure, method.nets(bench.model.structure)[0])
    models = [trained(bench.state.tensors, reply) for reply in replies]
    for name, before in bench.state.tensors.items():
        expected = before.double().clone()
        for inside, needed in ((False, 2), (True, 1)):
            heard = [place for place, got in enumerate(decoded) if got >= needed]
            if heard:
                total = sum(replies[place].samples for place in heard)
                each = [models[place][name].double() * replies[place].samples for place in heard]
                mean = torch.stack(each).sum(0) / total
                where = cut[name] if inside else ...
                expected[where] = mean[where]
            elif inside:
                expected[cut[name]] = before.double()[cut[name]]
        torch.testing.assert_close(step.state.tensors[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_nobody_decoded_keeps_every_bit_and_delivers_nothing() -> None:
    bench = Bench(SlimFL(power=0.3))  # below u' / (1 + u') = 0.5
    step = bench.aggregate([bench.reply(0), bench.reply(1)])
    assert all(torch.equal(step.state.tensors[name], old) for name, old in bench.state.tensors.items())
    assert step.metrics["delivered_bytes"] == 0


def test_attempted_and_delivered_bytes() -> None:
    bench = Bench(SlimFL(noise=0.3))
    replies = [bench.reply(device) for device in range(12)]
    attempted = {payload_bytes(reply.tensors) for reply in replies}
    whole = 4 * sum(tensor.numel() for tensor in bench.state.tensors.values())
    half = 4 * (2 * 9 + 2 + 4 * 18 + 4 + 3 * 4 + 3)
    assert attempted == {whole}
    decoded = [bench.method.decoded(fading(bench, device), 2) for device in range(12)]
    step = bench.aggregate(replies)
    assert len(set(decoded)) == 3
    assert step.metrics["delivered_bytes"] == sum((0, half, whole)[got] for got in decoded)


def test_a_perfect_channel_and_labels_alone_are_fedavg() -> None:
    slim, plain = Bench(SlimFL(noise=0.0, narrow_weight=0.0, distill=False)), Bench(FedAvg())
    states = [bench.aggregate([bench.reply(0), bench.reply(1, count=5)]).state for bench in (slim, plain)]
    for name, tensor in states[1].tensors.items():
        assert torch.equal(states[0].tensors[name], tensor)


def test_the_narrow_net_is_tested_as_itself() -> None:
    bench = Bench(SlimFL(evaluated=0.5))
    half, inputs = SlimFL().nets(bench.model.structure)[0], samples(5).inputs
    cut = {name: take(tensor, half.sent[name]) for name, tensor in bench.state.tensors.items()}
    shown = bench.method.predictor(bench.state)
    torch.testing.assert_close(
        bench.model.forward(shown.tensors, inputs), bench.model.forward(cut, inputs), rtol=1e-5, atol=1e-6
    )
    whole = SlimFL().predictor(bench.state).tensors
    assert all(whole[name] is tensor for name, tensor in bench.state.tensors.items())


class TestBatchNorm:
    """Statistics are of each width, as in slimmable nets."""

    def bench(self, method: Method[Any, Any]) -> Bench:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        return Bench(method, net, batch=8)

    def test_a_narrow_pass_leaves_no_trace_in_those_of_the_full_net(self) -> None:
        ours, theirs = (self.bench(method).reply(0).tensors for method in (SlimFL(), FedAvg()))
        for name in ("1.running_mean", "1.running_var"):
            assert torch.equal(ours[statistics_of(2)][name], theirs[UPDATE][name])
            assert ours[statistics_of(1)][name].shape == (2,)
            assert name not in ours[UPDATE]
        # After one step the first filters have seen the same batch at both widths.
        torch.testing.assert_close(
            ours[statistics_of(1)]["1.running_var"], ours[statistics_of(2)]["1.running_var"][:2]
        )

    def test_each_width_is_averaged_over_those_it_was_decoded_from(self) -> None:
        bench = self.bench(SlimFL(noise=0.5, evaluated=0.5))
        arrived = [bench.reply(device) for device in range(12)]
        state = bench.aggregate(arrived).state
        gains = [bench.round(0).rng("fading", reply.device).exponential() for reply in arrived]
        decoded = [bench.method.decoded(gain, 2) for gain in gains]
        assert set(decoded) == {0, 1, 2}
        for level in (1, 2):
            group = statistics_of(level)
            those = [
                reply.tensors[group] for reply, count in zip(arrived, decoded, strict=True) if count >= level
            ]
            for name in ("1.running_mean", "1.running_var"):
                mean = torch.stack([bench.state.statistics[group][name] + one[name] for one in those]).mean(
                    dim=0
                )
                torch.testing.assert_close(state.statistics[group][name], mean)
        shown = bench.method.predictor(state).tensors["1.running_var"]
        assert torch.equal(shown[:2], state.statistics[statistics_of(1)]["1.running_var"])

    def test_weak_devices_leave_the_full_nets_alone(self) -> None:
        bench = self.bench(SlimFL(fit=True, noise=0.0))
        reply = bench.reply(0, budget=1.0)
        assert reply.part.label == "0.5x"
        state = bench.aggregate([reply]).state
        full, narrow = (state.statistics[statistics_of(level)]["1.running_mean"] for level in (2, 1))
        assert torch.equal(full, torch.zeros(4))
        assert narrow.any()


def real_price(bench: Bench) -> Price:
    return Price(
        bench.model,
        mode="exact",
        batch=4,
        samples=8,
        cached=True,
        example=samples(2).inputs,
    )


def test_every_width_is_paid_for() -> None:
    bench = Bench(SlimFL())
    price, structure = real_price(bench), bench.model.structure
    half, whole = SlimFL().nets(structure)
    cost = work_cost(SlimFL().local, whole, price, structure)
    assert cost.operations == price(whole).operations + price(half).operations - price(half).update
    assert cost.sustained == cost.operations
    assert cost.share == pytest.approx(cost.operations / price(whole).operations)
    assert cost.memory_bytes == price(whole).memory_bytes + price(half).memory.activations
    assert work_cost(SlimFL(narrow_weight=0.0).local, whole, price, structure) == price(whole)
    assert work_cost(SlimFL().local, half, price, structure) == price(half)


def test_a_budget_acts_only_where_it_is_asked_to() -> None:
    bench = Bench(SlimFL())
    half, whole = SlimFL().nets(bench.model.structure)
    price, structure, work = real_price(bench), bench.model.structure, SlimFL().local
    plain = Meter(Times(price, 1.0, 1), {GLOBAL: structure}, Device(0, 1, 1.0), 8, 2)
    meter = replace(plain, extra=lambda part: work.extra(part, price, structure))

    def given(method: SlimFL, operations: float) -> str:
        client = replace(bench.client(0), plan=Plan(meter, Resources.limit(operations=operations)))
        return method.part(bench.state, client, bench.round(0)).label

    # Enough for the plain full net, too little for both widths together.
    assert given(SlimFL(), plain.usage(whole).operations) == "1x"
    assert given(SlimFL(fit=True), plain.usage(whole).operations) == "0.5x"
    assert given(SlimFL(fit=True), meter.usage(whole).operations) == "1x"
    assert half.label == "0.5x"


def test_devices_that_send_the_left_half_only_are_averaged_into_it() -> None:
    method = SlimFL(fit=True, noise=0.0)
    bench = Bench(method)
    replies = [bench.reply(0, budget=100.0), bench.reply(1)]
    assert [reply.part.label for reply in replies] == ["0.5x", "1x"]
    step = bench.aggregate(replies)
    cut = corners(bench.model.structure, replies[0].part)
    left, both = (trained(bench.state.tensors, reply) for reply in replies)
    for name, tensor in step.state.tensors.items():
        expected = both[name].clone()
        expected[cut[name]] = (expected[cut[name]] + left[name]) / 2
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"slim_widths": "1,0.5"}, r"slim_widths must be growing shares .* \(got 1,0.5\)"),
        ({"slim_widths": "half,1"}, r"slim_widths must be growing shares .* \(got half,1\)"),
        ({"slim_widths": "0.5"}, "end with 1"),
        ({"evaluated": 0.3}, "evaluated = '0.3'"),
        ({"power": 1.0}, r"power must be > 0 and < 1 \(got 1.0\)"),
        ({"rate": 0.0}, r"rate must be > 0 and finite \(got 0.0\)"),
        ({"noise": -1.0}, r"noise must be >= 0 and finite \(got -1.0\)"),
        ({"narrow_weight": math.nan}, r"narrow_weight must be >= 0 \(got nan\)"),
    ],
)
def test_refusals(option: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=rf"^slimfl\..*{words}"):
        SlimFL(**option)


def test_distillation_needs_classes() -> None:
    bench = Bench(SlimFL(), small_net())
    task, site = bench.task(0), replace(bench.site, objective=Objective(loss=functional.mse_loss))
    with pytest.raises(SettingError, match=r"slimfl\.distill"):
        bench.method.local.start(Job(site, task, task.offer[0], None, samples(4), Seeds(0, 0)))
