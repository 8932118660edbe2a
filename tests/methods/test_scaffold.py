"""SCAFFOLD: control variates on the server and on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import WEIGHT, Bench, Quadratics, work_cost
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpmt import api
from fedpmt.methods.averaging import effective_steps
from fedpmt.methods.base import Prototype, Setup
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.scaffold import CONTROL, Control, Controlled, Scaffold
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL
from fedpmt.records import DEVICES
from fedpmt.simulation.assemble import assemble, make_price
from fedpmt.simulation.loop import payload_bytes
from fedpmt.training.optimizers import SGD
from fedpmt.training.server import Momentum
from fedpmt.types import SettingError
from support import SMALL, samples

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from fedpmt.simulation.loop import Federation, Progress
    from fedpmt.training.local import Outcome, Run

UNSURE: dict[str, Any] = {
    "method": "scaffold",
    "task": "cnn-mnist",
    "devices": 16,
    "samples": 20,
    "cohort": 4,
    "rounds": 6,
    "batch": 5,
    "lr": 0.1,
    "partition": "classes:2",
    "failure": 0.15,
    "over_select": 1.5,
    "eval_every": 6,
}


def variate(bench: Quadratics, device: int) -> float:
    """c_i."""
    kept = bench.kept.get(device)
    return float(kept.variate[WEIGHT]) if kept is not None else 0.0


class Population(Bench):
    """A bench with so many devices in all."""

    def __init__(self, method: Any, population: int, module: nn.Module | None = None, **local: Any) -> None:
        super().__init__(method, module, **local)
        prototype = Prototype(self.model.structure, self.model.initial())
        self.state = method.init(Setup({GLOBAL: prototype}, population, self.price))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("II", [(-0.085, 0.2125, [-0.95, 1.8, 0]), (0.180525, -0.5575625, [-1.088875, 1.8, -2.941375])]),
        ("I", [(-0.085, 0.25, [-1, 2, 0]), (0.16865, -0.5425, [-1.085, 2, -3.085])]),
    ],
)
def test_two_rounds_by_hand(option: Any, expected: list[tuple[float, float, list[float]]]) -> None:
    """Four devices, of which 0 and 1, then 0 and 2 take part; η_l = 0.1, K = 2.

    a, b, c, ci, x = [1, 2, 1, 1], [1, -1, 3, 0], 0, [0, 0, 0, 0], 0
    for cohort in ([0, 1], [0, 2]):
        ys, new = [], list(ci)
        for i in cohort:
            y = x
            for _ in range(2):
                y -= 0.1 * (a[i] * (y - b[i]) - ci[i] + c)
            new[i] = a[i] * (x - b[i]) if option == "I" else ci[i] - c + (x - y) / (2 * 0.1)
            ys.append(y)
        c += sum(new[i] - ci[i] for i in cohort) / 4
        x, ci = x + sum(y - x for y in ys) / 2, new
    """
    bench = Quadratics(Scaffold(option=option), [1, 2, 1, 1], [1, -1, 3, 0], steps=2)
    for cohort, (weight, control, variates) in zip(([0, 1], [0, 2]), expected, strict=True):
        assert bench.play(cohort) == pytest.approx(weight, abs=1e-12)
        assert float(bench.state.control[WEIGHT]) == pytest.approx(control, abs=1e-12)
        assert [variate(bench, device) for device in range(3)] == pytest.approx(variates, abs=1e-12)
    assert 3 not in bench.kept


@settings(max_examples=40)
@given(data=st.data())
def test_the_servers_variate_is_the_mean_of_all_others(data: st.DataObject) -> None:
    """After every round, whoever was asked and whichever replies were lost: c = 1/N Σ c_i."""
    devices = data.draw(st.integers(1, 6))
    numbers = st.lists(st.floats(-5, 5), min_size=devices, max_size=devices)
    curvatures = [abs(number) + 0.1 for number in data.draw(numbers)]
    option: Any = data.draw(st.sampled_from(["I", "II"]))
    steps, momentum = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0.0, 0.5]))
    bench = Quadratics(
        Scaffold(option=option, server_rate=data.draw(st.sampled_from([1.0, 0.5]))),
        curvatures,
        data.draw(numbers),
        steps=steps,
        momentum=momentum,
    )
    members = st.sets(st.integers(0, devices - 1))
    for _ in range(4):
        bench.play(data.draw(members), lost=data.draw(members))
        mean = sum(variate(bench, device) for device in range(devices)) / devices
        assert float(bench.state.control[WEIGHT]) == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize(("option", "deadline"), [("I", 92.0), ("II", 46.0)])
def test_server_and_devices_stay_together_in_a_run(option: Any, deadline: float, tmp_path: Path) -> None:
    """Replies fail, come late or come when enough are there: such a device keeps its old c_i, and the mean holds."""
    config = api.settings_of({**UNSURE, "deadline": deadline})
    outcomes, members, unheard = set(), set(), 0
    with assemble(config, api.paper_problem_of(config), Scaffold(option=option), tmp_path) as federation:
        progress = federation.start()
        for _ in range(config.rounds):
            before = kept(federation, progress)
            progress, record = federation.play(progress)
            federation.store.settle(progress.accepted or {})
            after = kept(federation, progress)
            for device in record.devices:
                outcomes.add(device.outcome)
                if device.outcome == "arrived":
                    members.add(device.device)
                elif device.device in before:
                    assert same(before[device.device], after[device.device])
                    unheard += 1
            for name, control in progress.state.control.items():
                total = sum((own.variate[name] for own in after.values()), torch.zeros_like(control))
                torch.testing.assert_close(control, total / config.devices, rtol=1e-4, atol=1e-6)
                assert control.abs().sum() > 0
    assert outcomes == {"arrived", "late", "failed", "surplus"}
    assert unheard > 0
    files = [path.name for path in (tmp_path / DEVICES).rglob("*.safetensors")]
    assert {int(name.split("-")[0]) for name in files} == members
    assert len(files) == len(members) < config.devices


def kept(federation: Federation, progress: Progress) -> dict[int, Control]:
    """What each device that ever counted holds."""
    accepted = progress.accepted or {}
    return {device: federation.store.read(device, index) for device, index in accepted.items()}


def same(one: Control, other: Control) -> bool:
    return all(torch.equal(one.variate[name], other.variate[name]) for name in one.variate)


def test_what_devices_keep_does_not_grow_with_rounds_or_with_devices(tmp_path: Path) -> None:
    """One c_i for each device that took part, of the size of the model, however many rounds it was in."""
    sizes = {}
    for devices, rounds in ((8, 1), (8, 4), (80, 1)):
        out = tmp_path / f"{devices}-{rounds}"
        config: dict[str, Any] = {**SMALL, "task": "cnn-mnist", "devices": devices, "rounds": rounds}
        run = api.run("scaffold", out=out, **config)
        files = list((out / DEVICES).rglob("*.safetensors"))
        members = {device.device for record in run.rounds for device in record.devices}
        assert len(files) == len(members)
        sizes[devices, rounds] = {path.stat().st_size for path in files}
        assert (out / "checkpoint.safetensors").stat().st_size < 4 * min(sizes[devices, rounds])
    assert max(max(found) for found in sizes.values()) - min(min(found) for found in sizes.values()) < 64


def test_one_step_of_all_devices_is_one_step_of_gradient_descent() -> None:
    """K = 1, everybody, η_g = 1: the variates cancel, whatever they are, as c is their mean."""
    torch.manual_seed(1)
    ours = Population(Scaffold(option="II"), 4, batch=8)
    theirs = Population(FedAvg(weight="uniform"), 4, batch=8)
    owned = [
        Control({name: torch.randn_like(tensor) for name, tensor in ours.state.control.items()})
        for _ in range(4)
    ]
    for index in range(3):
        control = {
            name: sum((own.variate[name] for own in owned), torch.zeros_like(tensor)) / 4
            for name, tensor in ours.state.control.items()
        }
        ours.state = replace(ours.state, control=control)
        answers = [ours.work(device, index, own=own) for device, own in enumerate(owned)]
        owned = [own for _, own in answers]
        ours.state = ours.aggregate([reply for reply, _ in answers], index).state
        replies = [theirs.reply(device, index) for device in range(4)]
        theirs.state = theirs.aggregate(replies, index).state
    for name, tensor in theirs.state.tensors.items():
        torch.testing.assert_close(ours.state.tensors[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("option", ["I", "II"])
def test_a_single_device_trains_by_plain_sgd(option: Any, momentum: float) -> None:
    """N = 1: c is c_i, and c - c_i is zero, to the bit."""
    ours, theirs = (
        Population(method, 1, epochs=2, optimizer=SGD(momentum))
        for method in (Scaffold(option=option), FedAvg())
    )
    own = None
    for index in range(3):
        reply, own = ours.work(0, index, own=own)
        ours.state = ours.aggregate([reply], index).state
        theirs.state = theirs.aggregate([theirs.reply(0, index)], index).state
        assert all(torch.equal(own.variate[name], tensor) for name, tensor in ours.state.control.items())
    for name, tensor in theirs.state.tensors.items():
        assert torch.equal(ours.state.tensors[name], tensor)


def test_without_variates_it_is_uniform_fedavg_bit_for_bit() -> None:
    """All Δc_i forced to zero; devices hold unequal counts."""
    ours, theirs = Bench(Scaffold(option="none")), Bench(FedAvg(weight="uniform"))
    for index in range(2):
        for bench in (ours, theirs):
            replies = [bench.reply(device, index, count=5 + 3 * device) for device in range(3)]
            bench.state = bench.aggregate(replies, index).state
    for name, tensor in theirs.state.tensors.items():
        assert torch.equal(ours.state.tensors[name], tensor)
    assert not any(bool(control.any()) for control in ours.state.control.values())


def test_drift_is_taken_out() -> None:
    """F_0 = (w - 1)² / 2 and F_1 = 2 (w + 1)² have their mean's minimum at -0.6; four steps of FedAvg end elsewhere.

    Its fixed point: with r_i = (1 - η a_i)^4, w = Σ (1 - r_i) b_i / Σ (1 - r_i).
    """
    methods: dict[str, Any] = {"I": Scaffold(option="I"), "II": Scaffold(option="II"), "fedavg": FedAvg()}
    found = {}
    for name, method in methods.items():
        bench = Quadratics(method, [1, 4], [1, -1], steps=4, learning_rate=0.1)
        found[name] = [bench.play([0, 1]) for _ in range(25)][-1]
    left = [1 - 0.9**4, 1 - 0.6**4]
    assert found["fedavg"] == pytest.approx((left[0] - left[1]) / sum(left), abs=1e-3)
    assert found["fedavg"] > -0.45
    assert found["II"] == pytest.approx(-0.6, abs=1e-3)
    assert found["I"] == pytest.approx(-0.6, abs=1e-3)


@dataclass(frozen=True)
class Watched(Controlled):
    """Remembers the gradients it is shown."""

    def correct(self, run: Run[Control], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        run.memo.setdefault("seen", []).append(gradients)
        return super().correct(run, gradients)

    def reply(self, run: Run[Control]) -> tuple[Outcome, Control]:
        outcome, kept = super().reply(run)
        seen = run.memo["seen"]
        assert len(seen) == run.steps == 6
        for name, variate in kept.variate.items():
            mean = sum(gradients[name] for gradients in seen) / len(seen)
            torch.testing.assert_close(variate, mean, rtol=1e-3, atol=1e-5)
        return outcome, kept


def test_option_two_is_the_mean_gradient_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """K counts the steps of all epochs; c_i⁺ is then the mean of g, with variates from the round before too."""
    monkeypatch.setattr(Scaffold, "local", property(lambda self: Watched(self.option)))
    bench = Bench(Scaffold(option="II"), epochs=3)
    own = None
    for index in range(2):
        reply, own = bench.work(0, index, own=own)
        bench.state = bench.aggregate([reply], index).state


@given(
    steps=st.integers(1, 12),
    momentum=st.sampled_from([0.0, 0.3, 0.9]),
    rates=st.lists(st.floats(0.01, 0.5), min_size=2, max_size=3),
)
@settings(max_examples=25)
def test_momentum_and_learning_rate_do_not_change_what_is_measured(
    steps: int, momentum: float, rates: list[float]
) -> None:
    """Where the gradient is the same everywhere, c_i is that gradient, by the rate of each round.

    A curvature of 1e-9 around a centre of -1e9 is a gradient of 1 wherever w goes here.
    """
    method = Scaffold(option="II")
    bench = Quadratics(method, [1e-9, 1e-9], [-1e9, -1e9], steps=steps, momentum=momentum)
    for rate in rates:
        bench.settings = replace(bench.settings, learning_rate=rate)
        bench.play([0])
        assert variate(bench, 0) == pytest.approx(1, rel=1e-5)


def test_momentum_counts_a_gradient_in_later_steps_too() -> None:
    assert effective_steps(0, 0.9) == 0
    assert effective_steps(7, 0.0) == 7
    assert effective_steps(3, 0.5) == 1 + 1.5 + 1.75
    assert effective_steps(1000, 0.9) == pytest.approx(1000 / 0.1 - 0.9 / 0.01, rel=1e-9)


def test_option_one_is_the_gradient_of_all_samples_at_the_received_model() -> None:
    """Samples count alike, though the last batch is smaller."""
    bench = Bench(Scaffold(option="I"))
    data = samples(10, seed=0)
    _, own = bench.work(0, count=10)
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in bench.state.tensors.items()}
    loss = nn.functional.cross_entropy(bench.model.forward(tensors, data.inputs), data.targets)
    for name, gradient in zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True):
        torch.testing.assert_close(own.variate[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_the_servers_rate_scales_its_step(rate: float) -> None:
    plain, scaled = (Bench(method, normed()) for method in (Scaffold(), Scaffold(server_rate=rate)))
    before = plain.state.tensors
    one, other = (bench.aggregate([bench.reply(0), bench.reply(1)]).state for bench in (plain, scaled))
    for name, start in before.items():
        if name in plain.model.structure.parameters:
            torch.testing.assert_close(
                other.tensors[name] - start, rate * (one.tensors[name] - start), rtol=1e-3, atol=1e-6
            )
            assert torch.equal(one.control[name], other.control[name])
        else:
            assert torch.equal(one.tensors[name], other.tensors[name])


def normed() -> nn.Sequential:
    """A net with running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize("option", ["I", "II"])
