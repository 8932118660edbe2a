"""What must hold of a method, checked on a bench, then by running whole federations.

Each check is a function of a `Subject`.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fedpmt import api
from fedpmt.methods.averaging import PLAIN, Averaged, why_rounds
from fedpmt.methods.fedavg import FedAvg
from fedpmt.parts.part import Whole, add_at
from fedpmt.pricing.meter import UPDATE, download_bytes, reply_shapes, upload_bytes
from fedpmt.records import CHECKPOINT, DEVICES, MODEL_FILE, ROUNDS
from fedpmt.simulation.checkpoint import read_value, write_value
from fedpmt.simulation.loop import payload_bytes
from fedpmt.testing.bench import (
    BUDGETS,
    WEAK,
    Bench,
    Subject,
    encode,
    expect,
    expect_close,
    model_of,
    scratch,
)
from fedpmt.training.loop import LOSS
from fedpmt.training.server import REPLACE, Adam
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fedpmt.records import RoundRecord, RunRecord
    from fedpmt.training.messages import Reply
    from fedpmt.types import Tensors


def is_a_frozen_picklable_value(subject: Subject) -> None:
    """A method is a frozen dataclass, and equal to its copy after pickling."""
    method: Any = subject.method
    expect(dataclasses.is_dataclass(method), f"{type(method).__name__} is not a dataclass")
    expect(pickle.loads(pickle.dumps(method)) == method, "its copy differs after pickling")  # noqa: S301
    names = [field.name for field in dataclasses.fields(method)]
    try:
        setattr(method, names[0] if names else "anything", None)
    except dataclasses.FrozenInstanceError:
        return
    raise AssertionError(f"{type(method).__name__} is not frozen: write @dataclass(frozen=True)")


def declares_what_replies_carry(subject: Subject) -> None:
    """Traits agree with what devices send and keep: privacy and secure sums are refused by them."""
    bench = Bench(subject.together or subject.method)
    traits = bench.method.traits
    expect(
        bool(traits.keeps) == subject.keeps_state,
        f"traits.keeps is '{traits.keeps}', but devices keep {'something' if subject.keeps_state else 'nothing'}",
    )
    statistics = bench.method.predictor(bench.state).statistics
    expect(
        traits.finds_statistics == (statistics == "data"),
        "traits.finds_statistics is not what it predicts with",
    )
    for reply in _two_rounds(bench):
        more = [group for group in reply.tensors if group != UPDATE] + list(reply.scalars)
        expect(traits.sends_more or not more, f"replies carry {more}, but traits.sends_more is false")
        measured = set(reply.metrics) - {LOSS}
        declared = set(reply.part.extra.metrics)
        expect(measured == declared, f"replies carry metrics {measured}, Extra.metrics says {declared}")
        whole = all(isinstance(selection, Whole) for selection in reply.part.trained.values())
        expect(
            whole or traits.sums != "layers",
            "traits.sums is 'layers', but parts are not made of whole tensors",
        )


def leaves_the_state_alone(subject: Subject) -> None:
    """Neither training nor folding changes the state that it is given, and folding gives another one."""
    bench = Bench(subject.method)
    before = encode(bench.state)
    replies = _replies(bench)
    expect(encode(bench.state) == before, "assigning and training changed the server's state")
    step = bench.aggregate(replies)
    expect(encode(bench.state) == before, "folding changed the state it was given")
    expect(encode(step.state) != before, "folding replies gave the same state again")


def leaves_kept_state_alone(subject: Subject) -> None:
    """A device whose reply is lost finds its old state again: training twice from it gives the same bits."""
    bench = Bench(subject.method)
    answers = [bench.work(device, 0, budget) for device, budget in enumerate(BUDGETS)]
    bench.state = bench.aggregate([reply for reply, _ in answers]).state
    for device, (_, own) in enumerate(answers):
        before = encode(own)
        (reply, kept), (reply_again, kept_again) = (
            bench.work(device, 1, BUDGETS[device], own=own) for _ in range(2)
        )
        expect(encode(own) == before, f"training changed what device {device} had kept")
        expect(encode(kept) == encode(kept_again), f"device {device} keeps something else the second time")
        expect(
            encode(reply.tensors) == encode(reply_again.tensors),
            f"device {device} answers something else the second time",
        )


def restores_states_from_disk(subject: Subject) -> None:
    """The server's and a device's state lead to the same bits after they were written to disk and read back."""
    bench = Bench(subject.method)
    reply, own = bench.work(0)
    state = bench.aggregate([reply]).state
    with scratch() as folder:
        write_value(folder / "value", (state, own))
        found = []
        for server, device in ((state, own), read_value(folder / "value")):
            bench.state = server
            found.append((encode((server, device)), encode(bench.reply(0, 1, own=device).tensors)))
    expect(found[0][0] == found[1][0], "a state changes on its way to disk and back")
    expect(found[0][1] == found[1][1], "a device answers something else after a state was read back")


def ignores_arrival_order(subject: Subject) -> None:
    """Folding replies in another order gives the same state within rounding, in the second round too."""
    bench = Bench(subject.together or subject.method)
    answers = [bench.work(device, 0, budget) for device, budget in enumerate(BUDGETS)]
    bench.state = bench.aggregate([reply for reply, _ in answers]).state
    replies = [
        bench.reply(device, 1, budget, own=answers[device][1]) for device, budget in enumerate(BUDGETS)
    ]
    expect_close(bench.aggregate(replies, 1).state, bench.aggregate(replies[::-1], 1).state)


def discounts_late_replies(subject: Subject) -> None:
    """A reply that counts half makes half the difference, for methods that run on the clock of events."""
    bench = Bench(_plain(subject.together or subject.method))
    if why_rounds(bench.method):
        return
    replies, found = _replies(bench), []
    for discount in (0.0, 0.5, 1.0):
        late = [replace(reply, staleness=1, discount=discount) for reply in replies]
        found.append(model_of(bench.method, bench.aggregate(late).state))
    none, half, whole = found
    expect(
        any(not torch.equal(none[name], tensor) for name, tensor in whole.items()),
        "late replies count as much as others: its fold must multiply an update by `reply.discount`",
    )
    for name, tensor in whole.items():
        expect_close(half[name], (none[name] + tensor) / 2, name)


def keeps_uncovered_entries(subject: Subject) -> None:
    """An entry that no device trained keeps its bits, where the server does no work of its own."""
    bench = Bench(subject.method)
    bench.server_budget = 0.0
    replies = [bench.reply(device, 0, WEAK) for device in range(2)]
    after = model_of(bench.method, bench.aggregate(replies).state)
    untouched = 0
    for name, outside in uncovered(bench.tensors, replies).items():
        untouched += int(outside.sum())
        same = torch.equal(after[name][outside], bench.tensors[name][outside])
        expect(same, f"{name} changed where nobody trained it")
    cuts = bench.method.traits.action("operations") == "device" and bool(bench.tensors)
    expect(untouched > 0 or not cuts, "a weak device trains everything, though traits.budget says 'device'")


def server_optimizer_skips_uncovered_entries(subject: Subject) -> None:
    """With Adam on the server, an entry that nobody trained keeps its bits, and its moments theirs.

    Only for methods with a field `server`.
    """
    method: Any = subject.method
    if not any(item.name == "server" for item in dataclasses.fields(method)):
        return
    bench = Bench(replace(method, server=Adam()))
    bench.server_budget = 0.0
    bench.state = bench.aggregate(_replies(bench)).state
    replies = [bench.reply(device, 1, WEAK) for device in range(2)]
    step = bench.aggregate(replies, 1)
    before, after = _averaged(bench.state), _averaged(step.state)
    expect(
        len(before) == len(after) > 0, "its state holds no Averaged, where the optimizer's moments would be"
    )
    for one, other in zip(before, after, strict=True):
        expect(set(one.moments) == {"mean", "square"}, "the server's optimizer has not been applied")
        for name, outside in uncovered(one.tensors, replies).items():
            expect(
                torch.equal(one.tensors[name][outside], other.tensors[name][outside]),
                f"{name} was stepped where nobody trained it",
            )
            for moment, tensors in one.moments.items():
                if name in tensors:
                    expect(
                        torch.equal(tensors[name][outside], other.moments[moment][name][outside]),
                        f"the moment '{moment}' of {name} moved where nobody trained it",
                    )


def keeps_the_model_without_training(subject: Subject) -> None:
    """At a learning rate of 0, and without work of the server's own, the model keeps its bits."""
    bench = Bench(subject.method, learning_rate=0.0)
    bench.server_budget = 0.0
    after = model_of(bench.method, bench.aggregate(_replies(bench)).state)
    for name, tensor in bench.tensors.items():
        expect(torch.equal(after[name], tensor), f"{name} changed, though nobody has learnt anything")


