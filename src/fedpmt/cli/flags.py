"""Flags made from the one schema of settings, so that a command never lists them by hand."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic_core import PydanticUndefined

from fedpmt.data.registry import spellings
from fedpmt.methods.registry import METHODS
from fedpmt.models.nets import NETS, TASKS
from fedpmt.settings import FINGERPRINT, Settings, read_toml, resolve
from fedpmt.types import SettingError

GROUPS = {
    "What is learned": (
        "method",
        "task",
        "weights",
        "tune",
        "model",
        "layers",
        "tied",
        "data",
        "data_dir",
        "objective",
        "clients",
        "partition",
        "amounts",
        "held_out",
        "partition_seed",
        "public",
        "validation",
        "score_on",
    ),
    "The fleet": (
        "devices",
        "samples",
        "cohort",
        "sampling",
        "levels",
        "level_draw",
        "drift",
        "speed_trace",
        "fleet",
        "availability",
        "availability_trace",
        "failure",
        "over_select",
    ),
    "The clock": ("clock", "buffer", "step_every", "concurrency", "staleness"),
    "Who trains what": (
        "assign",
        "deadline",
        "budget",
        "full_seconds",
        "mode",
        "prefix",
        "prefix_tolerance",
        "depths",
        "plan",
        "splitting",
        "server_cap",
        "server_speed",
        "speeds",
        "speed_weight",
        "options",
    ),
    "Training": (
        "epochs",
        "batch",
        "lr",
        "schedule",
        "warmup",
        "optimizer",
        "momentum",
        "nesterov",
        "weight_decay",
        "clip_norm",
        "precision",
        "frozen_precision",
        "precision_seconds",
        "rounds",
        "seed",
    ),
    "The server's step": (
        "mean",
        "server_optimizer",
        "server_lr",
        "server_momentum",
        "server_nesterov",
        "server_beta2",
        "server_tau",
    ),
    "Privacy": ("dp_clip", "dp_noise", "dp_delta"),
    "The run": (
        "workers",
        "executor",
        "device",
        "eval_every",
        "personal_test",
        "target",
        "patience",
        "time_budget",
        "checkpoint_seconds",
    ),
}
PANELS = {name: panel for panel, names in GROUPS.items() for name in names}
METAVARS = {
    "options": "METHOD.KEY=VALUE",
    "budget": "RESOURCE[=AMOUNT]",
    "model": "MODULE:FUNCTION",
    "weights": "pretrained|random|FILE",
    "clients": "MODULE:FUNCTION",
    "layers": "A,B,...",
    "step_every": "SECONDS|fastest:SHARE",
    "mean": "plain|median|trimmed:SHARE|clipped:NORM",
    **dict.fromkeys(("fleet", "availability_trace", "speed_trace"), "FILE"),
}
FROM_DATA = ("devices", "samples", "cohort", "batch", "lr", "rounds")
HANGING = ("partition", "sampling", *FROM_DATA)
"""Settings whose defaults hang on others: on the data set, or on who splits the model."""


OF_FILE = ("out", "seeds")
"""Arguments of commands that a settings file may hold, too."""


def with_settings(
    without: Sequence[str] = (), of_file: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per setting; it gets those that were typed, as a dict `given`.

    Args:
        without: Settings that the command has no flags for.
        of_file: Those of its own arguments, with the default None, that a settings file may hold.
    """
    names = [name for name in Settings.model_fields if name not in (*without, FINGERPRINT)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def wrapped(**arguments: Any) -> None:
            typed = {name: arguments.pop(name) for name in names}
            given = {name: value for name, value in typed.items() if value not in (None, [], ())}
            given = merged(arguments.pop("config"), given, arguments.get("methods"))
            found = _take_arguments(given, of_file)
            command(given=given, **{**found, **_without_none(arguments, found)})

        own = [
            parameter
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if name != "given"
        ]
        config = Annotated[
            Path | None,
            typer.Option(
                help="TOML file with any of these settings, as `fedpmt init` writes one; flags override it "
                "(default: none).",
                rich_help_panel="The run",
            ),
        ]
        flags = [_parameter(name) for name in names]
        parameters = [
            *flags,
            inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config),
            *own,
        ]
        parameters.sort(key=lambda parameter: parameter.kind)
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        wrapped.__doc__ = command.__doc__
        wrapped.__name__ = command.__name__
        return wrapped

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    """A flag takes text: the schema reads it, so that all errors have one form."""
    field = Settings.model_fields[name]
    flag = "--set" if name == "options" else f"--{name.replace('_', '-')}"
    option = typer.Option(
        flag,
        help=f"{describe(name)}{'' if name in SAID else f' (default: {default_text(name)})'}",
        metavar=_metavar(name, field.annotation),
        show_default=False,
        rich_help_panel=PANELS[name],
        autocompletion=_completions(name, _metavar(name, field.annotation)),
    )
    kind: Any = list[str] | None if name == "options" else str | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def describe(name: str) -> str:
    """What a setting is, in words."""
    more = ", as METHOD.KEY=VALUE; may be given several times" if name == "options" else ""
    return f"{Settings.model_fields[name].description or ''}{more}"


