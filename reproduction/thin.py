"""Runs small enough to be kept with the source: what figures, tables and another clock need, by column, as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedpmt.records import DeviceRecord, ResultRecord, RoundRecord, RunRecord, migrate
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

SUFFIX = ".json"
LEFT_OUT = frozenset({"devices", "score_by_level", "score_by_class"})
"""Of every round but the last one that was evaluated; devices are kept by column."""


def thin(run: RunRecord) -> bytes:
    """A finished run as the bytes of its kept record."""
    if run.result is None:
        raise SettingError(f"'{run.folder}' is not finished")
    rounds = [one.model_dump(mode="json") for one in run.rounds]
    devices = [one.pop("devices") for one in rounds]
    last: dict[str, Any] = next((one for one in reversed(rounds) if one["score"] is not None), {})
    kept = {
        "settings": run.settings,
        "result": {**run.result.model_dump(mode="json"), "run": ""},
        "rounds": _columns(rounds, set(RoundRecord.model_fields) - LEFT_OUT),
        "devices": _columns(
            [_columns(members, set(DeviceRecord.model_fields)) for members in devices],
            set(DeviceRecord.model_fields),
        ),
        "last": {key: last[key] for key in LEFT_OUT if key in last},
    }
    return to_bytes(kept)


def to_bytes(kept: dict[str, Any]) -> bytes:
    """The JSON of a kept record."""
    return json.dumps(kept, separators=(",", ":")).encode()


def thick(data: bytes, path: Path) -> RunRecord:
    """Read a kept record back; `path` says where it is from."""
    try:
        kept = json.loads(data)
        devices = [_rows(members) for members in _rows(kept["devices"])]
        rounds = [
            RoundRecord.model_validate({**one, "devices": members})
            for one, members in zip(_rows(kept["rounds"]), devices, strict=True)
        ]
        for place in range(len(rounds) - 1, -1, -1):
            if rounds[place].score is not None:
                rounds[place] = rounds[place].model_copy(update=migrate(kept["last"]))
                break
        result = ResultRecord.model_validate(kept["result"])
        return RunRecord(
            folder=path.parent / path.name.removesuffix(SUFFIX),
            settings=kept["settings"],
            rounds=tuple(rounds),
            result=result,
        )
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise SettingError(f"{path} is not a run's record ({error})") from error


def _columns(rows: list[dict[str, Any]], names: set[str]) -> dict[str, list[Any]]:
    """Lists of equal things compress well.

    >>> _columns([{"a": 1, "b": 2}, {"a": 1, "b": 3}], {"a"})
    {'a': [1, 1]}
    """
    return {name: [row[name] for row in rows] for name in sorted(names)}


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