def sends_differences(subject: Subject) -> None:
    """A reply's update is w_k - w: exactly zero at a learning rate of 0, and not zero otherwise."""
    still, moving = (_replies(Bench(subject.method, learning_rate=rate)) for rate in (0.0, 0.1))
    for reply in still:
        for name, change in reply.update.items():
            expect(not bool(change.any()), f"the update of {name} is not zero, though nothing was learnt")
    changes = [change for reply in moving for change in reply.update.values()]
    expect(not changes or any(bool(change.any()) for change in changes), "training changes nothing")


def accounts_for_bytes(subject: Subject) -> None:
    """Tasks and replies have the bytes and shapes that they are priced by, in the first round and the second."""
    bench = Bench(subject.method)
    kept: dict[int, Any] = {}
    for index in range(2):
        replies = []
        for device, budget in enumerate(BUDGETS):
            task = bench.task(device, index, budget)
            part = task.offer[0]
            structure = bench.models[part.model].structure
            expect(
                set(task.tensors[MODEL]) == set(part.sent), f"'{part.label}': not all of part.sent is sent"
            )
            sent, priced = payload_bytes(task.tensors), download_bytes(part, structure)
            expect(sent == priced, f"'{part.label}': a task has {sent} bytes and is priced as {priced}")
            reply, kept[device] = bench.work(device, index, budget, own=kept.get(device))
            shapes = {
                group: {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                for group, tensors in reply.tensors.items()
            }
            expected = reply_shapes(reply.part, structure)
            expect(shapes == expected, f"'{part.label}': a reply has {shapes} and is priced as {expected}")
            answered, priced = payload_bytes(reply.tensors), upload_bytes(reply.part, structure)
            expect(answered == priced, f"'{part.label}': a reply has {answered} bytes, priced as {priced}")
            replies.append(reply)
        bench.state = bench.aggregate(replies, index).state


def reduces_to_fedavg(subject: Subject) -> None:
    """With its neutral settings, and devices that can do everything, it is FedAvg to the bit.

    Holds of itself where `neutral()` is None: such a method brings a reduction test of its own.
    """
    neutral: Any = subject.method.neutral()
    if neutral is None:
        return
    ours = Bench(_plain(neutral))
    theirs = Bench(FedAvg(), ours.model.clone())
    for index in range(3):
        for bench in (ours, theirs):
            replies = [bench.reply(device, index, count=6 + device) for device in range(3)]
            parts = [selection for reply in replies for selection in reply.part.trained.values()]
            expect(all(isinstance(one, Whole) for one in parts), "a capable device does not train everything")
            bench.state = bench.aggregate(replies, index).state
    for name, tensor in theirs.tensors.items():
        expect(torch.equal(ours.tensors[name], tensor), f"{name} is not FedAvg's after three rounds")


def assigns_by_round_and_device(subject: Subject) -> None:
    """The same state, round and device give the same task: randomness comes from `round.rng` alone."""
    bench = Bench(subject.method)
    once, again = (bench.task(3, 5, WEAK) for _ in range(2))
    expect([part.label for part in once.offer] == [part.label for part in again.offer], "another part")
    expect(encode(once.tensors) == encode(again.tensors), "other tensors")


def uncovered(tensors: Tensors, replies: Sequence[Reply]) -> dict[str, torch.Tensor]:
    """Return for each tensor of the global model which of its entries none of these replies has trained."""
    found = {}
    for name, tensor in tensors.items():
        cover = torch.zeros_like(tensor)
        for reply in replies:
            if name in reply.part.trained:
                add_at(cover, reply.part.trained[name], 1.0)
        found[name] = cover == 0
    return found


def _plain(method: Any) -> Any:
    """The method without what a run's settings may make of its server: an optimizer or a robust mean."""
    plain = {"server": REPLACE, "mean": PLAIN}
    taken = {item.name for item in dataclasses.fields(method)} & set(plain)
    return replace(method, **{name: plain[name] for name in taken})


def _replies(bench: Bench, index: int = 0) -> list[Reply]:
    return [bench.reply(device, index, budget) for device, budget in enumerate(BUDGETS)]


def _two_rounds(bench: Bench) -> Iterator[Reply]:
    """Replies of two rounds, in the second of which the server may have more to say."""
    kept: dict[int, Any] = {}
    for index in range(2):
        answers = [
            bench.work(device, index, budget, own=kept.get(device)) for device, budget in enumerate(BUDGETS)
        ]
        kept = {device: own for device, (_, own) in enumerate(answers)}
        yield from (reply for reply, _ in answers)
        bench.state = bench.aggregate([reply for reply, _ in answers], index).state


def _averaged(value: Any) -> list[Averaged]:
    """All `Averaged` in a state, in order."""
    if isinstance(value, Averaged):
        return [value]
    if dataclasses.is_dataclass(value):
        return [one for item in dataclasses.fields(value) for one in _averaged(getattr(value, item.name))]
    if isinstance(value, Mapping):
        return [one for item in value.values() for one in _averaged(item)]
    if isinstance(value, list | tuple):
        return [one for item in value for one in _averaged(item)]
    return []


SMALL: dict[str, Any] = {"devices": 10, "samples": 20, "cohort": 5, "batch": 10, "rounds": 3, "lr": 0.1}
"""Settings of a run that takes a moment."""

ADAPTED = "fedpmt.testing.bench:adapted_images"
"""The net of methods that need adapters."""

GUESS = 0.1
"""The accuracy of a guess on the embedded data, which has ten classes."""


class Killed(BaseException):
    """The end of a process, as far as a run can tell: no checkpoint is written on the way out."""


def keeps_server_work_within_cap(subject: Subject) -> None:
    """The server's operations stay within its cap in every round, and it works if and only if its traits say so."""
    works = bool(subject.in_stages.traits.server_work)
    for cap in (2.0, 0.001):
        with scratch() as folder:
            # Some replies are lost on the way.
            run = _run(subject, folder / "run", failure=0.2, server_cap=cap)
            expect(any(record.operations > 0 for record in run.rounds), "no device has done anything")
            for record in run.rounds:
                within = 0 <= record.server_operations <= cap * record.operations
                expect(
                    within, f"round {record.round}: {record.server_operations:g} operations, above its cap"
                )
            # Next to nothing pays for no work at all.
            worked = any(record.server_operations for record in run.rounds)
            if cap >= 1 or not works:
                expect(worked == works, f"traits.server_work is '{subject.in_stages.traits.server_work}'")


def same_bits_for_any_number_of_workers(subject: Subject) -> None:
    """The weights do not depend on how many devices are trained at a time, but on the seed."""
    for partition in ("iid", "classes:2"):
        found = {workers: _weights(subject, partition=partition, workers=workers) for workers in (1, 2, 3)}
        expect(len(set(found.values())) == 1, f"{partition}: other weights with other numbers of workers")
        other = _weights(subject, partition=partition, seed=1)
        expect(other != found[1], f"{partition}: another seed gives the same weights")


def same_bits_after_resume(subject: Subject) -> None:
    """A run that was interrupted, then killed, then resumed has the files of one that ran through."""
    settings: dict[str, Any] = {
        "task": "cnn-mnist", "partition": "classes:2", "rounds": 5, "failure": 0.2, "checkpoint_seconds": 1000
    }  # fmt: skip
    with scratch() as folder:
        _run(subject, folder / "whole", **settings)
        # A checkpoint after two rounds; then two more rounds that only leave what devices wrote.
        for error, after in ((KeyboardInterrupt, 2), (Killed, 4)):
            try:
                _run(subject, folder / "parts", resume=True, on_round=_end(error, after), **settings)
            except error:
                continue
            raise AssertionError(f"the run did not end after round {after}")
        _run(subject, folder / "parts", resume=True, **settings)
        whole, parts = _files(folder / "whole"), _files(folder / "parts")
    expect(set(whole) >= {ROUNDS, CHECKPOINT, MODEL_FILE}, "a finished run lacks files")
    expect(set(whole) == set(parts), f"other files after a resume: {sorted(set(whole) ^ set(parts))}")
    differing = [name for name, content in whole.items() if parts[name] != content]
    expect(not differing, f"other content after a resume: {differing}")


def learns_with_default_settings(subject: Subject) -> None:
    """On the embedded data, with no setting but the number of rounds, it ends well above a guess."""
    with scratch() as folder:
        given = _fitting(subject, {"rounds": subject.rounds, "eval_every": 4, **subject.settings})
        run = api.run(subject.method, out=folder / "run", progress=False, **given)
    result = run.result
    expect(result is not None and result.score is not None, "the run has no result")
    if result is not None and result.score is not None:
        expect(result.score > 2 * GUESS, f"accuracy {result.score:.1%} after {subject.rounds} rounds")
        sent = sum(device.bytes_up for record in run.rounds for device in record.devices)
        expect(result.bytes_up == sent, "the result's bytes are not those of its devices")


def _run(subject: Subject, folder: Path, **settings: Any) -> RunRecord:
    given = _fitting(subject, {**SMALL, **subject.settings, **settings})
    return api.run(subject.in_stages, out=folder, progress=False, **given)


def _fitting(subject: Subject, given: dict[str, Any]) -> dict[str, Any]:
    """Settings with a net that has adapters, where the method needs some."""
    if not subject.method.traits.needs_adapters:
        return given
    return {**given, "task": None, "data": "embedded", "model": ADAPTED}


def _weights(subject: Subject, **settings: Any) -> str:
    with scratch() as folder:
        result = _run(subject, folder / "run", task="cnn-mnist", **settings).result
    if result is None:
        raise AssertionError("the run has no result")
    return result.weights_sha256


def _end(error: type[BaseException], after: int) -> Callable[[RoundRecord], None]:
    def on_round(record: RoundRecord) -> None:
        if record.round == after:
            raise error

    return on_round


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in (ROUNDS, CHECKPOINT, MODEL_FILE, f"{DEVICES}/*/*")
        for path in folder.glob(pattern)
    }
