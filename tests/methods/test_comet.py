"""COMET: nets of one's own, clustered answers, and nothing but answers on the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench
from hypothesis import given
from hypothesis import strategies as st

from fedpmt import api
from fedpmt.methods.comet import ANSWERS, CENTROIDS, Comet, Personal, clustered, drawn, nearest
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, Part
from fedpmt.parts.width import thinned
from fedpmt.records import DEVICES
from fedpmt.simulation.assemble import make_price
from fedpmt.simulation.checkpoint import read_value
from fedpmt.training.local import Job, LocalWork
from fedpmt.training.loop import local_round, train
from fedpmt.training.messages import UPDATE, Task
from fedpmt.types import MODEL, SettingError
from support import samples

if TYPE_CHECKING:
    from pathlib import Path


def job(bench: Bench, task: Task, device: int, index: int, own: Any = None) -> Job[Any]:
    """A device's local round."""
    rng = bench.round(index).rng
    data = samples(8, seed=device)
    return Job(
        bench.site, task, task.offer[0], own, data, lambda purpose: rng(purpose, device), device, index
    )


def played(bench: Bench, devices: range, rounds: int, budget: float = float("inf")) -> dict[int, Personal]:
    """Rounds of these devices; what each has at the end."""
    kept: dict[int, Any] = dict.fromkeys(devices)
    for index in range(rounds):
        answers = {device: bench.work(device, index, budget, own=kept[device]) for device in devices}
        kept = {device: own for device, (_, own) in answers.items()}
        replies = [reply for reply, _ in answers.values()]
        bench.state = bench.aggregate(replies, index).state
    return kept


def test_without_a_pull_devices_train_alone() -> None:
    """λ = 0: three rounds of plain SGD on the device's own samples, to the bit."""
    bench = Bench(Comet(pull=0.0))
    kept = played(bench, range(3), 3)
    for device, personal in kept.items():
        tensors = bench.model.initial()
        part = full(bench.model.structure)
        for index in range(3):
            work, task = LocalWork[None](), Task((part,), {MODEL: tensors})
            run, _ = local_round(work, job(bench, task, device, index))
            tensors = {name: tensor.detach() for name, tensor in run.tensors.items()}
        assert all(torch.equal(personal.tensors[name], tensor) for name, tensor in tensors.items())
    pulled = played(Bench(Comet()), range(3), 3)
    assert any(not torch.equal(pulled[0].tensors[name], one) for name, one in kept[0].tensors.items())


def test_one_cluster_is_the_mean_of_all_answers() -> None:
    bench = Bench(Comet(clusters=1))
    arrived = [bench.reply(device) for device in range(4)]
    state = bench.aggregate(arrived).state
    mean = sum(reply.tensors[ANSWERS][ANSWERS] for reply in arrived) / 4
    assert state.tensors[CENTROIDS].shape == (1, 12, 3)
    torch.testing.assert_close(state.tensors[CENTROIDS][0], mean)


def test_two_rounds_with_one_cluster_by_hand() -> None:
    """C = 1 is co-distillation towards the mean: one batch, so the second round is one step, written out here."""
    bench = Bench(Comet(clusters=1, pull=2.0), batch=12)
    first = {device: bench.work(device, count=12) for device in range(2)}
    bench.state = bench.aggregate([reply for reply, _ in first.values()]).state
    mean = sum(reply.tensors[ANSWERS][ANSWERS] for reply, _ in first.values()) / 2
    for device, (_, own) in first.items():
        tensors = {name: tensor.clone().requires_grad_() for name, tensor in own.tensors.items()}
        data = samples(12, seed=device)
        loss = torch.nn.functional.cross_entropy(
            bench.model.forward(tensors, torch.as_tensor(data.inputs)), torch.as_tensor(data.targets)
        )
        said = torch.softmax(bench.model.forward(tensors, bench.public.inputs), dim=1)
        loss = loss + 2.0 * (said - mean).square().sum(dim=1).mean()
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        _, after = bench.work(device, 1, count=12, own=own)
        for (name, before), gradient in zip(tensors.items(), gradients, strict=True):
            by_hand = before.detach() - bench.settings.learning_rate * gradient
            torch.testing.assert_close(after.tensors[name], by_hand, rtol=1e-4, atol=1e-5)


