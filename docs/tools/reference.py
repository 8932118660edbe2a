"""The pages of the reference, from the code: public names, commands, settings and records."""

from __future__ import annotations

import ast
import inspect
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any

import click
import typer

import fedpmt
from fedpmt import records
from fedpmt.cli.main import app
from fedpmt.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS = {
    "Run and compare": ("run", "compare", "read_run", "Run", "Runs"),
    "Price and plan": ("layers", "cost", "plan", "Resources", "Device"),
    "Fine-tuning": ("lora", "merge_lora"),
    "Data": ("PerSample",),
    "Callbacks": ("RoundEnd", "TensorBoard", "WandB", "MLflow", "Stop"),
    "Records and errors": ("RunRecord", "RoundRecord", "SettingError"),
    "Server optimizers": ("SGD", "Momentum", "Adam", "Yogi", "Adagrad"),
    "Write a method": ("Method", "PartAveraging", "Composed", "LocalWork", "Proximal", "Traits", "Axis"),
}
"""The public names that are not methods, in the order in which readers meet them."""

METHODS = "Methods"


def pages() -> dict[str, str]:
    """Return each page's path and text."""
    return {
        "reference/api.md": api_page(),
        "reference/command-line.md": command_page(),
        "reference/settings.md": settings_page(),
        "reference/records.md": records_page(),
    }


def api_groups() -> dict[str, tuple[str, ...]]:
    """Return all public names by group; those in no group are methods."""
    listed = {name for names in GROUPS.values() for name in names}
    return {**GROUPS, METHODS: tuple(name for name in fedpmt.__all__ if name not in listed)}


def api_page() -> str:
    """Return the page of public names, which mkdocstrings fills from their docstrings."""
    lines = ["# Python API", "", "Everything on this page is imported as `fedpmt.NAME`.", ""]
    for group, names in api_groups().items():
        lines += [f"## {group}", ""]
        if group == METHODS:
            lines += ["[What each method does](../methods/README.md) is on its own page.", ""]
        for name in names:
            lines += [f"::: {getattr(fedpmt, name).__module__}.{name}", ""]
            if group == METHODS:
                lines += ["    options:", "      members: false", ""]
    return "\n".join(lines)


def command_page() -> str:
    """Return the page of all commands, from their help."""
    lines = [
        "# Command line",
        "",
        "Every command has `--help`. The exit code is 2 after wrong input, 1 after a failure and 130 after Ctrl-C.",
        "Flags that are settings of a run are described once, in [Settings](settings.md).",
        "",
    ]
    for path, command in _commands(typer.main.get_command(app), ("fedpmt",)):
        lines += [
            f"## {' '.join(path)}",
            "",
            _examples_as_code(command.help or ""),
            "",
            f"    {_usage(path, command)}",
            "",
        ]
        own = [option for option in command.params if not _is_setting(option)]
        shared = [option.opts[0] for option in command.params if _is_setting(option)]
        others = [
            option.opts[0]
            for option in _run_command().params
            if _is_setting(option) and option.opts[0] not in shared
        ]
        if own:
            lines += [*_table("option", "meaning"), *(_row(_spelling(one), _help(one)) for one in own), ""]
        if len(shared) > len(others):
            lines += [f"All settings of a run{' but ' if others else ''}{_flags(others)}.", ""]
        elif shared:
            lines += [f"Settings of a run: {_flags(shared)}.", ""]
        if command.epilog:
            lines += [_plain(command.epilog), ""]
    return "\n".join(lines)


def settings_page() -> str:
    """Return the page of settings: names, values, defaults and meaning."""
    lines = [
        "# Settings",
        "",
        "A setting has one name everywhere: `held_out=0.2` in Python, `--held-out 0.2` on the command line, and",
        "`held_out = 0.2` in a TOML file that `--config` names. Flags override the file. A method's own settings are",
        "`--set METHOD.NAME=VALUE`, and are listed on [its page](../methods/README.md).",
        "",
    ]
    for group, names in setting_groups().items():
        lines += [f"## {group}", "", *_table("setting", "values", "default", "meaning")]
        for name in names:
            field = Settings.model_fields[name]
            cells = f"`{name}`", _type(field.annotation), _default(field.default), field.description or ""
            lines.append(_row(*cells))
        lines.append("")
    return "\n".join(lines)


