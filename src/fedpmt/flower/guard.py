"""A small process that stops what `fedpmt deploy` has started if `fedpmt deploy` itself is killed.

`fedpmt deploy` writes the id of each process that it starts to its guard's standard input. If the pipe ends before it
has written `release`, it has died; a program is not told of its own SIGKILL, so another one must clean up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from fedpmt.flower.processes import STOP_SECONDS, groups_below

if TYPE_CHECKING:
    from collections.abc import Iterable

RELEASE = "release"


class Guard:
    """The guard as `fedpmt deploy` sees it."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C is not meant for it
        )

    def watch(self, process: int) -> None:
        """Have this process stopped too, with everything that it starts."""
        self._write(str(process))

    def release(self) -> None:
        """Let the guard exit: everything has been stopped."""
        self._write(RELEASE)
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._popen.wait()

    def _write(self, word: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._popen.stdin.write(f"{word}\n")
            self._popen.stdin.flush()


def main(words: Iterable[str]) -> None:
    """Run the guard: read process ids until the pipe ends, then stop those that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, str] = {}
    for line in words:
        if line.strip() == RELEASE:
            return
        watched[int(line)] = start_time(int(line))
    # Ids are reused: a process that began at another time is not ours.
    left = [process for process, began in watched.items() if began and start_time(process) == began]
    groups: set[int] = set().union(*(groups_below(process) for process in left))
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 0.0)):
        groups |= set().union(*(groups_below(process) for process in left if process in _running(left)))
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        end = time.monotonic() + seconds
        while _running(left) and time.monotonic() < end:
            time.sleep(0.2)


def start_time(process: int) -> str:
    """When a process was started; empty where there is no such process."""
    listed = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(process)], capture_output=True, text=True, check=False
    )
    return listed.stdout.strip()


def _running(processes: Iterable[int]) -> list[int]:
    return [process for process in processes if start_time(process)]


if __name__ == "__main__":
    main(sys.stdin)
