"""The program: its commands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import click
import typer

from fedpmt import __version__
from fedpmt.cli import data, deploy, prices, report, runs, watch
from fedpmt.cli.show import say, warnings
from fedpmt.types import SettingError

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

app = typer.Typer(
    help="Federated learning for fleets of unequal devices: simulate, price, plan and compare.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(runs.run)
app.command()(runs.compare)
app.command()(prices.cost)
app.command()(prices.plan)
app.command()(prices.profile)
app.command()(runs.methods)
app.add_typer(data.app, name="data")
app.add_typer(data.models, name="model")
app.command()(report.report)
app.command()(watch.watch)
app.command()(deploy.deploy)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    sys.exit(program(arguments))


def program(arguments: Sequence[str] | None = None) -> int:
    """Run `fedpmt` and return its exit code."""
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


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