def test_running_statistics_have_no_variate(option: Any) -> None:
    """They are averaged as in FedAvg, and the extra pass of Option I leaves no trace in them."""
    ours, theirs = (
        Bench(method, normed(), learning_rate=0.0) for method in (Scaffold(option=option), FedAvg())
    )
    reply, own = ours.work(0)
    parameters = set(ours.model.structure.parameters)
    assert set(reply.tensors[CONTROL]) == set(own.variate) == set(ours.state.control) == parameters
    plain = theirs.reply(0)
    buffers = set(ours.model.structure.tensors) - parameters
    assert buffers == {"1.running_mean", "1.running_var"}
    assert all(torch.equal(reply.update[name], plain.update[name]) for name in buffers)


def test_without_a_step_nothing_is_learned() -> None:
    """η = 0: no division by it; c_i stays as it was."""
    bench = Bench(Scaffold(option="II"), learning_rate=0.0)
    reply, own = bench.work(0)
    assert not any(bool(change.any()) for change in reply.tensors[CONTROL].values())
    assert not any(bool(variate.any()) for variate in own.variate.values())


def test_an_empty_round_changes_nothing() -> None:
    bench = Bench(Scaffold())
    after = bench.aggregate([]).state
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in bench.state.tensors.items())
    assert all(torch.equal(after.control[name], tensor) for name, tensor in bench.state.control.items())


