"""FedDF: prototypes that share nothing, an ensemble of all of them, and the best student on validation data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benches import Bench, ForwardPrice
from torch import nn

from fedpmt import api
from fedpmt.data.public import NO_LABEL
from fedpmt.methods.feddf import WIDEST, Distillation, FedDF, Student, teachers
from fedpmt.parts.depth import full
from fedpmt.parts.width import narrow_start, thinned
from fedpmt.training.distillation import answers, divergence
from fedpmt.training.loop import evaluate_model, train_on_server
from fedpmt.training.messages import UPDATE
from fedpmt.types import MODEL, Examples, SettingError
from support import flat_cost

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.methods.base import Server
    from fedpmt.training.messages import Reply
    from fedpmt.types import Tensors

MIXED = [float("inf"), 120.0, 120.0, float("inf")]


def mixed(bench: Bench, index: int = 0) -> list[Reply]:
    return [bench.reply(device, index, budget, count=4 + device) for device, budget in enumerate(MIXED)]


def model(bench: Bench, reply: Reply) -> dict[str, Tensor]:
    """The net that a device has trained: a prototype has tensors of its own, so what was sent is all of it."""
    sent = bench.state.net(reply.part)
    return {name: sent[name] + change for name, change in reply.update.items()}


def ensemble_of(bench: Bench, arrived: list[Reply], count: int = 12) -> Examples:
    """What the teachers say to public samples."""
    return teachers(bench.state, arrived, count, bench.round(0), bench.server)


def refine(
    bench: Bench, start: Tensors, ensemble: Examples, steps: int, **server: Any
) -> tuple[Tensors, int]:
    """The widest student's way from here, on a server that may have other things at hand."""
    widest, at_hand = full(bench.state.structure), replace(bench.server, **server)
    found: tuple[Tensors, int] = bench.method.refined(start, widest, ensemble, steps, bench.round(0), at_hand)
    return found


def test_no_steps_are_fedavg_of_each_prototype_by_itself() -> None:
    """x_p = Σ n_k w_k / Σ n_k over the devices of p alone, in their own shapes."""
    bench = Bench(FedDF(steps=0, weight="samples"))
    arrived = mixed(bench)
    labels = {reply.part.label for reply in arrived}
    assert len(labels) == 2
    state = bench.aggregate(arrived).state
    assert set(state.nets) == labels | {WIDEST}
    for label in labels:
        members = [reply for reply in arrived if reply.part.label == label]
        total = sum(reply.samples for reply in members)
        for name, tensor in state.nets[label].items():
            mean = sum(reply.samples * model(bench, reply)[name] for reply in members) / total
            assert tensor.shape == members[0].update[name].shape
            torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)


def test_one_net_for_all_is_whole_whatever_the_budget() -> None:
    """FedDF's main experiments: without distillation they are FedAvg."""
    bench = Bench(FedDF(nets="one", steps=0))
    arrived = mixed(bench)
    assert {reply.part.label for reply in arrived} == {WIDEST}
    assert bench.method.traits.action("operations") == "none"
    assert FedDF().traits.action("operations") == "device"
    state = bench.aggregate(arrived).state
    for name, tensor in state.tensors.items():
        mean = sum(model(bench, reply)[name] for reply in arrived) / len(arrived)
        torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)


def test_prototypes_do_not_share_weights() -> None:
    """What narrow devices train does not move the widest net where the server does not distil."""
    bench = Bench(FedDF(steps=0))
    arrived = [bench.reply(device, 0, 120.0) for device in range(3)]
    state = bench.aggregate(arrived).state
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
    method = FedDF(student_optimizer="sgd", rate=0.1, steps=30, every=30)
    bench = Bench(method)
    alone = [bench.reply(0)]
    idle = Bench(FedDF(steps=0)).aggregate(alone, state=bench.state).state
    ensemble = ensemble_of(bench, alone)
    outputs = answers(bench.model, idle.tensors, ensemble)
    assert float(divergence(outputs, ensemble.targets)) == pytest.approx(0, abs=1e-6)
    refined, steps = refine(bench, idle.tensors, ensemble, 30, validation=None)
    assert steps == 30
    for name, tensor in refined.items():
        torch.testing.assert_close(tensor, idle.tensors[name], rtol=1e-5, atol=1e-6)