def test_a_cap_that_pays_for_no_clusters_leaves_those_that_there_are() -> None:
    bench = Bench(Comet())
    arrived = [bench.reply(device) for device in range(4)]
    step = bench.aggregate(arrived)
    least = step.server_operations / Comet().restarts
    left = bench.aggregate(arrived, 1, state=step.state, budget=least / 2)
    assert left.state == step.state
    assert (left.server_operations, left.metrics["server_steps"]) == (0.0, 0.0)


def test_a_step_pays_for_the_public_samples_that_it_has() -> None:
    """5 asked about and a batch of 10: half a batch more, and no update."""
    settings = api.settings_of({"method": "comet", "batch": 10})
    problem = api.paper_problem_of(settings)
    price = make_price(settings, problem)
    structure = problem.model.structure
    net = thinned(structure, structure.require_axes(""), 0.5)
    bench = Bench(Comet(asked=5))
    state = replace(bench.state, structure=structure, public=400, batch=10)
    part = bench.method.part(state, net, 20, replace(bench.round(1), price=price), centroids=3)
    cost = price(net)
    assert part.extra.step == pytest.approx((cost.operations - cost.update) / 2)


def test_bytes_do_not_depend_on_the_net() -> None:
    """Up |U_t| · classes numbers, down C times as many, for a wide net and a narrow one."""
    bench = Bench(Comet(clusters=2))
    wide, narrow = (bench.work(device, 0, budget) for device, budget in ((0, float("inf")), (1, 120.0)))
    assert sum(t.numel() for t in wide[1].tensors.values()) > sum(
        t.numel() for t in narrow[1].tensors.values()
    )
    for reply, _ in (wide, narrow):
        assert {group: set(tensors) for group, tensors in reply.tensors.items()} == {
            UPDATE: set(),
            ANSWERS: {ANSWERS},
        }
        assert reply.tensors[ANSWERS][ANSWERS].shape == (12, 3)
    bench.state = bench.aggregate([wide[0], narrow[0]]).state
    for device, budget in ((0, float("inf")), (1, 120.0)):
        task = bench.method.assign(bench.state, bench.client(device, budget), bench.round(1))
        assert task.tensors[CENTROIDS][CENTROIDS].shape == (2, 12, 3)
        assert task.tensors[MODEL] == {}


def test_devices_that_are_alike_have_nothing_to_learn_from_each_other() -> None:
    """The centroid is their own answer: the pull is zero, and however strong it is nothing changes."""
    found = []
    for pull in (0.0, 50.0):
        bench = Bench(Comet(clusters=2, pull=pull))
        reply, own = bench.work(0)
        twins = [replace(reply, device=device) for device in range(3)]
        step = bench.aggregate(twins)
        assert step.metrics["clusters"] == 1  # no cluster is made up, and none is empty
        bench.state = step.state
        torch.testing.assert_close(bench.state.tensors[CENTROIDS][0], reply.tensors[ANSWERS][ANSWERS])
        # A single step: the net has not moved away from what it said.
        task = bench.method.assign(bench.state, bench.client(0), bench.round(1))
        found.append(train(bench.method.local, job(bench, replace(task, steps=1), 0, 1, own)))
    (alone, mine), (pulled, theirs) = found
    assert mine is not None
    assert theirs is not None
    assert pulled.metrics["train_loss"] == pytest.approx(alone.metrics["train_loss"], abs=1e-6)
    for name, tensor in mine.tensors.items():
        torch.testing.assert_close(tensor, theirs.tensors[name], rtol=1e-4, atol=1e-5)