def test_twice_the_bytes_of_fedavg_both_ways() -> None:
    bench, plain = Bench(Scaffold()), Bench(FedAvg())
    task, other = (one.method.assign(one.state, one.client(0), one.round(0)) for one in (bench, plain))
    assert payload_bytes(task.tensors) == 2 * payload_bytes(other.tensors)
    assert payload_bytes(bench.reply(0).tensors) == 2 * payload_bytes(plain.reply(0).tensors)
    config: dict[str, Any] = {**SMALL, "rounds": 1}
    ours, theirs = (api.run(name, **config).result for name in ("scaffold", "fedavg"))
    assert ours is not None
    assert theirs is not None
    assert (ours.bytes_up, ours.bytes_down) == (2 * theirs.bytes_up, 2 * theirs.bytes_down)


@pytest.mark.parametrize("mode", ["exact", "paper"])
def test_the_work_is_paid_for(mode: str) -> None:
    """An operation more per parameter and step, three more models held; Option I: another pass over all samples."""
    config = api.settings_of({"method": "scaffold", "task": "cnn-mnist", "epochs": 2, "mode": mode})
    price = make_price(config, api.paper_problem_of(config))
    everything = full(price.structure)
    plain = price(everything)
    works = (Scaffold(option=option).local for option in ("II", "I"))
    two, one = (work_cost(work, everything, price, price.structure) for work in works)
    assert two.operations == one.operations == plain.operations + plain.update
    model_bytes = 4 * price.structure.size(price.structure.parameters)
    assert two.memory_bytes == plain.memory_bytes + 3 * model_bytes
    assert one.memory_bytes == plain.memory_bytes + 4 * model_bytes
    usual, more, most = (
        price.load(cost, samples=config.samples, epochs=config.epochs) for cost in (plain, two, one)
    )
    assert usual == 2
    assert more == pytest.approx(2 * (1 + plain.update / plain.operations))
    assert most == pytest.approx(more + 1)


def test_a_server_rate_that_cannot_be_is_refused() -> None:
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(SettingError, match=r"scaffold\.server_rate must be > 0 \(got"):
            Scaffold(server_rate=rate)


def test_a_server_has_one_rate() -> None:
    """Momentum steps x by its own rate, here half of what the mean says; η_g in addition would be left out."""
    plain, half = Bench(Scaffold()), Bench(Scaffold(server=Momentum(lr=0.5)))
    replies = [plain.reply(0), plain.reply(1)]
    one, other = (bench.aggregate(replies).state for bench in (plain, half))
    for name, start in plain.state.tensors.items():
        torch.testing.assert_close(other.tensors[name] - start, (one.tensors[name] - start) / 2)
        assert torch.equal(one.control[name], other.control[name])
    with pytest.raises(SettingError, match=r"scaffold\.server_rate must be 1 with a server optimizer"):
        Scaffold(server_rate=0.5, server=Momentum())


def test_devices_begin_with_nothing_on_disk() -> None:
    """A variate of zeros need not be written: it is the absence of one."""
    first = Scaffold().local.first(3, lambda purpose: np.random.default_rng(0))
    assert first == Control({})
