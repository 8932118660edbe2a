"""FedGKT: features and logits both ways, keyed by sample, and not one weight on the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, ForwardPrice
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from fedpmt import api
from fedpmt.methods.fedgkt import (
    EDGE,
    FEATURES,
    LABELS,
    LOGITS,
    STEM,
    TEACHER,
    TRANSFER,
    Edge,
    FedGKT,
    knowledge,
)
from fedpmt.records import DEVICES, MODEL_FILE
from fedpmt.simulation.checkpoint import read_value
from fedpmt.training.local import Job
from fedpmt.training.loop import train
from fedpmt.training.messages import UPDATE
from fedpmt.types import MODEL, SettingError
from support import samples

if TYPE_CHECKING:
    from pathlib import Path


CLASSES, COUNT = 3, 8
WIDTH = 4 * 3 * 3  # the small net's first layer: four filters, pooled to 3 x 3


def second_round(bench: Bench, teacher: torch.Tensor, order: np.ndarray | None = None) -> tuple[Any, Any]:
    """A device's second round with these server logits; its samples may lie in another order than before."""
    _, own = bench.work(0)
    task = bench.method.assign(bench.state, bench.client(0), bench.round(1))
    task = replace(task, tensors={MODEL: {}, TEACHER: {LOGITS: teacher}})
    data = samples(COUNT)
    if order is not None:
        data = data.take(order)
    rng = bench.round(1).rng
    job = Job(bench.site, task, task.offer[0], own, data, lambda purpose: rng(purpose, 0), 0, 1)
    return train(bench.method.local, job)


def test_without_alpha_devices_train_alone() -> None:
    """Whatever the server says changes nothing, and the first round is cross-entropy by itself."""
    alone = Bench(FedGKT(alpha=0.0))
    said = [second_round(alone, torch.randn(COUNT, CLASSES)) for _ in range(2)]
    for name, tensor in said[0][1].tensors.items():
        assert torch.equal(tensor, said[1][1].tensors[name])
    swayed = Bench(FedGKT())
    heard = [
        second_round(swayed, teacher)
        for teacher in (torch.zeros(COUNT, CLASSES), torch.eye(CLASSES).repeat(3, 1)[:COUNT] * 9)
    ]
    assert any(
        not torch.equal(tensor, heard[1][1].tensors[name]) for name, tensor in heard[0][1].tensors.items()
    )
    assert all(
        torch.equal(tensor, swayed.work(0)[1].tensors[name])
        for name, tensor in alone.work(0)[1].tensors.items()
    )


def test_no_weights_travel() -> None:
    """Up: features, logits and labels of each sample; down: logits of each sample, from the second round on."""
    bench = Bench(FedGKT())
    reply = bench.reply(0)
    assert {group: set(tensors) for group, tensors in reply.tensors.items()} == {
        UPDATE: set(),
        TRANSFER: {FEATURES, LOGITS, LABELS},
    }
    sent = {name: tuple(tensor.shape) for name, tensor in reply.tensors[TRANSFER].items()}
    assert sent == {FEATURES: (COUNT, WIDTH), LOGITS: (COUNT, CLASSES), LABELS: (COUNT,)}
    bench.state = bench.aggregate([reply]).state
    for device, down in ((0, {MODEL: {}, TEACHER: {LOGITS: (COUNT, CLASSES)}}), (1, {MODEL: {}})):
        task = bench.method.assign(bench.state, bench.client(device), bench.round(1))
        shapes = {
            group: {name: tuple(one.shape) for name, one in tensors.items()}
            for group, tensors in task.tensors.items()
        }
        assert shapes == down
        assert task.offer[0].sent == task.offer[0].trained == {}


def test_bytes_of_a_run_are_those_of_samples_alone() -> None:
    """Per sample 4 (features + classes + label) up, 4 classes down to those that were here before."""
    run = api.run("fedgkt", task="cnn-mnist", rounds=3, devices=4, cohort=4, samples=10)
    for record in run.rounds:
        assert record.bytes_up == 4 * 10 * 4 * (8 * 12 * 12 + 10 + 1)
        assert record.bytes_down == (0 if record.round == 1 else 4 * 10 * 4 * 10)