def test_the_nearest_centroid_is_found_with_the_net_as_it_is_now() -> None:
    """Not with what the device once said: another round may lie between."""
    centroids = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert nearest(torch.tensor([[0.9, 0.1]]), centroids) == 0
    assert nearest(torch.tensor([[0.2, 0.8]]), centroids) == 1
    bench = Bench(Comet(clusters=2, pull=5.0))
    played(bench, range(4), 1)
    sure = [torch.full((12, 3), 0.01), torch.full((12, 3), 0.01)]
    for place, one in enumerate(sure):
        one[:, place] = 0.98
    bench.state = replace(bench.state, tensors={CENTROIDS: torch.stack(sure)})
    net = dict(bench.model.initial())
    bias = list(net)[-1]
    for place in range(2):
        own = Personal({**net, bias: net[bias] + 9 * torch.eye(3)[place]})
        task = bench.method.assign(bench.state, bench.client(0), bench.round(1))
        run = bench.method.local.start(job(bench, task, 0, 1, own))
        assert torch.equal(run.memo["centroid"], sure[place])


def test_the_pull_by_hand() -> None:
    """λ mean_u ||softmax f(u) - s(u)||² on the public samples of the step."""
    bench = Bench(Comet(clusters=1, pull=2.0), batch=12)
    reply, own = bench.work(0, count=12)
    bench.state = bench.aggregate([reply]).state
    other = torch.softmax(torch.randn(1, 12, 3), dim=2)
    bench.state = replace(bench.state, tensors={CENTROIDS: other})
    pulled, _ = bench.work(0, 1, count=12, own=own)
    alone, _ = Bench(Comet(pull=0.0), batch=12).work(0, 1, count=12, own=own)
    said = torch.softmax(bench.model.forward(own.tensors, bench.public.inputs), dim=1)
    by_hand = 2.0 * float((said - other[0]).square().sum(dim=1).mean())
    assert pulled.metrics["train_loss"] - alone.metrics["train_loss"] == pytest.approx(by_hand, rel=1e-4)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 50))
