"""The command that makes a run again."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from fedpmt.methods.registry import method_class
from fedpmt.records import EXECUTION
from fedpmt.settings import ARRAYS, OWN_TASK, Settings, resolve
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST = ("method", "task", "model", "clients", "data")
"""What other settings take their defaults from; always written."""

CUSTOM = "custom"
"""What an optimizer, a schedule or an objective is called that only Python can give."""


def repeat_command(settings: Settings) -> str | None:
    """Write a run as a command line, with those settings that are not the usual ones.

    Returns:
        The command; None where a part of the run exists in Python only.

    >>> repeat_command(resolve({"method": "fedavg", "seed": 3}))
    'fedpmt run --method fedavg --task fcnn-mnist --data embedded --seed 3'
    """
    values = settings.model_dump(mode="json")
    if _is_python_only(values):
        return None
    usual = _usual(values)
    words = ["fedpmt", "run"]
    for name, value in values.items():
        if name in EXECUTION or name in ("digest", "options"):
            continue
        if (name in FIRST and value) or (name not in FIRST and value != usual[name]):
            words += [f"--{name.replace('_', '-')}", _text(value)]
    words += [f"--set={settings.method}.{key}={_text(value)}" for key, value in settings.options.items()]
    return shlex.join(words)


def _is_python_only(values: Mapping[str, Any]) -> bool:
    try:
        method_class(values["method"])
    except SettingError:
        return True
    texts = [value for value in values.values() if isinstance(value, str)]
    own_model = values["task"] == OWN_TASK and not values["model"]
    own_arrays = values["data"] == ARRAYS and not values["clients"]
    # A table that was given in Python is kept with its lines; a file is kept by its name.
    written_out = any(text == CUSTOM or "\n" in text for text in texts)
    return own_model or own_arrays or written_out or "transform=" in values["digest"]


def _usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of which nothing is said but what is learned; those of the schema if that is not enough."""
    try:
        return resolve({name: values[name] for name in FIRST if values[name]}).model_dump(mode="json")
    except SettingError:
        return {name: field.default for name, field in Settings.model_fields.items()}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