def test_logits_are_keyed_by_sample() -> None:
    """The same samples in another order, with their own logits: the same losses, so the same net, within rounding."""
    bench = Bench(FedGKT(rate=1e-3), batch=COUNT)
    teacher = torch.randn(COUNT, CLASSES) * 3
    order = np.random.default_rng(3).permutation(COUNT)
    (_, straight), (_, shuffled) = second_round(bench, teacher), second_round(bench, teacher, order)
    for name, tensor in straight.tensors.items():
        torch.testing.assert_close(tensor, shuffled.tensors[name], rtol=1e-4, atol=1e-5)
    (_, wrong) = second_round(bench, teacher[torch.from_numpy(order)])
    assert any(
        not torch.allclose(tensor, wrong.tensors[name], atol=1e-5)
        for name, tensor in straight.tensors.items()
    )


@pytest.mark.parametrize("temperature", [100.0, 1000.0])
def test_at_large_temperatures_the_gradient_does_not_vanish(temperature: float) -> None:
    """T² KL: the gradient of a sample tends to (z_s - z_t) / classes, both centred."""
    student = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 5, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(knowledge(student, teacher, temperature), student)
    centred = [z - z.mean() for z in (student.detach(), teacher)]
    torch.testing.assert_close(gradient, (centred[0] - centred[1]) / 5, rtol=0.05, atol=0.01)


def test_the_servers_loss_by_hand() -> None:
    """One full-batch step of AMSGrad moves each entry by η against the sign of its gradient."""
    bench = Bench(FedGKT(server_epochs=1, rate=1e-3, adam_decay=0.0, server_alpha=0.5), batch=COUNT)
    reply = bench.reply(0)
    told = reply.tensors[TRANSFER]
    step = bench.aggregate([reply])
    params = {name: tensor.clone().requires_grad_() for name, tensor in bench.state.tensors.items()}
    outputs = bench.model.suffix(1, params, told[FEATURES])
    loss = knowledge(outputs, told[LOGITS], 3.0) + 0.5 * functional.cross_entropy(
        outputs, told[LABELS].long()
    )
    assert step.metrics["server_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = torch.autograd.grad(loss, list(params.values()))
    for (name, parameter), gradient in zip(params.items(), gradients, strict=True):
        sure = gradient.abs() > 1e-4
        assert sure.any()
        moved = (step.state.tensors[name] - parameter.detach())[sure]
        torch.testing.assert_close(moved, -1e-3 * gradient.sign()[sure], rtol=1e-2, atol=1e-6)
    # z_s of the net as it is now.
    torch.testing.assert_close(
        step.state.logits[0], bench.model.suffix(1, step.state.tensors, told[FEATURES]), rtol=1e-5, atol=1e-6
    )


def test_a_devices_loss_by_hand() -> None:
    """CE(z_c, y) + α T² KL of the server's logits, one full-batch step of SGD."""
    bench = Bench(FedGKT(device_optimizer="run", alpha=0.7, temperature=2.0), batch=COUNT)
    teacher = torch.randn(COUNT, CLASSES, generator=torch.Generator().manual_seed(3))
    _, own = bench.work(0)
    params = {name: tensor.clone().requires_grad_() for name, tensor in own.tensors.items()}
    data = samples(COUNT)
    outputs = bench.models[EDGE].forward(params, data.inputs)
    target = functional.softmax(teacher / 2, dim=1) + 1e-7
    kept = functional.kl_div(functional.log_softmax(outputs / 2, dim=1), target, reduction="batchmean")
    loss = functional.cross_entropy(outputs, data.targets) + 0.7 * 4 * kept
    gradients = torch.autograd.grad(loss, list(params.values()))
    _, after = second_round(bench, teacher)
    for (name, parameter), gradient in zip(params.items(), gradients, strict=True):
        torch.testing.assert_close(
            after.tensors[name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6
        )


def test_a_net_with_batch_norm_exports_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)),
    )
    bench = Bench(FedGKT(), net)
    reply, own = bench.work(0)
    edge = bench.models[EDGE]
    statistics = [name for name in own.tensors if "running" in name]
    assert statistics
    assert all(not torch.equal(own.tensors[name], edge.initial()[name]) for name in statistics)
    told = []
    for training in (False, True):
        edge.set_training([training] * len(edge.structure.layers))
        kept = {name: tensor.clone() for name, tensor in own.tensors.items()}  # training mode would move them
        told.append(edge.prefix(STEM, kept, samples(COUNT).inputs).flatten(1))
    torch.testing.assert_close(reply.tensors[TRANSFER][FEATURES], told[0])
    assert not torch.allclose(reply.tensors[TRANSFER][FEATURES], told[1], atol=1e-3)


