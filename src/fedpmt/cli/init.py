"""`fedpmt init`: a settings file to begin with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedpmt.cli import show
from fedpmt.cli.flags import GROUPS, HANGING, default_value, describe
from fedpmt.pricing.text_table import WIDTH, wrap
from fedpmt.types import SettingError

HEAD = """\
# Settings of fedpmt, with their defaults: fedpmt run --config {name}
# Lines that begin with "# name =" set nothing: the default hangs on other
# settings, or there is none.
"""
OPTIONS = """
# The methods' own settings (`fedpmt methods NAME`), a table for each method.
# [options.fedprox]
# mu = 1.0
"""
NOT_ALONE = (*HANGING, "dp_noise", "dp_delta")
"""Settings whose defaults hang on others, or that do nothing without another."""

File = Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write; - prints it.")]


def init(file: File = Path("fedpmt.toml")) -> None:
    """Write a TOML file with every setting, what it means and its default.

    Examples:
      fedpmt init
      fedpmt run --config fedpmt.toml
      fedpmt init - | less
    """
    text = settings_file(file.name if str(file) != "-" else "fedpmt.toml")
    if str(file) == "-":
        show.out(text.rstrip())
        return
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise SettingError(f"file = '{file}' exists already; name another one") from None
    except OSError as error:
        raise SettingError(f"file = '{file}' cannot be written: {error.strerror}") from error
    show.say(f"written: {file}; run it with: fedpmt run --config {file}")


def settings_file(name: str) -> str:
    """Return a settings file of this name, all settings at their defaults."""
    lines = [HEAD.format(name=name)]
    for title, names in GROUPS.items():
        lines.append(f"\n# ---- {title} ----\n")
        lines += [line for setting in names if setting != "options" for line in _setting(setting)]
    return "\n".join([*lines, OPTIONS])


def _setting(name: str) -> Iterator[str]:
    """What a setting means, and the line that sets it."""
    for line in wrap(describe(name), WIDTH - 2, shorten=False):
        yield f"# {line}"
    value = default_value(name)
    if value in (None, ""):
        yield f"# {name} =\n"
    else:
        # JSON's numbers, texts, true and false are TOML's.
        yield f"{'# ' if name in NOT_ALONE else ''}{name} = {json.dumps(value)}\n"