def test_a_constant_on_one_teachers_logits_changes_nothing() -> None:
    """Mean logits are shifted alike in all classes, which a softmax does not see."""
    bench = Bench(FedDF(student_optimizer="sgd", rate=0.5))
    arrived = mixed(bench)
    update = arrived[1].update
    bias = list(update)[-1]
    shifted = {**update, bias: update[bias] + 3}
    others = [arrived[0], replace(arrived[1], tensors={UPDATE: shifted}), *arrived[2:]]
    found, start = [], bench.state.tensors
    for members in (arrived, others):
        # Without validation data the last student counts, and not the start.
        found.append(refine(bench, start, ensemble_of(bench, members), 20, validation=None)[0])
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(tensor, start[name], rtol=1e-4, atol=1e-5)


def test_the_ensemble_is_the_mean_of_all_devices_logits_whatever_their_prototype() -> None:
    bench = Bench(FedDF())
    arrived = mixed(bench)
    ensemble = ensemble_of(bench, arrived)
    by_hand = sum(bench.model.forward(model(bench, reply), ensemble.inputs) for reply in arrived) / 4
    torch.testing.assert_close(ensemble.targets, by_hand)


def test_labels_of_public_samples_are_not_used() -> None:
    found = []
    for label in (NO_LABEL, 2):
        bench = Bench(FedDF(steps=5))
        bench.public = replace(bench.public, targets=torch.full((12,), label))
        found.append(bench.aggregate(mixed(bench), validation=None).state.tensors)
    idle = Bench(FedDF(steps=0))
    mean = idle.aggregate(mixed(idle)).state.tensors
    for name, tensor in found[1].items():
        assert torch.equal(found[0][name], tensor)
        assert not torch.equal(mean[name], tensor)  # it was refined


def test_the_best_student_on_validation_data_is_kept_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores .5 (the mean), .4, .7, .6, .6: the net after the second look, and a stop two looks later."""
    method = FedDF(steps=100, every=3, steps_without_gain=6)
    bench = Bench(method)
    arrived = mixed(bench)
    scores, seen = iter([0.5, 0.4, 0.7, 0.6, 0.6]), []

    def score(self: FedDF, server: Server, tensors: Any) -> float:
        seen.append(tensors)
        return next(scores)

    monkeypatch.setattr(FedDF, "score", score)
    ensemble = ensemble_of(bench, arrived)
    best, steps = refine(bench, bench.state.tensors, ensemble, 100)
    assert steps == 12
    assert best is seen[2]


def test_distillation_brings_the_student_to_the_ensemble() -> None:
    bench = Bench(FedDF(steps=200, every=200, rate=0.01))
    arrived = [bench.reply(device, count=30) for device in range(3)]
    ensemble = ensemble_of(bench, arrived)
    start = bench.state.tensors
    refined, _ = refine(bench, start, ensemble, 200, validation=None)
    before, after = (
        float(divergence(answers(bench.model, tensors, ensemble), ensemble.targets))
        for tensors in (start, refined)
    )
    assert after < before / 10


def test_few_steps_are_the_start_and_the_end_of_the_rate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a cosine over the four steps that there are, not over the 10,000 that were asked for."""
    rates: list[float] = []
    scale = Student.scale

    def noted(self: Student, step: int) -> float:
        rates.append(scale(self, step))
        return rates[-1]

    monkeypatch.setattr(Student, "scale", noted)
    bench = Bench(FedDF(steps=10_000, every=3))
    refine(bench, bench.state.tensors, ensemble_of(bench, mixed(bench)), 4)
    # (1 + cos(π s / 4)) / 2 for s = 0 to 3, over two looks at the validation data.
    assert rates == pytest.approx([1.0, 0.8536, 0.5, 0.1464], abs=1e-4)


