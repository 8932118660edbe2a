"""FedDF: prototypes that share nothing, an ensemble of all of them, and the best student on validation data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from fedpmt import api
from fedpmt.data.public import NO_LABEL
from fedpmt.methods.feddf import WIDEST, Bill, FedDF, teachers
from fedpmt.parts.depth import full
from fedpmt.parts.width import narrow_start, thinned
from fedpmt.training.distillation import StudentWork, answers, divergence, on_server
from fedpmt.types import MODEL, Examples, SettingError
from support import Bench, flat_cost

if TYPE_CHECKING:
    from fedpmt.methods.base import Server
    from fedpmt.training.messages import Reply

MIXED = [float("inf"), 120.0, 120.0, float("inf")]


def mixed(bench: Bench, index: int = 0) -> list[Reply]:
    return [bench.reply(device, index, budget, count=4 + device) for device, budget in enumerate(MIXED)]


def test_no_steps_are_fedavg_of_each_prototype_by_itself() -> None:
    """x_p = Σ n_k w_k / Σ n_k over the devices of p alone, in their own shapes."""
    bench = Bench(FedDF(steps=0, weight="samples"))
    arrived = mixed(bench)
    labels = {reply.part.label for reply in arrived}
    assert len(labels) == 2
    state = bench.method.aggregate(bench.state, arrived, bench.round(0)).state
    assert set(state.nets) == labels | {WIDEST}
    for label in labels:
        members = [reply for reply in arrived if reply.part.label == label]
        total = sum(reply.samples for reply in members)
        for name, tensor in state.nets[label].items():
            mean = sum(reply.samples * reply.tensors[MODEL][name] for reply in members) / total
            assert tensor.shape == members[0].tensors[MODEL][name].shape
            torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)


def test_one_net_for_all_is_whole_whatever_the_budget() -> None:
    """FedDF's main experiments: without distillation they are FedAvg."""
    bench = Bench(FedDF(nets="one", steps=0))
    arrived = mixed(bench)
    assert {reply.part.label for reply in arrived} == {WIDEST}
    assert bench.method.action("operations") == "none"
    assert FedDF().action("operations") == "device"
    state = bench.method.aggregate(bench.state, arrived, bench.round(0)).state
    for name, tensor in state.tensors.items():
        mean = sum(reply.tensors[MODEL][name] for reply in arrived) / len(arrived)
        torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)


def test_prototypes_do_not_share_weights() -> None:
    """What narrow devices train does not move the widest net where the server does not distil."""
    bench = Bench(FedDF(steps=0))
    arrived = [bench.reply(device, 0, 120.0) for device in range(3)]
    state = bench.method.aggregate(bench.state, arrived, bench.round(0)).state
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in bench.state.tensors.items())


def test_a_narrow_net_starts_at_the_scale_of_its_width() -> None:
    """U(-1/√fan_in, 1/√fan_in) has a deviation of 1/√(3 fan_in), whatever the width."""
    state = Bench(FedDF()).state
    part = thinned(state.structure, state.structure.require_axes(""), 0.5)
    for _name, tensor in state.net(part).items():
        if tensor.ndim > 1:
            fan_in = tensor[0].numel()
            assert tensor.std() == pytest.approx((3 * fan_in) ** -0.5, rel=0.35)
            assert tensor.abs().max() <= fan_in**-0.5 + 1e-6
    assert all(torch.equal(state.net(full(state.structure))[key], one) for key, one in state.start.items())


def test_one_device_teaches_its_own_mean_nothing() -> None:
    """Teacher and student are one net: the loss is zero, and SGD leaves it where it is."""
    method = FedDF(optimizer="sgd", rate=0.1, steps=30, every=30)
    bench = Bench(method)
    alone = [bench.reply(0)]
    idle = Bench(FedDF(steps=0)).method.aggregate(bench.state, alone, bench.round(0)).state
    ensemble = teachers(alone, 12, bench.round(0))
    outputs = answers(bench.model, idle.tensors, ensemble)
    assert float(divergence(outputs, ensemble.targets)) == pytest.approx(0, abs=1e-6)
    no_validation = replace(bench.round(0), at_hand=replace(bench.round(0).server, validation=None))
    refined, steps = method.refined(idle.tensors, full(idle.structure), ensemble, 30, no_validation)
    assert steps == 30
    for name, tensor in refined.items():
        torch.testing.assert_close(tensor, idle.tensors[name], rtol=1e-5, atol=1e-6)


