"""A finished run under another clock: other prices, links or deadlines, as long as the same replies count.

Training is the expensive part, and it does not depend on the clock beyond who is averaged in each round.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt.data.base import FederatedData
from fedpmt.records import RunRecord
from fedpmt.simulation.assemble import assemble
from fedpmt.simulation.bookkeeping import add_holders, fit_speeds, record_round
from fedpmt.simulation.cohort import send_base

if TYPE_CHECKING:
    from fedpmt.methods.base import Method
    from fedpmt.records import DeviceRecord, RoundRecord
    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem
    from fedpmt.types import Examples


def restamp_run(
    run: RunRecord, settings: Settings, problem: Problem, method: Method[Any, Any]
) -> RunRecord | None:
    """The run with times, bytes and operations of these settings; None where other replies would count.

    Only for methods whose assignments do not depend on what is learned; `problem` may hold made-up samples.
    """
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
