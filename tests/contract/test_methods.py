"""What must hold of every registered method."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fedpmt import api
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.registry import METHODS, create
from fedpmt.parts.part import Whole, add_at
from fedpmt.records import CHECKPOINT, DEVICES, MODEL_FILE, ROUNDS
from fedpmt.simulation.checkpoint import read_value, write_value
from fedpmt.simulation.loop import payload_bytes
from fedpmt.types import MODEL
from support import SMALL, STAGES, Bench

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RoundRecord

SHARED = {"depths": None, "splitting": "server"}
SLOW = {"fjord": 24, "comet": 80, "fedgkt": 6, "prunefl": 24}
"""Rounds that a method needs to get off the ground, where narrow nets learn little at first, or one device is alone."""
ALONE = ("comet",)
"""Methods whose devices learn by themselves, a few steps each time they are asked: that takes a minute."""
TOGETHER: dict[str, dict[str, Any]] = {"prunefl": {"initial_rounds": 0, "interval": 1}}
"""What lets several devices reply from the first round on."""

BUDGETS = [200.0, 400.0, float("inf"), float("inf")]
TRAIN_EVERYTHING = ("fedavg", "fedprox", "scaffold", "slimfl", "prunefl", "fedgen")
"""Methods in which every device trains all of the model, however weak it is."""

NO_MODEL = ("comet",)
"""Methods whose server has no model at all."""

IDLE: dict[str, dict[str, Any]] = {"feddf": {"steps": 0}, "fedgkt": {"epochs": 0}}
"""What keeps the server of a method from learning anything by itself."""

NO_FEDAVG = ("comet", "fedgkt")
"""Methods that average no weights, and so are FedAvg under no settings; their own tests have their reductions."""


QUICK: dict[str, dict[str, Any]] = {"feddf": {"steps": 20}}
"""What spares time where a server without a cap would work for long."""


def method(name: str, **options: Any) -> Any:
    return create(name, {**QUICK.get(name, {}), **options}, SHARED)


def replies(bench: Bench, index: int = 0) -> list[Any]:
    return [bench.reply(device, index, budget) for device, budget in enumerate(BUDGETS)]


def bits(value: Any, folder: Path) -> bytes:
    """All that a checkpoint would keep of a value."""
    write_value(folder / "bits", value)
    return (folder / "bits").read_bytes()


class Killed(BaseException):
    """The end of a process, as far as a run can tell: no checkpoint is written on the way out."""


def ending(error: type[BaseException], after: int) -> Any:
    """Something to do after each round that ends the run after so many."""

    def on_round(record: RoundRecord) -> None:
        if record.round == after:
            raise error

    return on_round


@pytest.mark.parametrize("name", METHODS)
def test_is_a_frozen_value_that_can_be_pickled(name: str) -> None:
    value = method(name)
    assert pickle.loads(pickle.dumps(value)) == value
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)


@pytest.mark.parametrize("name", METHODS)
def test_does_not_change_the_state_it_is_given(name: str, tmp_path: Path) -> None:
    """Neither training nor aggregation does: the server's state stays as it was, to the bit, in all its parts."""
    bench = Bench(method(name))
    before = bits(bench.state, tmp_path)
    arrived = replies(bench)
    assert bits(bench.state, tmp_path) == before
    step = bench.method.aggregate(bench.state, arrived, bench.round(0))
    assert bits(bench.state, tmp_path) == before
    assert bits(step.state, tmp_path) != before