def test_a_constant_on_one_teachers_logits_changes_nothing() -> None:
    """Mean logits are shifted alike in all classes, which a softmax does not see."""
    bench = Bench(FedDF(optimizer="sgd", rate=0.5))
    # Without validation data the last student counts, and not the start.
    unseen = replace(bench.round(0), at_hand=replace(bench.round(0).server, validation=None))
    arrived = mixed(bench)
    weights = dict(arrived[1].tensors[MODEL])
    bias = list(weights)[-1]
    shifted = {**weights, bias: weights[bias] + 3}
    others = [arrived[0], replace(arrived[1], tensors={MODEL: shifted}), *arrived[2:]]
    found = []
    for ensemble in (teachers(members, 12, bench.round(0)) for members in (arrived, others)):
        start = bench.state.tensors
        found.append(bench.method.refined(start, full(bench.state.structure), ensemble, 20, unseen)[0])
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(tensor, start[name], rtol=1e-4, atol=1e-5)


def test_the_ensemble_is_the_mean_of_all_devices_logits_whatever_their_prototype() -> None:
    bench = Bench(FedDF())
    arrived = mixed(bench)
    ensemble = teachers(arrived, 12, bench.round(0))
    by_hand = sum(bench.model.forward(reply.tensors[MODEL], ensemble.inputs) for reply in arrived) / 4
    torch.testing.assert_close(ensemble.targets, by_hand)


def test_labels_of_public_samples_are_not_used() -> None:
    found = []
    for label in (NO_LABEL, 2):
        bench = Bench(FedDF(steps=5))
        bench.public = replace(bench.public, targets=torch.full((12,), label))
        unseen = replace(bench.round(0), at_hand=replace(bench.round(0).server, validation=None))
        found.append(bench.method.aggregate(bench.state, mixed(bench), unseen).state.tensors)
    idle = Bench(FedDF(steps=0))
    mean = idle.method.aggregate(idle.state, mixed(idle), idle.round(0)).state.tensors
    for name, tensor in found[1].items():
        assert torch.equal(found[0][name], tensor)
        assert not torch.equal(mean[name], tensor)  # it was refined


def test_the_best_student_on_validation_data_is_kept_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores .5 (the mean), .4, .7, .6, .6: the net after the second look, and a stop two looks later."""
    method = FedDF(steps=100, every=3, patience=6)
    bench = Bench(method)
    arrived = mixed(bench)
    scores, seen = iter([0.5, 0.4, 0.7, 0.6, 0.6]), []

    def score(self: FedDF, server: Server, tensors: Any) -> float:
        seen.append(tensors)
        return next(scores)

    monkeypatch.setattr(FedDF, "score", score)
    ensemble = teachers(arrived, 12, bench.round(0))
    best, steps = method.refined(
        bench.state.tensors, full(bench.state.structure), ensemble, 100, bench.round(0)
    )
    assert steps == 12
    assert best is seen[2]


def test_distillation_brings_the_student_to_the_ensemble() -> None:
    bench = Bench(FedDF(steps=200, every=200, rate=0.01))
    arrived = [bench.reply(device, count=30) for device in range(3)]
    ensemble = teachers(arrived, 12, bench.round(0))
    round_ = replace(bench.round(0), at_hand=replace(bench.round(0).server, validation=None))
    start = bench.state.tensors
    refined, _ = bench.method.refined(start, full(bench.state.structure), ensemble, 200, round_)
    before, after = (
        float(divergence(answers(bench.model, tensors, ensemble), ensemble.targets))
        for tensors in (start, refined)
    )
    assert after < before / 10


def test_few_steps_are_the_start_and_the_end_of_the_rate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a cosine over the four steps that there are, not over the 10,000 that were asked for."""
    rates: list[float] = []
    scale = StudentWork.scale

    def noted(self: StudentWork, run: Any) -> float:
        rates.append(scale(self, run))
        return rates[-1]

    monkeypatch.setattr(StudentWork, "scale", noted)
    bench = Bench(FedDF(steps=10_000, every=3))
    ensemble = teachers(mixed(bench), 12, bench.round(0))
    bench.method.refined(bench.state.tensors, full(bench.state.structure), ensemble, 4, bench.round(0))
    # (1 + cos(π s / 4)) / 2 for s = 0 to 3, over two looks at the validation data.
    assert rates == pytest.approx([1.0, 0.8536, 0.5, 0.1464], abs=1e-4)


