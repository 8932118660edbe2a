"""Runs in this process and in processes of their own, which can be stopped at a chosen moment."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import fedpmt
from fedpmt.data.sets import embedded
from fedpmt.simulation.loop import Federation

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    import pytest

with warnings.catch_warnings():
    # typer 0.20 still uses names that click 8.5 calls deprecated; that is between the two of them.
    warnings.filterwarnings("ignore", "'click", DeprecationWarning)
    from fedpmt.cli.main import program

# Reading the built-in images is most of what a tiny run takes.
READ_ONCE = mock.patch.object(embedded, "_table", functools.cache(embedded._table))
PATIENCE = 90.0


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


def run(*arguments: object) -> Ended:
    """`fedpmt run --json` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), READ_ONCE:
        code = program(["run", *map(str, arguments), "--json"])
    return Ended(code, out.getvalue(), err.getvalue())


def refused(*arguments: object) -> str:
    """The one line with which a run is refused."""
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, ""), ended
    assert ended.err.count("\n") == 1, ended.err
    return ended.err.strip()


def bits(folder: Path) -> tuple[str, bytes, bytes]:
    """What must not depend on how a run was computed."""
    result = json.loads((folder / "result.json").read_bytes())
    return (
        result["weights_sha256"],
        (folder / "rounds.jsonl").read_bytes(),
        (folder / "model.safetensors").read_bytes(),
    )


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, *arguments: object) -> Ended:
    """A run in this process that is interrupted in the round that follows these."""
    play = Federation.play

    def cut(federation: Federation, progress: Any) -> Any:
        if progress.rounds == after:
            raise KeyboardInterrupt
        return play(federation, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "play", cut)
        return run(*arguments)


def lines(folder: Path) -> int:
    """How many rounds are recorded."""
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def environment() -> dict[str, str]:
    """The environment of a process that imports the package that is tested here."""
    home = str(Path(fedpmt.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": home, "OMP_NUM_THREADS": "1"}


class Process:
    """`fedpmt run` in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "fedpmt", "run", *map(str, arguments)]
        self._process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Until something is so; the process must still be at work then."""
        begun = time.monotonic()
        while not ready():
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() - begun < PATIENCE
            time.sleep(0.001)

    def stop(self, how: signal.Signals) -> Ended:
        """Send a signal and wait for the end."""
        self._process.send_signal(how)
        out, err = self._process.communicate(timeout=PATIENCE)
        return Ended(self._process.returncode, out, err)