def test_memory_holds_what_is_told_and_heard() -> None:
    """Features and logits of all samples, in the second round the server's logits, and AMSGrad's three moments."""
    for method, moments in ((FedGKT(), 3), (FedGKT(device_optimizer="run"), 0)):
        bench = Bench(method)
        first = bench.task(0).offer[0].extra
        bench.state = bench.aggregate([bench.reply(0)]).state
        second = bench.task(0, 1).offer[0].extra
        edge = bench.models[EDGE].structure
        wanted = 4 * (moments * edge.size(edge.parameters) + COUNT * (WIDTH + CLASSES))
        assert first.memory_bytes == wanted
        assert second.memory_bytes == wanted + 4 * COUNT * CLASSES
        assert first.kept_bytes == 4 * (moments * edge.size(edge.parameters) + edge.size(edge.tensors))


def test_a_server_that_cannot_pay_for_one_pass_does_nothing() -> None:
    bench = Bench(FedGKT())
    bench.price = ForwardPrice(bench.model, edge=bench.models[EDGE])
    step = bench.aggregate([bench.reply(0)], budget=1.0)
    assert step.server_operations == 0
    assert step.state is bench.state
    assert step.metrics["server_steps"] == 0 < step.metrics["server_steps_default"]


def test_features_are_exported_by_the_net_as_it_is_kept() -> None:
    bench = Bench(FedGKT())
    reply, own = bench.work(0)
    net = bench.models[EDGE]
    features = net.prefix(1, own.tensors, samples(COUNT).inputs)
    torch.testing.assert_close(reply.tensors[TRANSFER][FEATURES], features)
    torch.testing.assert_close(reply.tensors[TRANSFER][LOGITS], net.suffix(1, own.tensors, features))
    assert own.moments.steps == 2  # the optimizer is kept too
    assert bench.work(0, 1, own=own)[1].moments.steps == 4
    np.testing.assert_array_equal(own.ids, samples(COUNT).ids)


def test_only_devices_that_took_part_are_known_to_the_server() -> None:
    bench = Bench(FedGKT())
    state = bench.aggregate([bench.reply(5)]).state
    assert set(state.logits) == {5}
    state = bench.aggregate([bench.reply(2)], 1, state=state).state
    assert set(state.logits) == {2, 5}
    assert bench.aggregate([], 2, state=state).state is state


def test_the_edge_net_is_the_first_layer_and_a_head() -> None:
    bench = Bench(FedGKT())
    edge = bench.models[EDGE].structure
    assert [len(layer.parameters) for layer in edge.layers] == [2, 2]
    assert edge.shapes[edge.layers[1].parameters[0]] == (CLASSES, WIDTH)
    pairs = zip(edge.layers[0].parameters, bench.model.structure.layers[0].parameters, strict=True)
    start, whole = bench.models[EDGE].initial(), bench.model.initial()
    assert all(torch.equal(start[own], whole[first]) for own, first in pairs)