def test_teachers_answer_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many students and steps there are: one pass of each received model over the samples that are used."""
    asked: list[int] = []

    def counted(model: Any, tensors: Any, examples: Examples, cut: int = 0) -> Any:
        asked.append(len(examples))
        return answers(model, tensors, examples, cut)

    monkeypatch.setattr("fedpmt.training.distillation.answers", counted)
    bench = Bench(FedDF(steps=9, every=100))
    step = bench.method.aggregate(bench.state, mixed(bench), bench.round(0))
    assert asked.count(12) == 4
    # Two students, each looked at before and after, on the eight validation samples.
    assert asked.count(8) == 4
    # By hand: 3 batches of 4 by teachers without a price forward; 9 steps of two students.
    students = [bench.price(reply.part).operations for reply in mixed(bench)[:2]]
    assert step.server_operations == 9 * sum(students)


def test_public_data_moves_a_students_statistics_and_no_teachers() -> None:
    """BatchNorm: teachers answer in evaluation mode, students learn in training mode."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    found = []
    for steps in (0, 5):
        bench = Bench(FedDF(steps=steps), net)
        arrived = [bench.reply(device) for device in range(2)]
        before = [reply.tensors[MODEL]["1.running_mean"].clone() for reply in arrived]
        unseen = replace(bench.round(0), at_hand=replace(bench.round(0).server, validation=None))
        found.append(bench.method.aggregate(bench.state, arrived, unseen).state.tensors["1.running_mean"])
        for reply, kept in zip(arrived, before, strict=True):
            assert torch.equal(reply.tensors[MODEL]["1.running_mean"], kept)
    assert not torch.equal(*found)
    bench.model.set_training([False] * len(bench.model.structure.layers))
    ensemble = teachers(arrived, 12, bench.round(0))
    by_hand = sum(bench.model.forward(reply.tensors[MODEL], ensemble.inputs) for reply in arrived) / 2
    torch.testing.assert_close(ensemble.targets, by_hand)


def test_everything_on_the_server_is_billed() -> None:
    """By hand, where a forward pass has a price: teachers once, looks at validation data, and students' steps."""
    bench = Bench(FedDF(steps=9, every=4))
    flat = bench.price
    bench.price = lambda part: replace(flat(part), forward=100.0)
    arrived = mixed(bench)
    step = bench.method.aggregate(bench.state, arrived, bench.round(0))
    students = [bench.price(reply.part) for reply in arrived[:2]]
    asked = (
        sum(bench.price(reply.part).inference for reply in arrived) * 12 / 4
    )  # public samples, in batches of 4
    looks = (1 + 3) * 8 / 4 * sum(cost.inference for cost in students)  # before, and after 4, 8 and 9 steps
    assert students[0].inference > 0
    assert step.server_operations == pytest.approx(
        asked + looks + 9 * sum(cost.operations for cost in students)
    )


def test_teachers_are_billed_for_all_that_they_answered() -> None:
    """Students that stop early do not take back what was asked for them."""
    bill = Bill(10.0, {WIDEST: flat_cost(5)}, 400, 0, 4, 100)
    assert bill.total({WIDEST: 20}, asked=60) == 60 * 10.0 + 20 * 5.0
    assert bill.total({WIDEST: 20}) == 20 * 10.0 + 20 * 5.0
    assert bill.total({WIDEST: 0}, asked=60) == 0


