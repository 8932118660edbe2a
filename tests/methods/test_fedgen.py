"""FedGen: a generator that agrees with the devices' heads and leaves them alone; without it, FedAvg."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, trained
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from fedpmt import api
from fedpmt.methods.fedgen import (
    COUNTS,
    GENERATOR,
    FedGen,
    diversity,
    generate,
    new_generator,
    noise_of,
)
from fedpmt.records import DEVICES, MODEL_FILE
from fedpmt.simulation.checkpoint import read_value
from fedpmt.training.loop import train_on_server
from fedpmt.training.messages import UPDATE
from fedpmt.types import MODEL, SettingError
from support import samples

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def test_with_weights_zero_it_is_fedavg_and_sends_no_generator() -> None:
    """The bits are compared by the contract suite; here that nothing else is left of it either."""
    bench = Bench(FedGen(generative=0, latent=0))
    task = bench.method.assign(bench.state, bench.client(0), bench.round(5))
    assert set(task.tensors) == {MODEL}
    step = bench.aggregate([bench.reply(0)], 5)
    assert step.server_operations == 0
    assert step.state.generator is bench.state.generator


def test_the_first_round_has_no_generator_and_weights_fall() -> None:
    method = FedGen(generative=10, latent=1)
    assert method.weights(0) == (0.0, 0.0)
    assert method.weights(1) == pytest.approx((9.8, 0.98))
    assert method.weights(50) == pytest.approx((10 * 0.98**50, 0.98**50))
    assert method.weights(10_000) == (1e-4, 1e-4)
    bench = Bench(method)
    first, second = (
        bench.method.assign(bench.state, bench.client(0), bench.round(index)) for index in (0, 1)
    )
    assert GENERATOR not in first.tensors
    assert GENERATOR in second.tensors
    assert second.offer[0].extra.step > first.offer[0].extra.step == 0


def test_the_servers_steps_leave_heads_as_they_are_and_move_the_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(FedGen(steps=20))
    arrived = [bench.reply(device) for device in range(3)]
    before = [{name: tensor.clone() for name, tensor in reply.update.items()} for reply in arrived]
    used: list[dict[str, Any]] = []

    def noted(*args: Any, **settings: Any) -> Any:
        run, loss = train_on_server(*args, **settings)
        used.append(run.memo)
        return run, loss

    monkeypatch.setattr("fedpmt.training.loop.train_on_server", noted)
    step = bench.aggregate(arrived)
    for reply, kept in zip(arrived, before, strict=True):
        assert all(torch.equal(reply.update[name], tensor) for name, tensor in kept.items())
    # Those that the steps were taken with: still what devices sent.
    [memo] = used
    for place, name in zip(("weight", "bias"), bench.state.head, strict=True):
        assert torch.equal(
            memo[place], torch.stack([bench.state.tensors[name] + kept[name] for kept in before])
        )
    moved = {
        name
        for name, tensor in step.state.generator.items()
        if not torch.equal(tensor, bench.state.generator[name])
    }
    assert moved == set(bench.state.generator)
    assert all(not tensor.requires_grad for tensor in step.state.generator.values())
    # The mean is FedAvg's: the generator learns from fresh heads, and leaves the average alone.
    plain = Bench(FedGen(generative=0, latent=0))
    other = plain.aggregate(arrived).state
    assert all(torch.equal(other.tensors[name], tensor) for name, tensor in step.state.tensors.items())


@pytest.mark.slow
def test_the_generator_learns_what_heads_call_by_their_label() -> None:
    bench = Bench(FedGen(steps=400, rate=1e-2, variety=0.0))
    arrived = [bench.reply(device, count=40) for device in range(3)]
    state = bench.aggregate(arrived).state
    weight, bias = state.head
    labels = torch.arange(3).repeat(20)
    noise = noise_of(np.random.default_rng(0), 60, 32, CPU)
    agree = []
    for generator in (bench.state.generator, state.generator):
        features = generate(generator, noise, labels)
        logits = [
            functional.linear(features, model[weight], model[bias])
            for model in (trained(bench.state.tensors, reply) for reply in arrived)
        ]
        agree.append(float(sum(functional.cross_entropy(one, labels) for one in logits)))
    assert agree[1] < agree[0] / 2


def test_a_head_counts_by_its_share_of_a_label() -> None:
    """α_k^y = n_k^y / Σ_j n_j^y: a head without samples of y has no say on y."""
    bench = Bench(FedGen(steps=1, variety=0.0))
    arrived = [bench.reply(device) for device in range(2)]
    _weight, bias = bench.state.head

    def told(counts: list[list[int]], second_bias: float) -> dict[str, torch.Tensor]:
        replies = []
        for reply, held in zip(arrived, counts, strict=True):
            tensors = {**reply.tensors, COUNTS: {COUNTS: torch.tensor(held, dtype=torch.int32)}}
            if reply.device == 1:
                shifted = reply.update[bias] + torch.tensor([second_bias, 0.0, 0.0])
                tensors[UPDATE] = {**reply.update, bias: shifted}
            replies.append(replace(reply, tensors=tensors))
        return dict(bench.aggregate(replies).state.generator)

    silent = [told([[8, 0, 0], [0, 0, 0]], shift) for shift in (0.0, 9.0)]
    heard = [told([[8, 0, 0], [8, 0, 0]], shift) for shift in (0.0, 9.0)]
    assert torch.equal(silent[0]["second.weight"], silent[1]["second.weight"])
    assert not torch.equal(heard[0]["second.weight"], heard[1]["second.weight"])


@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 100))
def test_diversity_is_above_zero_and_at_most_one(count: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = torch.from_numpy(rng.normal(size=(count, size)))
    noise = torch.from_numpy(rng.random((count, 3)))
    found = float(diversity(features, noise))
    assert 0 < found <= 1
    assert float(diversity(features[:1].expand(count, size), noise)) == 1
    # By hand, pair by pair.
    pairs = [
        float((features[i] - features[j]).abs().mean() * (noise[i] - noise[j]).square().mean())
        for i in range(count)
        for j in range(count)
    ]
    assert found == pytest.approx(np.exp(-np.mean(pairs)))


def test_the_generator_is_that_of_torch_modules() -> None:
    """FC, BatchNorm, ReLU, FC on noise and label; statistics move in training alone."""
    generator = new_generator(3, 5, 4, 6, np.random.default_rng(0))
    module = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    names = ["first.weight", "first.bias", "norm.weight", "norm.bias", "norm.mean", "norm.variance"]
    places = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    names, places = [*names, "second.weight", "second.bias"], [*places, "3.weight", "3.bias"]
    module.load_state_dict(
        {place: generator[name] for name, place in zip(names, places, strict=True)}, strict=False
    )
    noise, labels = noise_of(np.random.default_rng(1), 8, 4, CPU), torch.arange(8) % 3
    given_ = torch.cat([noise, functional.one_hot(labels, 3).float()], dim=1)
    assert 0 <= float(noise.min()) <= float(noise.max()) < 1
    for training in (True, False, True):
        module.train(training)
        before = generator["norm.mean"].clone()
        torch.testing.assert_close(generate(generator, noise, labels, training=training), module(given_))
        assert torch.equal(before, generator["norm.mean"]) is not training
    assert (
        sum(
            tensor.numel()
            for name, tensor in new_generator(10, 32, 32, 256, np.random.default_rng(0)).items()
            if name not in ("norm.mean", "norm.variance")
        )
        == 19_744
    )


@pytest.mark.parametrize(("generative", "latent"), [(0.0, 2.0), (3.0, 0.0), (3.0, 2.0)])
def test_a_devices_step_by_hand(generative: float, latent: float) -> None:
    """CE + A CE(head(G(ε, y~)), y~) + B KL(outputs || head(G(ε, y))), the target of the last being a constant."""
    bench = Bench(FedGen(generative=generative, latent=latent), batch=8)
    task = bench.method.assign(bench.state, bench.client(0), bench.round(1))
    reply = bench.reply(0, 1)
    data = samples(8, seed=0)
    params = {name: tensor.clone().requires_grad_() for name, tensor in bench.state.tensors.items()}
    order = bench.round(1).rng("order", 0).permutation(8)
    batch = data.take(order)
    rng, (weight, bias) = bench.round(1).rng("latent", 0), bench.state.head

    def said_of(labels: torch.Tensor) -> torch.Tensor:
        features = generate(task.tensors[GENERATOR], noise_of(rng, 8, 32, CPU), labels)
        return functional.linear(features, params[weight], params[bias])

    outputs = bench.model.forward(params, batch.inputs)
    loss = functional.cross_entropy(outputs, batch.targets)
    if generative:
        drawn = torch.from_numpy(rng.integers(3, size=8))
        loss = loss + generative * 0.98 * functional.cross_entropy(said_of(drawn), drawn)
    if latent:
        target = functional.softmax(said_of(batch.targets), dim=1).detach()
        own = functional.kl_div(functional.log_softmax(outputs, 1), target, reduction="batchmean")
        loss = loss + latent * 0.98 * own
    gradients = torch.autograd.grad(loss, list(params.values()))
    found = trained(bench.state.tensors, reply)
    for (name, parameter), gradient in zip(params.items(), gradients, strict=True):
        torch.testing.assert_close(found[name], (parameter - 0.1 * gradient).detach())


def test_label_counts_travel_up() -> None:
    bench = Bench(FedGen())
    counts = bench.reply(2).tensors[COUNTS][COUNTS]
    assert counts.tolist() == np.bincount(samples(8, seed=2).targets.numpy(), minlength=3).tolist()
    assert counts.element_size() == 4


def test_a_batch_of_one_does_not_stop_the_generators_norm() -> None:
    run = api.run("fedgen", rounds=2, devices=5, cohort=2, samples=3, batch=1)
    assert run.rounds[-1].metrics["server_steps"] == 50


def test_a_model_without_a_linear_head_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.b(self.a(inputs)))

    arrays = (np.zeros((40, 4), np.float32), np.arange(40) % 2)
    with pytest.raises(SettingError, match="fedgen needs a model that is a chain"):
        api.run("fedgen", model=Odd(), train=arrays, test=arrays, devices=4, samples=5, cohort=2, rounds=1)


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("generative", -1.0, ">= 0"),
        ("latent", float("nan"), ">= 0"),
        ("steps", -1, ">= 0"),
        ("rate", 0.0, "> 0"),
        ("noise", 0, ">= 1"),
        ("hidden", 0, ">= 1"),
        ("decay", 1.5, "> 0 and <= 1"),
    ],
)
def test_wrong_settings_are_refused(key: str, value: float, needed: str) -> None:
    with pytest.raises(SettingError, match=rf"^fedgen\.{key} must be {needed} \(got {value}\)$"):
        FedGen(**{key: value})  # type: ignore[arg-type]


class TestHeadAlone:
    """Bodies stay, as wide as a device can afford; heads are alike and are averaged."""

    def test_only_heads_travel_and_bodies_differ(self) -> None:
        bench = Bench(FedGen(share="head"))
        wide, narrow = (bench.work(device, 0, budget) for device, budget in ((0, float("inf")), (1, 200.0)))
        head = set(bench.state.head)
        for reply, body in (wide, narrow):
            assert set(reply.update) == head
            assert not set(body.tensors) & head
        shapes = [
            {name: tuple(one.shape) for name, one in body.tensors.items()} for _, body in (wide, narrow)
        ]
        assert shapes[0].keys() == shapes[1].keys()
        assert shapes[0]["0.weight"][0] > shapes[1]["0.weight"][0]
        # What enters the head is whole.
        assert shapes[0]["4.weight"][0] == shapes[1]["4.weight"][0] == 8

    def test_the_shared_head_is_the_mean_and_the_body_goes_on(self) -> None:
        bench = Bench(FedGen(share="head", weight="uniform"))
        answers = [bench.work(device) for device in range(3)]
        state = bench.aggregate([reply for reply, _ in answers]).state
        assert set(state.tensors) == set(state.head)
        for name in state.head:
            heads = [bench.state.tensors[name] + reply.update[name] for reply, _ in answers]
            torch.testing.assert_close(state.tensors[name], torch.stack(heads).mean(dim=0))
        bench.state = state
        _, body = answers[0]
        frozen = Bench(FedGen(share="head", weight="uniform"), learning_rate=0.0)
        frozen.state = state
        reply, kept = frozen.work(0, 1, own=body)
        # Without a step: the server's head and the device's own body, as they were.
        assert all(torch.equal(kept.tensors[name], tensor) for name, tensor in body.tensors.items())
        assert not any(bool(reply.update[name].any()) for name in state.head)

    def test_without_a_generator_the_first_step_is_the_whole_models(self) -> None:
        """Round 0 of a device that can afford everything: its net trains as FedAvg's would, head and body."""
        bench, whole = Bench(FedGen(share="head")), Bench(FedGen())
        (reply, body), plain = bench.work(0), whole.reply(0)
        start = bench.model.initial()
        for name, change in plain.update.items():
            own = reply.update.get(name)
            assert torch.equal(body.tensors[name] - start[name] if own is None else own, change)

    def test_a_run_is_within_its_budget_and_evaluates_split_nets(self) -> None:
        run = api.run(
            "fedgen", options={"share": "head"}, budget="operations", rounds=3, devices=10, cohort=10
        )
        assert run.result is not None
        assert run.result.evaluates == "split"
        assert run.result.budget_action == "device"
        assert not any(device.over_budget for step in run.rounds for device in step.devices)
        assert run.result.bytes_up == sum(device.bytes_up for step in run.rounds for device in step.devices)

    def test_what_is_evaluated_is_every_body_with_the_shared_head_on_all_classes(
        self, tmp_path: Path
    ) -> None:
        """Also where devices hold two classes each: unlike personal nets these are not tested on their own classes."""
        settings: dict[str, Any] = {
            "rounds": 2,
            "devices": 10,
            "cohort": 4,
            "samples": 20,
            "partition": "classes:2",
        }
        run = api.run("fedgen", options={"share": "head"}, out=tmp_path, **settings)
        assert run.result is not None
        files = {int(path.name.split("-")[0]): path for path in (tmp_path / DEVICES).glob("*/*")}
        problem = api.paper_problem_of(api.settings_of(run.settings))
        test, head = problem.data.test, load_file(tmp_path / MODEL_FILE)
        hits = []
        for path in files.values():
            outputs = problem.model.forward(
                {**read_value(path).tensors, **head}, torch.from_numpy(test.inputs)
            )
            hits.append(float((outputs.argmax(1).numpy() == test.targets).mean()))
        assert run.result.accuracy == pytest.approx(np.mean(hits), abs=1e-6)

    def test_redrawn_levels_are_refused(self) -> None:
        with pytest.raises(SettingError, match=r"^level-draw = 'round': fedgen keeps a net"):
            api.run("fedgen", options={"share": "head"}, level_draw="round", rounds=1)