def test_clusters_are_never_empty_and_do_not_depend_on_names(points: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn_points = rng.normal(size=(points, 4))
    members = clustered(drawn_points, count, 3, np.random.default_rng(0))
    assert len(members) == points
    assert 1 <= len(set(members.tolist())) <= min(points, count)
    assert len(set(clustered(np.repeat(drawn_points[:1], 5, axis=0), count, 3, rng).tolist())) == 1


def test_far_groups_are_found() -> None:
    points = np.concatenate(
        [np.random.default_rng(0).normal(size=(3, 8)) * 0.01 + 5 * place for place in range(3)]
    )
    members = clustered(points, 3, 10, np.random.default_rng(0))
    assert [len(set(members[start : start + 3].tolist())) for start in (0, 3, 6)] == [1, 1, 1]
    assert len(set(members.tolist())) == 3


def test_public_samples_of_a_round_are_the_same_for_all_and_change() -> None:
    public = samples(40)
    first, again, other = (drawn(public, 10, seed).ids.tolist() for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == 10
    assert drawn(public, 100, 3) is public
    bench = Bench(Comet(asked=5))
    tasks = [bench.method.assign(bench.state, bench.client(device), bench.round(2)) for device in (0, 1)]
    assert tasks[0].scalars == tasks[1].scalars
    state = bench.aggregate([bench.reply(0)]).state
    assert state.tensors[CENTROIDS].shape == (1, 5, 3)


def test_a_run_evaluates_the_mean_of_personal_nets_and_keeps_those_of_members_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rounds": 2,
        "devices": 20,
        "cohort": 3,
        "samples": 20,
        "partition": "classes:2",
    }
    run = api.run("comet", out=tmp_path, **settings)
    assert run.result is not None
    assert run.result.evaluates == "personal"
    assert not any(run.rounds[-1].layers.values())  # no layer of a global net is trained by anybody
    members = {device.device for record in run.rounds for device in record.devices}
    files = {int(path.name.split("-")[0]): path for path in (tmp_path / DEVICES).glob("*/*")}
    assert set(files) == members
    problem = api.paper_problem_of(api.settings_of(run.settings))
    test, means = problem.data.test, []
    for device in sorted(members):
        counts = problem.data.label_counts(device)
        assert counts is not None
        mine = test.take(np.flatnonzero(counts[test.targets] > 0))
        personal = read_value(files[device])
        outputs = problem.model.forward(personal.tensors, torch.from_numpy(mine.inputs))
        means.append(float((outputs.argmax(1).numpy() == mine.targets).mean()))
    assert run.result.accuracy == pytest.approx(np.mean(means), abs=1e-6)


def test_a_device_can_be_tested_on_fewer_samples_the_same_in_every_round() -> None:
    """A net of its own, tested on one sample, is right or wrong; on more than there are, as on all."""
    same: dict[str, Any] = {"devices": 4, "cohort": 4, "samples": 20, "rounds": 2, "lr": 1e-9}
    for record in api.run("comet", personal_test=1, **same).rounds:
        assert record.accuracy is not None
        assert (4 * record.accuracy).is_integer()
    # Nets that hardly move answer the same way, so the samples were the same.
    drawn = [record.accuracy for record in api.run("comet", personal_test=37, **same).rounds]
    assert drawn[0] == drawn[1]
    whole, more = api.run("comet", **same).result, api.run("comet", personal_test=10**6, **same).result
    assert whole is not None
    assert more is not None
    assert whole.accuracy == more.accuracy


def test_everything_a_device_does_is_within_its_budget() -> None:
    """Own samples, public batches and passes over public samples, in a round with centroids to learn from."""
    same: dict[str, Any] = {"devices": 5, "cohort": 5, "samples": 200, "public": "holdout:0.1"}
    run, reference = api.run("comet", rounds=2, **same), api.run("fedpmt", rounds=1, **same)
    for mine, theirs in zip(run.rounds[1].devices, reference.rounds[0].devices, strict=True):
        assert 0.5 * theirs.operations < mine.operations <= theirs.operations * (1 + 1e-9)


def test_memory_has_the_public_batch_and_what_the_clusters_say() -> None:
    """From the second round on: activations of two batches, and 3 centroids of 100 answers of 10 classes."""
    settings = api.settings_of({"method": "comet", "rounds": 2, "devices": 5, "cohort": 5, "samples": 200})
    run = api.run(
        "comet", **{key: getattr(settings, key) for key in ("rounds", "devices", "cohort", "samples")}
    )
    problem = api.paper_problem_of(settings)
    price = make_price(settings, problem)
    for first, second in zip(run.rounds[0].devices, run.rounds[1].devices, strict=True):
        assert first.part == second.part
        rate = float(second.part.split()[-1])
        net = thinned(problem.model.structure, problem.model.structure.require_axes(""), rate)
        activations = price(net).memory.activations
        assert activations > 0
        assert second.memory_bytes - first.memory_bytes == activations + 4 * 3 * 100 * 10


def test_what_a_net_that_stays_costs_is_what_it_would_cost_if_it_were_sent() -> None:
    bench = Bench(Comet())
    structure = bench.model.structure
    sent = thinned(structure, structure.require_axes(""), 0.5)
    stays = Part(GLOBAL, {}, {}, "", kept=sent.trained)
    assert stays.resident().sent == stays.resident().trained == sent.trained
    settings = api.settings_of({"task": "cnn-mnist"})
    problem = api.paper_problem_of(settings)
    price = make_price(settings, problem)
    sent = thinned(problem.model.structure, problem.model.structure.require_axes(""), 0.5)
    assert price(Part(GLOBAL, {}, {}, "", kept=sent.trained)) == price(sent)


def test_devices_whose_level_may_change_are_refused() -> None:
    with pytest.raises(SettingError, match=r"^level-draw = 'round': comet keeps a net on each device"):
        api.run("comet", level_draw="round", rounds=1)
    with pytest.raises(SettingError, match=r"^speeds = 'measured': comet keeps a net on each device"):
        api.run("comet", speeds="measured", assign="deadline", deadline=60.0, rounds=1)


@pytest.mark.parametrize(("key", "value"), [("clusters", 0), ("asked", 0), ("restarts", 0), ("pull", -1.0)])
def test_wrong_settings_are_refused(key: str, value: float) -> None:
    least = "0" if key == "pull" else "1"
    with pytest.raises(SettingError, match=rf"^comet\.{key} must be >= {least} \(got {value}\)$"):
        Comet(**{key: value})  # type: ignore[arg-type]
