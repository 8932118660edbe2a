"""What the clock says without training: of a run before it begins, and of a finished one under another clock."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt.data.base import FederatedData
from fedpmt.records import RunRecord, total_joules
from fedpmt.simulation.assemble import assemble
from fedpmt.simulation.bookkeeping import add_holders, fit_speeds, record_round
from fedpmt.simulation.cohort import Verdict, send_base
from fedpmt.simulation.coverage import check_replies, check_room, warn_before_training

if TYPE_CHECKING:
    from fedpmt.methods.base import Method
    from fedpmt.records import DeviceRecord, Outcome, RoundRecord
    from fedpmt.settings import Settings
    from fedpmt.simulation.cohort import Assignment
    from fedpmt.simulation.loop import Federation, Progress
    from fedpmt.simulation.problem import Problem
    from fedpmt.types import Examples

MOST_STEPS = 100
"""Server steps on a clock of events after which a run is taken to go on at that pace."""


def predict(settings: Settings, problem: Problem, method: Method[Any, Any], folder: Path) -> dict[str, Any]:
    """A round's devices, times and prices, or those of some server steps; the whole run at that pace, if there is room.

    The first round is as much longer as downloading the model's base takes, and running it where its outputs are kept;
    each device does that once at most.
    """
    with (
        tempfile.TemporaryDirectory() as nowhere,
        assemble(settings, problem, method, Path(nowhere)) as federation,
    ):
        check_room(federation, folder)
        progress = federation.wait(federation.start())
        check_replies(federation, progress)
        warn_before_training(federation, progress)
        steps, base_seconds = 1, 0.0
        if settings.clock == "events":
            steps = min(settings.rounds, MOST_STEPS)
            first, verdict = _lay_out(federation, progress, steps)
            assignments = [replace(one, base_bytes=0, base_operations=0.0) for one in first]
        else:
            round_, assignments = federation.open(progress)
            verdict = federation.settle(assignments, round_)
            first = send_base(federation, progress, assignments)
            base_seconds = federation.settle(first, round_).round_seconds - verdict.round_seconds
        record = record_round(federation, progress, assignments, verdict)
        server = _server(federation, record.operations / steps)
    times = settings.rounds / steps
    base_bytes = max((one.base_bytes for one in first), default=0)
    base_operations, base_joules = max((one.base_operations for one in first), default=0.0), 0.0
    if settings.clock == "rounds":
        base_operations = sum(one.base_operations for one in first) / max(1, len(first))
        base_joules = sum(
            one.device.watts.joules(one.base_seconds - one.base_transfer, one.base_transfer)
            for one in first
            if one.device.watts is not None
        ) / max(1, len(first))
    members = min(settings.devices, int(times * len(assignments)))
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for one, shown in sorted(
        zip(assignments, record.devices, strict=True), key=lambda pair: (pair[1].level, pair[1].part)
    ):
        row = rows.setdefault(
            (shown.level, shown.part),
            {
                "part": shown.part,
                "level": shown.level,
                "devices": 0,
                "speed": shown.speed,
                "seconds": shown.seconds,
                "outcome": shown.outcome,
                "upload_bytes": one.bytes_up,
                "download_bytes": one.bytes_down,
                "memory_bytes": shown.memory_bytes,
                "operations": shown.operations,
                "joules": shown.joules,
                "used": shown.used,
                "budget": shown.budget,
                "over_budget": shown.over_budget,
            },
        )
        row["devices"] += 1
    return {
        "settings": settings.model_dump(mode="json"),
        "devices": list(rows.values()),
        "steps": steps,
        "round_seconds": verdict.round_seconds / steps,
        "virtual_seconds": verdict.round_seconds * times + base_seconds,
        "bytes_up": int(record.bytes_up * times),
        "bytes_down": int(record.bytes_down * times) + base_bytes * members,
        "base_bytes": base_bytes,
        "operations": record.operations * times + base_operations * members,
        "joules": record.joules and record.joules * times + base_joules * members,
        **server,
        "budget_action": settings.limits and method.traits.action(settings.limits.resource),
    }


def _lay_out(federation: Federation, progress: Progress, steps: int) -> tuple[list[Assignment], Verdict]:
    """Who ends in the first steps of a clock of events, and how; as if all were one."""
    begun = progress.virtual_seconds
    ended: list[Assignment] = []
    outcomes: list[Outcome] = []
    for _ in range(steps):
        progress, _, assignments, verdict = federation.events.open(federation.wait(progress))
        ended += assignments
        outcomes += verdict.outcomes
        progress = replace(
            progress,
            rounds=progress.rounds + 1,
            virtual_seconds=progress.virtual_seconds + verdict.round_seconds,
            holders=add_holders(progress, assignments),
        )
    return ended, Verdict(tuple(outcomes), progress.virtual_seconds - begun)


def _server(federation: Federation, operations: float) -> dict[str, float | None]:
    """The most that a server does which works itself, of the whole run, and how much longer a round is for it.

    None where there is no limit.
    """
    if not federation.method.traits.server_work:
        return {}
    cap = federation.settings.server_cap
    most = None if cap is None else cap * operations
    return {
        "server_operations_at_most": most and most * federation.settings.rounds,
        "server_round_seconds_at_most": most and federation.server_seconds(most),
    }


def restamp_run(
    run: RunRecord, settings: Settings, problem: Problem, method: Method[Any, Any]
) -> RunRecord | None:
    """The run with times, bytes and operations of these settings; None where other replies would count.

    Only for methods whose assignments do not depend on what is learned; `problem` may hold made-up samples. What
    devices reuse of earlier rounds does depend on it.
    """
    if settings.prefix_tolerance is not None or settings.clock == "events":
        return None  # another order of arrival is another model
    stamped: list[RoundRecord] = []
    counted = replace(problem, data=_Counted(problem.data, settings.devices, settings.samples))
    with (
        tempfile.TemporaryDirectory() as folder,
        assemble(settings, counted, method, Path(folder)) as federation,
    ):
        progress = federation.start()
        for old in run.rounds:
            progress = federation.wait(progress)
            round_, assignments = federation.open(progress)
            assignments = send_base(federation, progress, assignments)
            verdict = federation.settle(assignments, round_)
            round_seconds = verdict.round_seconds + federation.server_seconds(old.server_operations)
            progress = replace(
                progress,
                speeds=fit_speeds(federation, progress, assignments, verdict),
                holders=add_holders(progress, assignments),
                rounds=progress.rounds + 1,
                virtual_seconds=progress.virtual_seconds + round_seconds,
            )
            new = record_round(federation, progress, assignments, verdict)
            if _counting(new.devices) != _counting(old.devices):
                return None
            same = (
                "score", "score_name", "maximize", "scores", "loss", "metrics", "evaluates", "server_operations"
            )  # fmt: skip
            learned = {name: getattr(old, name) for name in same}
            stamped.append(new.model_copy(update={**learned, "round_seconds": round_seconds}))
    last = stamped[-1] if stamped else None
    result = run.result and run.result.model_copy(
        update={
            "virtual_seconds": last.virtual_seconds if last else 0.0,
            "bytes_up": sum(one.bytes_up for one in stamped),
            "bytes_down": sum(one.bytes_down for one in stamped),
            "operations": sum(one.operations for one in stamped),
            "joules": total_joules(stamped),
            "budget": settings.budget,
            "budget_action": settings.limits and method.traits.action(settings.limits.resource),
        }
    )
    return RunRecord(
        folder=run.folder, settings=settings.model_dump(mode="json"), rounds=tuple(stamped), result=result
    )


def _counting(devices: tuple[DeviceRecord, ...]) -> list[tuple[int, str]]:
    return [(device.device, device.part) for device in devices if device.outcome == "arrived"]


class _Counted(FederatedData):
    """Data of which only the number of samples per device is asked."""

    def __init__(self, own: FederatedData, devices: int, count: int) -> None:
        self.name, self.classes, self.test, self.devices = own.name, None, own.test, devices
        self._count = count

    def samples(self, device: int) -> int:
        return self._count

    def shard(self, device: int) -> Examples:
        raise NotImplementedError("nobody trains here")

    def label_counts(self, device: int) -> None:
        return None