def setting_groups() -> dict[str, list[str]]:
    """Return the settings of a run by the headings of `fedpmt run --help`."""
    groups: dict[str, list[str]] = {}
    for option in _run_command().params:
        if _is_setting(option):
            groups.setdefault(getattr(option, "rich_help_panel", ""), []).append(str(option.name))
    return groups


def records_page() -> str:
    """Return the page of what a run leaves behind, from the record classes and their comments."""
    files = inspect.getdoc(records) or ""
    folder = "\n".join(line for line in files.splitlines() if line.startswith("    "))
    lines = [
        "# Records",
        "",
        "A run writes one folder. It survives a kill at any time; `--resume` continues it.",
        "",
        folder,
        "",
        "[`fedpmt.read_run`](api.md) reads it back, finished or not. Times are virtual seconds, sizes are bytes, and",
        "operations are multiply-adds. Fields with a default may be missing in folders of older versions.",
        "",
    ]
    titles = {
        "RoundRecord": "A line of `rounds.jsonl`",
        "DeviceRecord": "A device in `devices` of a round",
        "ClientScores": "`clients` of a round or a result",
        "ResultRecord": "`result.json`",
    }
    for name, title in titles.items():
        lines += [f"## {title}", "", *_table("field", "type", "meaning"), *_fields(name), ""]
    return "\n".join(lines)


def _commands(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            each = command.get_command(context, name)
            assert each is not None
            yield from _commands(each, (*path, name))
    else:
        yield path, command


def _run_command() -> click.Command:
    return dict(_commands(typer.main.get_command(app), ("fedpmt",)))["fedpmt", "run"]


def _examples_as_code(text: str) -> str:
    """Indent the examples of a help text, which end it, as Markdown wants code.

    >>> print(_examples_as_code("Say it.\\n\\nExamples:\\n  fedpmt run"))
    Say it.
    <BLANKLINE>
    Examples:
    <BLANKLINE>
        fedpmt run
    """
    said, _, examples = text.partition("Examples:\n")
    lines = "\n".join(f"  {line}" for line in examples.splitlines())
    return f"{said}Examples:\n\n{lines}" if examples else said


def _flags(flags: list[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def _usage(path: tuple[str, ...], command: click.Command) -> str:
    arguments = [
        one.make_metavar(click.Context(command)) for one in command.params if isinstance(one, click.Argument)
    ]
    return " ".join([*path, *arguments, "[OPTIONS]"])


def _is_setting(option: click.Parameter) -> bool:
    # Settings are read as text, whatever they are; a command's own options have types and defaults of their own.
    return isinstance(option, click.Option) and option.name in Settings.model_fields


def _spelling(option: click.Parameter) -> str:
    if isinstance(option, click.Argument):
        return f"`{(option.name or '').upper()}`"
    return ", ".join(f"`{spelling}`" for spelling in option.opts)


def _help(option: click.Parameter) -> str:
    return _plain(getattr(option, "help", None) or "")


def _plain(text: str) -> str:
    """Turn rich's markup into code.

    >>> _plain("Example: [bold]fedpmt run[/]")
    'Example: `fedpmt run`'
    """
    return text.replace("[bold]", "`").replace("[/bold]", "`").replace("[/]", "`")


def _type(annotation: Any) -> str:
    """Name the values of a setting.

    >>> _type(float | None), _type(typing.Literal["a", "b"])
    ('number', '`a`, `b`')
    """
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in {UnionType, typing.Union}:
        inner = [_type(each) for each in typing.get_args(annotation) if each is not NoneType]
        return " or ".join(dict.fromkeys(inner))
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
    return names.get(annotation, "table" if typing.get_origin(annotation) else "text")


def _default(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str | int | float) and value != "" else ""


def _fields(name: str) -> Iterator[str]:
    source = inspect.getsource(records)
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign):
            text = " ".join(lines[node.lineno - 1 : node.end_lineno])
            comment = text.partition("# ")[2]
            kind = ast.unparse(node.annotation)
            yield _row(f"`{ast.unparse(node.target)}`", f"`{kind}`", comment.removesuffix(" )").strip())


def _table(*heads: str) -> list[str]:
    return [_row(*heads), "|" + "---|" * len(heads)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
