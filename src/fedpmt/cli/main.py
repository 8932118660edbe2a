"""The program: its commands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from fedpmt import __version__
from fedpmt.cli.help_text import Command, Group
from fedpmt.cli.show import say, warnings
from fedpmt.types import SettingError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


RETRY_SECONDS = 0.05
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, but not inside an import: there compiled start-up code would abort."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _importing(frame):
        raise KeyboardInterrupt
    again = threading.Timer(RETRY_SECONDS, signal.raise_signal, (number,))
    again.daemon = True
    again.start()


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130

PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
COMMANDS = {
    "run": ("fedpmt.cli.runs:run", "Train one method on a fleet of unequal devices."),
    "compare": ("fedpmt.cli.runs:compare", "Run several methods, or a sweep, on the same data and fleet."),
    "report": ("fedpmt.cli.report:report", "Write one web page with everything the runs show."),
    "runs": ("fedpmt.cli.report:list_runs", "List the runs in a folder."),
    "watch": ("fedpmt.cli.watch:watch", "Serve the report of runs while they go on."),
    "cost": ("fedpmt.cli.prices:cost", "Price every depth of a net."),
    "plan": ("fedpmt.cli.prices:plan", "What each device can train by a deadline."),
    "profile": ("fedpmt.cli.prices:profile", "Measure this machine, as a row for the fleet CSV."),
    "methods": ("fedpmt.cli.methods:methods", "List the methods, or show what one of them is."),
    "data": ("fedpmt.cli.data:app", "List the data sets, and fetch those that have files."),
    "model": ("fedpmt.cli.data:models", "List pretrained models, and fetch their weights."),
    "deploy": ("fedpmt.cli.deploy:deploy", "Train on Flower: a SuperLink and a SuperNode per device."),
    "init": ("fedpmt.cli.init:init", "Write a settings file with every setting's default."),
    "completion": ("fedpmt.cli.main:completion", "Print a script that completes commands in your shell."),
}
"""Where each command is, and what it does; a command is loaded when it is used."""


class Program(Group):
    """The commands by name; only the one that is called is loaded."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Load a command."""
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(**PLAIN)
        alone.command(name, cls=Command)(found)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command, without loading it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was typed."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise SettingError.unknown("command", args[0], COMMANDS)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Program,
    help="Federated learning for fleets of unequal devices: simulate, price, plan and compare.",
    epilog="Begin with: fedpmt run --rounds 20; then: fedpmt compare fedpmt fedavg",
    no_args_is_help=True,
    **PLAIN,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedpmt {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    pass


SHELLS = ("bash", "zsh", "fish")
COMPLETE = "_FEDPMT_COMPLETE"
"""Where the shell says that it wants to know how a line may go on."""


def _shells() -> list[str]:
    return list(SHELLS)


def completion(
    shell: Annotated[
        str, typer.Argument(metavar="|".join(SHELLS), help="Your shell.", autocompletion=_shells)
    ],
) -> None:
    """Print a script that lets your shell complete commands, options, methods and settings.

    Examples:
      fedpmt completion bash >> ~/.bashrc
      fedpmt completion zsh >> ~/.zshrc
      fedpmt completion fish > ~/.config/fish/completions/fedpmt.fish
    """
    if shell not in SHELLS:
        raise SettingError.unknown("shell", shell, SHELLS)
    from typer._completion_shared import get_completion_script

    print(get_completion_script(prog_name="fedpmt", complete_var=COMPLETE, shell=shell))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    sys.exit(program(arguments))


def program(arguments: Sequence[str] | None = None) -> int:
    """Run `fedpmt` and return its exit code."""
    if COMPLETE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    return run_app(app, "fedpmt", arguments)


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a program; wrong input is one line on standard error and exit code 2, never a traceback.

    Args:
        app: The commands.
        name: What a user types to start it, e.g. `python -m benchmarks`.
        arguments: What follows the name; by default those of this process.

    Returns:
        The exit code.
    """
    command, short = typer.main.get_command(app), name.rpartition(" ")[2]
    _accept_all_letters()
    try:
        with interruptible(), warnings():
            code = command.main(
                list(arguments) if arguments is not None else None, prog_name=name, standalone_mode=False
            )
        sys.stdout.flush()
        return int(code or 0)
    except SettingError as error:
        say(f"{short}: {_one_line(error)}")
        return WRONG_INPUT
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.message)
        return 0
    except click.UsageError as error:
        say(f"{short}: {_one_line(error.format_message())}")
        return WRONG_INPUT
    except (KeyboardInterrupt, click.Abort):
        say(f"{short}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ArithmeticError, MemoryError, OSError) as error:
        say(f"{short}: {_one_line(error) or type(error).__name__}")
        return FAILED


def _accept_all_letters() -> None:
    """Let a stream show a letter that its encoding lacks as a question mark, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _one_line(error: object) -> str:
    return printable(" ".join(str(error).split()))