SAID = {name for name, field in Settings.model_fields.items() if "efault" in (field.description or "")} - set(
    HANGING
)
"""Settings whose descriptions say what the default is."""


def default_text(name: str) -> str:
    """The default of a setting as one would type it."""
    if name in FROM_DATA:
        return f"{default_value(name):g} for {_usual().data}, else the data set's"
    value = default_value(name)
    return "none" if value in (None, "", {}) else type_value(value)


def default_value(name: str) -> Any:
    """The default of a setting; for those that hang on the data set, that of a run without flags."""
    default = Settings.model_fields[name].default
    return getattr(_usual(), name) if name in FROM_DATA else None if default is PydanticUndefined else default


@cache
def _usual() -> Settings:
    return resolve({})


def type_value(value: Any) -> str:
    """A value as one types it.

    >>> type_value(10.0), type_value(False), type_value(1e-5)
    ('10', 'false', '1e-05')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _completions(name: str, metavar: str) -> Callable[[str], list[str]] | None:
    """What a shell offers behind a flag; None: files, or nothing."""
    if name == "method":
        return complete_methods
    known = {
        "task": [*NETS, *TASKS],
        "data": spellings(),
        "budget": ["operations", "time", "bytes", "upload", "memory", "energy"],
        "partition": ["iid", "classes:2", "dirichlet:0.5", "natural"],
    }
    choices = known.get(name) or [word for word in metavar.split("|") if word.islower() and "|" in metavar]

    def complete(incomplete: str) -> list[str]:
        return _matching(choices, incomplete)

    return complete if choices else None


def complete_methods(incomplete: str) -> list[str]:
    """Offer the names of methods to a shell."""
    return _matching(list(METHODS), incomplete)


def _matching(choices: Sequence[str], incomplete: str) -> list[str]:
    return [choice for choice in choices if choice.startswith(incomplete)]


def _metavar(name: str, annotation: Any) -> str:
    if name in METAVARS:
        return METAVARS[name]
    if typing.get_origin(annotation) is Literal:
        return "|".join(choice for choice in typing.get_args(annotation) if choice != "custom")
    if annotation is bool:
        return "true|false"
    kinds = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType] or [annotation]
    return {int: "N", float: "X", Path: "PATH"}.get(kinds[0], "NAME")


def merged(
    config: Path | None, flags: Mapping[str, Any], methods: Sequence[str] | None = None
) -> dict[str, Any]:
    """The file's settings, then the flags; `methods` are those that are compared."""
    given = read_toml(config) if config else {}
    # --set METHOD.KEY=VALUE says which method it is for; the file's options are for the method that runs, and a file
    # for several methods may have a table for each.
    running = methods or [str({**given, **flags}.get("method", Settings.model_fields["method"].default))]
    others = set(METHODS) - {name.partition(":")[0] for name in running}
    tables = {**_table(given, "options"), **_table(given, "set")}
    options = {key: value for key, value in tables.items() if key.rpartition(".")[0] not in others}
    for key, value in given.items():
        if isinstance(value, dict):
            raise SettingError(f"[{key}] is no setting; a method's own settings stand in [options.{key}]")
    return {**given, **flags, "options": {**options, **_options(flags.get("options", ()))}}


def _table(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Take the methods' own settings out of a file: a table, or a list as on the command line."""
    found = given.pop(name, {})
    if isinstance(found, list) and all(isinstance(text, str) for text in found):
        return dict(_options(found))
    if not isinstance(found, dict):
        raise SettingError(f"{name} is a table: [{name}] and KEY = VALUE lines below it")
    return _flat(found)


def _take_arguments(given: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Take a command's own arguments out of the settings of a file; one that keeps no records needs none of them."""
    found = {key: given.pop(key) for key in OF_FILE if key in given}
    if wanted and "seeds" in found and "seeds" not in wanted:
        raise SettingError("seeds is for `fedpmt compare`; a single run has a seed")
    if "out" in found and not isinstance(found["out"], str):
        raise SettingError(f"out must be the path of a folder (got {found['out']})")
    if isinstance(found.get("seeds"), list):
        found["seeds"] = ",".join(map(str, found["seeds"]))
    kinds = {"out": Path, "seeds": str}
    return {key: kinds[key](value) for key, value in found.items() if key in wanted}


def _without_none(arguments: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None or key not in found}


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """[options.feddrop] tables as `feddrop.KEY`."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return flat


def _options(texts: Sequence[str]) -> dict[str, str]:
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise SettingError(f"set = '{text}' is refused: write METHOD.KEY=VALUE")
        options[key.strip()] = value.strip()
    return options
