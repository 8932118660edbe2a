"""What must hold of a method, checked by running whole federations. Each check is a function of a `Subject`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.records import CHECKPOINT, DEVICES, MODEL_FILE, ROUNDS
from fedpmt.testing.subject import Subject, expect, scratch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fedpmt.records import RoundRecord, RunRecord

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
