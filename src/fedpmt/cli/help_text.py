"""What `--help` prints: plain text in groups, with examples, as wide as the terminal."""

from __future__ import annotations

from typing import Any

import click
import typer.core

from fedpmt.cli import show
from fedpmt.pricing.text_table import wrap

EXAMPLES = "Examples:\n"
WIDEST = 120
"""Prose is hard to read in longer lines."""


class Formatter(click.HelpFormatter):
    """Lines as long as the terminal is wide."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None):
        super().__init__(indent_increment, width or min(show.width(), WIDEST))

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        """Write names and what they mean; a name that is too long has a line to itself."""
        size = min(max(len(name) for name, _ in rows), col_max, self.width // 3) + col_spacing
        margin = " " * self.current_indent
        for name, meaning in rows:
            lines = wrap(meaning, self.width - len(margin) - size, shorten=False)
            if len(name) > size - col_spacing:
                lines.insert(0, "")
            for number, line in enumerate(lines):
                self.write(f"{margin}{'' if number else name:{size}}{line}".rstrip() + "\n")


class Context(click.Context):
    """Uses that formatter."""

    formatter_class = Formatter


class Command(typer.core.TyperCommand):
    """A command whose docstring may end in examples, and whose options are shown in groups."""

    context_class = Context

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and the examples, one command a line."""
        text, _, examples = (self.help or "").partition(EXAMPLES)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text.strip())
        with formatter.section("Examples"):
            for line in examples.strip().splitlines():
                formatter.write_text(line.strip())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments and options, group by group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            shown = parameter.get_help_record(ctx)
            if shown is not None:
                usual = "Arguments" if isinstance(parameter, click.Argument) else "Options"
                group = groups.setdefault(getattr(parameter, "rich_help_panel", None) or usual, [])
                group.append((shown[0], shown[1].replace("\\[required]", "").replace("\\[", "[").strip()))
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(typer.core.TyperGroup):
    """A group of commands with the same help."""

    context_class = Context
