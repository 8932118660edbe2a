"""`--dry-run`: settings, prices and predicted time of a run that is not run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpmt import api
from fedpmt.cli import show
from fedpmt.cli.flags import FROM_DATA, default_value, type_value
from fedpmt.records import plural, step_word
from fedpmt.report.budgets import ACTIONS
from fedpmt.report.quantities import bytes_unit, count_unit, joules_unit, percent_unit, time_unit
from fedpmt.report.quantities import show as quantity
from fedpmt.settings import Settings
from fedpmt.types import shown_memory


def show_prediction(request: api.Request, folder: Path, *, as_json: bool) -> None:
    """Print what a run in this folder would take."""
    settings, prediction = request.settings, api.predict(request, folder)
    if as_json:
        print(json.dumps(prediction))
        return
    show.sentence("Settings; all others have their defaults (fedpmt init lists them)")
    show.facts({key: _text(value) for key, value in prediction["settings"].items() if _is_told(key, value)})
    print()
    if settings.budget is not None:
        show.sentence(f"budget {settings.budget}: acts {ACTIONS[prediction['budget_action']]}")
    word = step_word(settings.clock)
    shown = (
        f"a first {word}" if settings.clock == "rounds" else f"the first {plural(prediction['steps'], word)}"
    )
    rows = [_cells(row, prediction, settings) for row in prediction["devices"]]
    show.texts_table(f"{settings.method}: {shown}, prices {settings.mode}", rows, keys=2)
    for text in _sentences(settings, prediction):
        show.sentence(text)


def _is_told(name: str, value: object) -> bool:
    """Whether a setting is one that everybody wants to know, or not at its default."""
    return name in TOLD or (name not in NOT_TOLD and type_value(value) != type_value(default_value(name)))


TOLD = ("method", "task", "data", "partition", "levels", *FROM_DATA)
NOT_TOLD = ("digest",)


def _text(value: object) -> str:
    """A setting as a person writes it."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={type_value(one)}" for key, one in value.items())
    return "none" if value is None else type_value(value)


def _cells(row: Mapping[str, Any], prediction: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """What devices of one kind do in a round, by column."""
    cells = {
        "trains": row["part"],
        "level": str(row["level"]),
        "devices": str(row["devices"]),
        "speed": f"{row['speed']:.3g}",
        "time": quantity(row["seconds"], time_unit),
        "reply": row["outcome"],
        "upload": quantity(float(row["upload_bytes"]), bytes_unit),
        "memory": shown_memory(row["memory_bytes"]),
        "operations": quantity(float(row["operations"]), count_unit),
    }
    if prediction["joules"] is not None:
        cells["energy"] = quantity(row["joules"], joules_unit)
    if settings.budget is not None:
        over = " (over)" if row["over_budget"] else ""
        cells["of its budget"] = quantity(row["used"] / row["budget"], percent_unit) + over
    return cells


def _sentences(settings: Settings, prediction: Mapping[str, Any]) -> list[str]:
    one = quantity(prediction["round_seconds"], time_unit)
    whole = quantity(prediction["virtual_seconds"], time_unit)
    word = step_word(settings.clock)
    sentences = [
        f"predicted: {one} of virtual time a {word}, {whole} for {plural(settings.rounds, word)}",
    ]
    if prediction["base_bytes"]:
        base = quantity(float(prediction["base_bytes"]), bytes_unit)
        sentences.append(f"base, sent to each device once: {base}")
    if "server_operations_at_most" in prediction:
        sentences.append(f"server: {_server_words(settings, prediction)}")
    return sentences


def _server_words(settings: Settings, prediction: Mapping[str, Any]) -> str:
    if settings.server_cap is None:
        return "no limit to its operations (server-cap = none), which are not predicted"
    words = f"at most {settings.server_cap:g} x the devices' operations"
    most = quantity(float(prediction["server_operations_at_most"]), count_unit)
    words += f", {most} in {plural(settings.rounds, step_word(settings.clock))}"
    if settings.server_speed is not None:
        longer = quantity(prediction["server_round_seconds_at_most"], time_unit)
        words += f", and up to {longer} more a {step_word(settings.clock)}"
    return words