def test_teachers_answer_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many students and steps there are: one pass of each received model over the samples that are used."""
    asked: list[int] = []

    def counted(model: Any, tensors: Any, inputs: Any) -> Any:
        asked.append(len(inputs))
        return evaluate_model(model, tensors, inputs)

    monkeypatch.setattr("fedpmt.training.loop.evaluate_model", counted)
    bench = Bench(FedDF(steps=9, every=100))
    step = bench.aggregate(mixed(bench))
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
        before = [reply.update["1.running_mean"].clone() for reply in arrived]
        found.append(bench.aggregate(arrived, validation=None).state.tensors["1.running_mean"])
        for reply, kept in zip(arrived, before, strict=True):
            assert torch.equal(reply.update["1.running_mean"], kept)
    assert not torch.equal(*found)
    bench.model.set_training([False] * len(bench.model.structure.layers))
    ensemble = ensemble_of(bench, arrived)
    by_hand = sum(bench.model.forward(model(bench, reply), ensemble.inputs) for reply in arrived) / 2
    torch.testing.assert_close(ensemble.targets, by_hand)


def test_everything_on_the_server_is_billed() -> None:
    """By hand, where a forward pass has a price: teachers once, looks at validation data, and students' steps."""
    bench = Bench(FedDF(steps=9, every=4))
    bench.price = ForwardPrice(bench.model)
    arrived = mixed(bench)
    step = bench.aggregate(arrived)
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
    costs = Distillation(10.0, {WIDEST: flat_cost(5)}, 400, 0, 4, 100)
    assert costs.total({WIDEST: 20}, asked=60) == 60 * 10.0 + 20 * 5.0
    assert costs.total({WIDEST: 20}) == 20 * 10.0 + 20 * 5.0
    assert costs.total({WIDEST: 0}, asked=60) == 0


def test_the_server_keeps_to_its_budget() -> None:
    bench = Bench(FedDF(every=10, steps=1000))
    arrived = mixed(bench)
    each = sum(bench.price(reply.part).operations for reply in arrived[:2])
    for steps in (0, 1, 7):
        step = bench.aggregate(arrived, budget=each * (steps + 0.5))
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
    bench.state = bench.aggregate([bench.reply(0)]).state
    assert set(bench.state.nets) == {WIDEST}
    task = bench.method.assign(bench.state, bench.client(1, 120.0), bench.round(1))
    (part,) = task.offer
    fresh = narrow_start(bench.state.structure, bench.state.start, part)
    assert all(torch.equal(task.tensors[MODEL][name], tensor) for name, tensor in fresh.items())
    assert set(bench.state.nets) == {WIDEST}
    narrow = bench.reply(1, 1, 120.0)
    bench.state = bench.aggregate([narrow], 1).state
    assert set(bench.state.nets) == {WIDEST, part.label}
    after = bench.aggregate([bench.reply(0, 2)], 2).state
    for name, change in narrow.update.items():
        assert torch.equal(after.nets[part.label][name], bench.state.nets[part.label][name])
        # It was alone in its mean.
        torch.testing.assert_close(after.nets[part.label][name], fresh[name] + change)


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("steps", -1, ">= 0"),
        ("every", 0, ">= 1"),
        ("steps_without_gain", 0, ">= 1"),
        ("temperature", 0, "> 0"),
        ("rate", -1.0, "> 0"),
        ("clip", float("nan"), "> 0"),
    ],
)
def test_wrong_settings_are_refused(key: str, value: float, needed: str) -> None:
    with pytest.raises(SettingError, match=rf"^feddf\.{key} must be {needed} \(got {value}\)$"):
        FedDF(**{key: value})  # type: ignore[arg-type]


def test_without_validation_data_the_last_student_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(*args: Any, **settings: Any) -> Any:
        seen.append(train_on_server(*args, **settings))
        return seen[-1]

    monkeypatch.setattr("fedpmt.training.loop.train_on_server", noted)
    bench = Bench(FedDF(every=2, steps_without_gain=1))
    ensemble = ensemble_of(bench, mixed(bench))
    best, steps = refine(bench, bench.state.tensors, ensemble, 5, validation=None)
    assert (steps, len(seen)) == (5, 3)
    last, _ = seen[-1]
    assert all(best[name].data_ptr() == tensor.data_ptr() for name, tensor in last.tensors.items())


def test_a_run_without_validation_data_takes_all_its_steps() -> None:
    same: dict[str, Any] = {"rounds": 1, "devices": 10, "cohort": 10, "samples": 60, "server_cap": "none"}
    run = api.run("feddf", validation=0, options={"steps": 5}, **same)
    assert run.result is not None
    assert run.result.validation_samples == 0
    assert run.rounds[0].metrics["server_steps"] == 5