def test_the_server_keeps_to_its_budget() -> None:
    bench = Bench(FedDF(every=10, steps=1000))
    arrived = mixed(bench)
    each = sum(bench.price(reply.part).operations for reply in arrived[:2])
    for steps in (0, 1, 7):
        round_ = replace(bench.round(0), at_hand=replace(bench.round(0).server, budget=each * (steps + 0.5)))
        step = bench.method.aggregate(bench.state, arrived, round_)
        assert step.metrics["server_steps"] == steps
        assert step.metrics["server_steps_default"] == 1000
        assert step.server_operations == steps * each


def test_a_run_keeps_within_the_cap_and_says_so() -> None:
    run = api.run("feddf", rounds=2, devices=10, cohort=10, samples=60)
    assert run.result is not None
    assert (run.result.public_samples, run.result.validation_samples) == (400, 40)
    for record in run.rounds:
        assert 0 < record.server_operations <= 2 * record.operations
        assert 0 < record.metrics["server_steps"] < record.metrics["server_steps_default"] == 10_000
    free = api.run(
        "feddf", rounds=1, devices=10, cohort=5, samples=20, server_cap="none", options={"steps": 30}
    )
    assert free.rounds[0].metrics["server_steps"] == 30


def test_a_prototype_that_never_took_part_is_not_kept() -> None:
    """Not even when it is asked: from its first reply on it is, and stays as it was where later ones are of others."""
    bench = Bench(FedDF(steps=0))
    bench.state = bench.method.aggregate(bench.state, [bench.reply(0)], bench.round(0)).state
    assert set(bench.state.nets) == {WIDEST}
    task = bench.method.assign(bench.state, bench.client(1, 120.0), bench.round(1))
    (part,) = task.offer
    fresh = narrow_start(bench.state.structure, bench.state.start, part)
    assert all(torch.equal(task.tensors[MODEL][name], tensor) for name, tensor in fresh.items())
    assert set(bench.state.nets) == {WIDEST}
    narrow = bench.reply(1, 1, 120.0)
    bench.state = bench.method.aggregate(bench.state, [narrow], bench.round(1)).state
    assert set(bench.state.nets) == {WIDEST, part.label}
    after = bench.method.aggregate(bench.state, [bench.reply(0, 2)], bench.round(2)).state
    for name, tensor in narrow.tensors[MODEL].items():
        assert torch.equal(after.nets[part.label][name], bench.state.nets[part.label][name])
        torch.testing.assert_close(after.nets[part.label][name], tensor)  # it was alone in its mean


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("steps", -1, "a number of 0 or more"),
        ("every", 0, "a number of 1 or more"),
        ("patience", 0, "a number of 1 or more"),
        ("temperature", 0, "a number above 0"),
        ("rate", -1.0, "a number above 0"),
        ("clip", float("nan"), "a number above 0"),
    ],
)
def test_wrong_settings_are_refused(key: str, value: float, needed: str) -> None:
    with pytest.raises(SettingError, match=f"^feddf.{key} = '{value}' is refused: {needed} is needed$"):
        FedDF(**{key: value})  # type: ignore[arg-type]


def test_without_validation_data_the_last_student_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(*args: Any, **settings: Any) -> Any:
        seen.append(on_server(*args, **settings))
        return seen[-1]

    monkeypatch.setattr("fedpmt.training.distillation.on_server", noted)
    bench = Bench(FedDF(every=2, patience=1))
    unseen = replace(bench.round(0), at_hand=replace(bench.round(0).server, validation=None))
    ensemble = teachers(mixed(bench), 12, unseen)
    best, steps = bench.method.refined(bench.state.tensors, full(bench.state.structure), ensemble, 5, unseen)
    assert (steps, len(seen)) == (5, 3)
    assert best is seen[-1][0]


def test_a_run_without_validation_data_takes_all_its_steps() -> None:
    same: dict[str, Any] = {"rounds": 1, "devices": 10, "cohort": 10, "samples": 60, "server_cap": "none"}
    run = api.run("feddf", validation=0, options={"steps": 5}, **same)
    assert run.result is not None
    assert run.result.validation_samples == 0
    assert run.rounds[0].metrics["server_steps"] == 5
