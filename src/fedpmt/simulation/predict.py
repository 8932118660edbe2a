"""What a run will cost, without training anything."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt.simulation.assemble import assemble
from fedpmt.simulation.bookkeeping import record_round
from fedpmt.simulation.cohort import send_base
from fedpmt.simulation.coverage import warn_before_training
from fedpmt.simulation.room import check_room

if TYPE_CHECKING:
    from fedpmt.methods.base import Method
    from fedpmt.settings import Settings
    from fedpmt.simulation.loop import Federation
    from fedpmt.simulation.problem import Problem


def predict(settings: Settings, problem: Problem, method: Method[Any, Any], folder: Path) -> dict[str, Any]:
    """A round's devices, times and prices; the whole run at that pace, if its folder has room for it.

    The first round is as much longer as downloading the model's base takes, and running it where its outputs are kept;
    each device does that once at most.
    """
    with (
        tempfile.TemporaryDirectory() as nowhere,
        assemble(settings, problem, method, Path(nowhere)) as federation,
    ):
        check_room(federation, folder)
        progress = federation.wait(federation.start())
        warn_before_training(federation, progress)
        round_, assignments = federation.open(progress)
        verdict = federation.settle(assignments, round_)
        record = record_round(federation, progress, assignments, verdict)
        server = _server(federation, record.operations)
        first = send_base(federation, progress, assignments)
        base_seconds = federation.settle(first, round_).round_seconds - verdict.round_seconds
    base_bytes = max((one.base_bytes for one in first), default=0)
    base_operations = sum(one.base_operations for one in first) / max(1, len(first))
    members = min(settings.devices, settings.rounds * len(assignments))
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
                "used": shown.used,
                "budget": shown.budget,
                "over_budget": shown.over_budget,
            },
        )
        row["devices"] += 1
    return {
        "settings": settings.model_dump(mode="json"),
        "devices": list(rows.values()),
        "round_seconds": verdict.round_seconds,
        "virtual_seconds": verdict.round_seconds * settings.rounds + base_seconds,
        "bytes_up": record.bytes_up * settings.rounds,
        "bytes_down": record.bytes_down * settings.rounds + base_bytes * members,
        "base_bytes": base_bytes,
        "operations": record.operations * settings.rounds + base_operations * members,
        **server,
        "budget_action": settings.limits and method.traits.action(settings.limits.resource),
    }


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