def test_what_is_evaluated_is_a_stem_and_the_servers_net_on_the_whole_test_set(tmp_path: Path) -> None:
    run = api.run("fedgkt", out=tmp_path, rounds=3, devices=6, cohort=3, samples=20, partition="classes:2")
    assert run.result is not None
    assert run.result.evaluates == "split"
    assert {record.evaluates for record in run.rounds} == {"split"}
    settings = api.settings_of(dict(run.settings.items()))
    problem = api.paper_problem_of(settings)
    server = load_file(tmp_path / MODEL_FILE)
    assert not any(name.startswith("fc1.") for name in server)
    means = []
    for path in sorted((tmp_path / DEVICES).glob("*/*")):
        edge = read_value(path)
        assert isinstance(edge, Edge)
        hidden = problem.model.prefix(
            1,
            {
                f"fc1.{name.split('.')[1]}": one
                for name, one in edge.tensors.items()
                if name.startswith("stem")
            },
            torch.from_numpy(problem.data.test.inputs),
        )
        outputs = problem.model.suffix(1, server, hidden)
        means.append(float((outputs.argmax(1).numpy() == problem.data.test.targets).mean()))
    assert len(means) == len({device.device for record in run.rounds for device in record.devices})
    assert run.result.accuracy == pytest.approx(np.mean(means), abs=1e-6)


def test_the_server_keeps_to_its_budget_and_the_record_says_what_it_wanted() -> None:
    run = api.run("fedgkt", rounds=1, devices=6, cohort=3, samples=20)
    (record,) = run.rounds
    assert 0 < record.server_operations <= 2 * record.operations
    assert record.wasted_operations == 0  # an edge net trains no layer of the global one, and yet not in vain
    assert record.metrics["server_steps"] < record.metrics["server_steps_default"] == 20 * 6


def test_modes_and_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingError, match="mode = 'paper' has no price for the net 'edge'"):
        api.run("fedgkt", rounds=1, mode="paper")
    arrays = (np.zeros((40, 4), np.float32), np.arange(40) % 2)
    small: dict[str, Any] = {
        "train": arrays,
        "test": arrays,
        "devices": 4,
        "samples": 5,
        "cohort": 2,
        "rounds": 1,
    }
    with pytest.raises(SettingError, match="fedgkt needs a model that is a chain of its layers"):
        api.run("fedgkt", model=nn.Sequential(nn.Linear(4, 2)), **small)
    real = (np.zeros((40, 4), np.float32), np.zeros((40, 1), np.float32))
    own = {**small, "train": real, "test": real}
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    with pytest.raises(SettingError, match="'fedgkt' needs targets that are classes"):
        api.run(
            "fedgkt",
            model=net,
            loss=functional.mse_loss,
            metric=lambda o, t: -(o - t).square().mean(1),
            **own,
        )


def test_the_runs_optimizer_on_devices_takes_the_runs_settings() -> None:
    """One step of twice the rate goes twice as far, and of none nowhere; Adam has a rate of its own."""
    moved = {}
    for optimizer, rate in (("run", 0.0), ("run", 0.1), ("run", 0.2), ("adam", 0.0), ("adam", 0.1)):
        bench = Bench(FedGKT(device_optimizer=optimizer), batch=COUNT, learning_rate=rate)  # type: ignore[arg-type]
        _, own = bench.work(0)
        assert own.moments.steps == (optimizer == "adam")
        start = bench.models[EDGE].initial()
        moved[optimizer, rate] = torch.cat(
            [(own.tensors[name] - tensor).flatten() for name, tensor in start.items()]
        )
    assert not moved["run", 0.0].any()
    assert moved["run", 0.1].any()
    torch.testing.assert_close(moved["run", 0.2], 2 * moved["run", 0.1], rtol=1e-3, atol=1e-6)
    assert moved["adam", 0.0].any()
    assert torch.equal(moved["adam", 0.0], moved["adam", 0.1])


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("alpha", -0.1, ">= 0"),
        ("server_alpha", float("nan"), ">= 0"),
        ("server_epochs", -1, ">= 0"),
        ("adam_decay", -1.0, ">= 0"),
        ("temperature", 0, "> 0"),
        ("rate", 0.0, "> 0"),
    ],
)
def test_wrong_settings_are_refused(key: str, value: float, needed: str) -> None:
    with pytest.raises(SettingError, match=rf"^fedgkt\.{key} must be {needed} \(got {value}\)$"):
        FedGKT(**{key: value})  # type: ignore[arg-type]
