"""Processes that are stopped together with everything they started; after a SIGKILL `guard.py` does that."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STOP_SECONDS = 10.0
READY_SECONDS = 60.0


class Process:
    """A program that runs in a session of its own and writes its output to a file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._groups: set[int] = set()
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_of(environment),
                cwd=log.parent,
                start_new_session=True,
            )

    @property
    def id(self) -> int:
        """The id of the process, and of its process group."""
        return self._popen.pid

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._popen.poll()

    def track(self) -> None:
        """Remember the process groups of its descendants, which cannot be found once their parents have ended."""
        self._groups |= groups_below(self.id) if self.code() is None else set()

    def send(self, number: int) -> None:
        """Send a signal to the process and everything that it has started."""
        self.track()
        for group in (self.id, *self._groups):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it has ended in that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)
        return self.code() is not None

    def kill(self) -> None:
        """Kill it at once, with everything that it has started."""
        self.send(signal.SIGKILL)
        self._popen.wait()

    def tail(self, lines: int = 15) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def groups_below(root: int) -> set[int]:
    """The process groups of a process and its descendants, some of which Flower puts into sessions of their own."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid="], capture_output=True, text=True, check=False)
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    found, groups = {root}, {root}
    grown = True
    while grown:
        grown = False
        for process, parent, group in rows:
            if parent in found and process not in found:
                found.add(process)
                groups.add(group)
                grown = True
    return groups


def environment_of(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with changes. It works in any folder, and in a venv that is not activated."""
    environment = {**os.environ, **changes}
    # Flower starts programs of its own by their bare names.
    beside = str(Path(sys.executable).parent.absolute())
    environment["PATH"] = os.pathsep.join(filter(None, [beside, environment.get("PATH", "")]))
    if "PYTHONPATH" in environment:
        places = [
            str(Path(place).absolute()) for place in environment["PYTHONPATH"].split(os.pathsep) if place
        ]
        environment["PYTHONPATH"] = os.pathsep.join(places)
    return environment


def stop(processes: Sequence[Process]) -> None:
    """Stop processes, last started first: by SIGTERM, then by SIGKILL."""
    running = [process for process in reversed(processes) if process.code() is None]
    for process in running:
        process.track()
    for process in running:
        process.send(signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    for process in running:
        process.wait(max(0.0, end - time.monotonic()))
    for process in processes:
        # What a program has started may outlive it; its group is still there then.
        process.send(signal.SIGKILL)
        process.wait(STOP_SECONDS)


def program(name: str) -> str:
    """The path of a program of the environment that this one runs in."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SettingError(f"{name} is not installed: pip install 'fedpmt[flower]'")
    return found


def free_ports(count: int) -> list[int]:
    """Find ports of the loopback interface that are free now."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(int(one.getsockname()[1]))
        return ports


def wait_for_port(process: Process, port: int) -> None:
    """Wait until a process listens on this port."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.code() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SettingError(f"{process.name} did not start; its log {process.log} ends with: {process.tail(3)}")
