"""A process that outlives the one that started it by as long as it takes to stop what that one has left behind.

`fedpmt deploy` writes the id of each process that it starts to its guard. The end of the pipe without a word before it
says that the writer is no more, whatever ended it: nothing tells a program of its own SIGKILL.
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
    """The side of the one that is watched over."""

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
        """Stop this one too, with all that it has started."""
        self._say(str(process))

    def release(self) -> None:
        """Everything has been stopped; there is nothing left to do."""
        self._say(RELEASE)
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._popen.wait()

    def _say(self, word: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._popen.stdin.write(f"{word}\n")
            self._popen.stdin.flush()


def main(words: Iterable[str]) -> None:
    """The guard's own side: listen until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, str] = {}
    for line in words:
        if line.strip() == RELEASE:
            return
        watched[int(line)] = begun(int(line))
    # An id may be another's by now: only one that began when ours did is ours.
    left = [process for process, time_ in watched.items() if time_ and begun(process) == time_]
    groups: set[int] = set().union(*(groups_below(process) for process in left))
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 0.0)):
        groups |= set().union(*(groups_below(process) for process in left if process in _running(left)))
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        end = time.monotonic() + seconds
        while _running(left) and time.monotonic() < end:
            time.sleep(0.2)


def begun(process: int) -> str:
    """When a process began, empty where there is none."""
    listed = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(process)], capture_output=True, text=True, check=False
    )
    return listed.stdout.strip()


def _running(processes: Iterable[int]) -> list[int]:
    return [process for process in processes if begun(process)]


if __name__ == "__main__":
    main(sys.stdin)