@pytest.mark.parametrize("name", METHODS)
def test_does_not_change_what_a_device_has_kept(name: str, tmp_path: Path) -> None:
    """A device that trains in vain must find its old state again, so the new one is another value."""
    bench = Bench(method(name))
    answers = [bench.work(device, 0, budget) for device, budget in enumerate(BUDGETS)]
    bench.state = bench.method.aggregate(bench.state, [reply for reply, _ in answers], bench.round(0)).state
    for device, (_, own) in enumerate(answers):
        before = bits(own, tmp_path)
        again = [bench.work(device, 1, BUDGETS[device], own=own) for _ in range(2)]
        assert bits(own, tmp_path) == before
        # The first of the two was in vain, and left no trace.
        assert bits(again[0][1], tmp_path) == bits(again[1][1], tmp_path)
        assert bits(again[0][0].tensors, tmp_path) == bits(again[1][0].tensors, tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_states_come_back_from_disk_as_they_were(name: str, tmp_path: Path) -> None:
    """The server's and a device's: a value read back leads to the same bits as the one that was written."""
    bench = Bench(method(name))
    reply, own = bench.work(0)
    state = bench.method.aggregate(bench.state, [reply], bench.round(0)).state
    write_value(tmp_path / "value", (state, own))
    found = []
    for server, device in ((state, own), read_value(tmp_path / "value")):
        bench.state = server
        found.append(
            (bits((server, device), tmp_path), bits(bench.reply(0, 1, own=device).tensors, tmp_path))
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("name", METHODS)
def test_arrival_order_does_not_matter(name: str) -> None:
    """To nothing that the server keeps; in the second round, when it may keep more."""
    bench = Bench(method(name, **TOGETHER.get(name, {})))
    answers = [bench.work(device, 0, budget) for device, budget in enumerate(BUDGETS)]
    bench.state = bench.method.aggregate(bench.state, [reply for reply, _ in answers], bench.round(0)).state
    arrived = [
        bench.reply(device, 1, budget, own=answers[device][1]) for device, budget in enumerate(BUDGETS)
    ]
    forth = bench.method.aggregate(bench.state, arrived, bench.round(1)).state
    back = bench.method.aggregate(bench.state, arrived[::-1], bench.round(1)).state
    alike(forth, back)


def alike(one: Any, other: Any) -> None:
    """Equal within rounding, in all their parts."""
    assert type(one) is type(other)
    if one is other:
        return
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            alike(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, Mapping):
        assert set(one) == set(other)
        for key in one:
            alike(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            alike(*pair)
    elif isinstance(one, (torch.Tensor, np.ndarray, float)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    else:
        assert one == other


@pytest.mark.parametrize("name", METHODS)
def test_entries_that_nobody_trained_keep_their_bits(name: str) -> None:
    bench = Bench(method(name, **IDLE.get(name, {})))
    arrived = [bench.reply(device, 0, 60.0) for device in range(2)]
    step = bench.method.aggregate(bench.state, arrived, bench.round(0))
    untouched = 0
    for key, before in bench.state.tensors.items():
        cover = torch.zeros_like(before)
        for reply in arrived:
            if key in reply.part.trained:
                add_at(cover, reply.part.trained[key], 1.0)
        outside = cover == 0
        untouched += int(outside.sum())
        assert torch.equal(step.state.tensors[key][outside], before[outside])
    assert untouched > 0 or name in TRAIN_EVERYTHING + NO_MODEL


@pytest.mark.parametrize("name", METHODS)
def test_no_training_leaves_the_model_as_it_was(name: str) -> None:
    bench = Bench(method(name, **IDLE.get(name, {})), learning_rate=0.0)
    step = bench.method.aggregate(bench.state, replies(bench), bench.round(0))
    assert all(torch.equal(step.state.tensors[key], tensor) for key, tensor in bench.state.tensors.items())


@pytest.mark.parametrize("name", METHODS)
def test_bytes_on_the_wire_are_those_accounted_for(name: str) -> None:
    """In the first round, and in the second, when the server may have more to say."""
    bench = Bench(method(name))
    work = bench.method.local()
    kept: dict[int, Any] = {}
    for index in range(2):
        arrived = []
        for device, budget in enumerate(BUDGETS):
            task = bench.method.assign(bench.state, bench.client(device, budget), bench.round(index))
            structure = bench.models[task.offer[0].model].structure
            assert set(task.tensors[MODEL]) == set(task.offer[0].sent)
            assert payload_bytes(task.tensors) == work.download_bytes(task.offer[0], structure)
            reply, kept[device] = bench.work(device, index, budget, own=kept.get(device))
            sent = {
                group: {key: tuple(tensor.shape) for key, tensor in tensors.items()}
                for group, tensors in reply.tensors.items()
            }
            assert sent == work.upload(reply.part, structure)
            assert payload_bytes(reply.tensors) == work.upload_bytes(reply.part, structure)
            assert set(reply.metrics) == set(work.measures)
            arrived.append(reply)
        bench.state = bench.method.aggregate(bench.state, arrived, bench.round(index)).state


@pytest.mark.parametrize("name", NO_FEDAVG)
def test_without_a_reduction_to_fedavg_there_are_no_neutral_settings(name: str) -> None:
    assert method(name).neutral() is None


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NO_FEDAVG])
def test_neutral_and_capable_is_fedavg_bit_for_bit(name: str) -> None:
    neutral = method(name).neutral()
    assert neutral is not None
    ours, theirs = Bench(neutral), Bench(FedAvg())
    for index in range(3):
        for bench in (ours, theirs):
            arrived = [bench.reply(device, index, count=6 + device) for device in range(3)]
            assert all(
                isinstance(selection, Whole) for reply in arrived for selection in reply.part.trained.values()
            )
            bench.state = bench.method.aggregate(bench.state, arrived, bench.round(index)).state
    for key, tensor in theirs.state.tensors.items():
        assert torch.equal(ours.state.tensors[key], tensor)


@pytest.mark.parametrize("name", METHODS)
def test_assignment_is_a_function_of_round_and_device(name: str) -> None:
    bench = Bench(method(name))
    once, again = (bench.method.assign(bench.state, bench.client(3, 60.0), bench.round(5)) for _ in range(2))
    assert once.offer[0].label == again.offer[0].label
    for key, tensor in once.tensors[MODEL].items():
        assert torch.equal(tensor, again.tensors[MODEL][key])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cap", [2.0, 0.001])
def test_the_servers_own_work_is_within_its_cap_in_every_round(name: str, cap: float) -> None:
    """So many times what the round's devices do, be it next to nothing; and some replies are lost on the way."""
    settings: dict[str, Any] = {**SMALL, "rounds": 3, "failure": 0.2, "options": STAGES.get(name, {})}
    run = api.run(name, server_cap=cap, **settings)
    assert any(record.operations > 0 for record in run.rounds)
    for record in run.rounds:
        assert 0 <= record.server_operations <= cap * record.operations
    # Where the cap pays for something, those that have work do it.
    if cap >= 1 or not method(name).server_work:
        assert any(record.server_operations for record in run.rounds) == bool(method(name).server_work)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("partition", ["iid", "classes:2"])
def test_same_bits_for_any_number_of_workers(name: str, partition: str) -> None:
    settings: dict[str, Any] = {**SMALL, "partition": partition, "task": "cnn-mnist", "rounds": 3}
    settings["options"] = STAGES.get(name, {})
    found = set()
    for workers in (1, 2, 3):
        result = api.run(name, workers=workers, **settings).result
        assert result is not None
        found.add(result.weights_sha256)
    assert len(found) == 1
    other = api.run(name, **settings, seed=1).result
    assert other is not None
    assert other.weights_sha256 not in found


@pytest.mark.parametrize("name", METHODS)
def test_resumed_after_an_interrupt_and_a_kill_it_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """Rounds, model, the server's state and what devices keep; some replies are lost on the way."""
    settings: dict[str, Any] = {
        **SMALL,
        **{"task": "cnn-mnist", "partition": "classes:2", "rounds": 5, "failure": 0.2},
        "options": STAGES.get(name, {}),
        "checkpoint_seconds": 1000,
    }
    api.run(name, out=tmp_path / "whole", **settings)
    again: dict[str, Any] = {"out": tmp_path / "parts", "resume": True, **settings}
    # A checkpoint after two rounds; then two more rounds that only leave what devices wrote.
    for error, after in ((KeyboardInterrupt, 2), (Killed, 4)):
        with pytest.raises(error):
            api.run(name, on_round=ending(error, after), **again)
    api.run(name, **again)
    whole, parts = (
        {
            str(path.relative_to(folder)): path.read_bytes()
            for pattern in (ROUNDS, CHECKPOINT, MODEL_FILE, f"{DEVICES}/*/*")
            for path in folder.glob(pattern)
        }
        for folder in (tmp_path / "whole", tmp_path / "parts")
    )
    assert set(whole) >= {ROUNDS, CHECKPOINT, MODEL_FILE}
    assert whole == parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALONE else name for name in METHODS]
)
def test_runs_with_no_other_setting_and_learns(name: str) -> None:
    run = api.run(name, rounds=SLOW.get(name, 12), eval_every=4)
    assert run.result is not None
    assert run.result.accuracy is not None
    assert run.result.accuracy > 0.2  # ten classes
    assert run.result.bytes_up == sum(device.bytes_up for record in run.rounds for device in record.devices)
