"""A Ray cluster on this machine: each node is a raylet of its own, with its own object store and its own cores.

`ray stop` would end every Ray process of the machine, so nodes run in the foreground here and are stopped by their ids.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from fedpmt.flower.processes import Process, free_ports, program, stop
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADDRESS = "127.0.0.1"
START_SECONDS = 180.0
STORE_BYTES = 200_000_000
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without it, Ray refuses a second node whose address is the loopback interface's.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    # Else workers give way to everything else that runs on the machine, and hardly move where it is busy.
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class RayCluster:
    """Some Ray nodes on the loopback interface. As a context manager it stops all that it has started.

    Inside the context RAY_ADDRESS is set, so that Flower's simulation joins the cluster and starts no Ray of its own.
    Nodes of a cluster listen on all interfaces and run what they are sent, so they ask for a token that is made here.
    """

    folder: Path  # of the logs
    nodes: int = 2
    cpus: int = 1  # of each node
    port: int = 0
    processes: list[Process] = field(default_factory=list)
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # Ray puts sockets there, whose paths must be short.
            sockets = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
            )
            stack.enter_context(_variables(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32)))
            stack.callback(self._stop)
            (self.port,) = free_ports(1)
            head = ["--head", "--port", str(self.port), "--include-dashboard", "false", "--temp-dir", sockets]
            self._start(head, expected=1)
            for number in range(1, self.nodes):
                self._start(["--address", self.address], expected=number + 1)
            stack.enter_context(_variables(RAY_ADDRESS=self.address))
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def address(self) -> str:
        """Where the head node listens."""
        return f"{ADDRESS}:{self.port}"

    def _start(self, where: list[str], expected: int) -> None:
        command = [program("ray"), "start", "--block", "--disable-usage-stats", "--node-ip-address", ADDRESS]
        command += ["--num-cpus", str(self.cpus), "--object-store-memory", str(STORE_BYTES), *where]
        number = len(self.processes)
        process = Process(f"Ray node {number}", command, self.folder / f"ray-{number}.log", ENVIRONMENT)
        self.processes.append(process)
        end = time.monotonic() + START_SECONDS
        # Once it has started everything, the command says that it blocks.
        while "--block" not in process.log.read_text(errors="replace"):
            if process.code() is not None or time.monotonic() >= end:
                raise SettingError(f"Ray node {number} of {expected} did not start: {process.tail(3)}")
            process.track()
            time.sleep(0.2)

    def _stop(self) -> None:
        stop(self.processes)

    def workers(self) -> list[list[int]]:
        """The ids of the processes in which clients run at this moment, node by node."""
        listed = subprocess.run(
            ["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
        children: dict[int, list[int]] = {}
        for own, parent, *_ in rows:
            children.setdefault(int(parent), []).append(int(own))
        clients = {int(row[0]) for row in rows if len(row) == 3 and "ray::ClientAppActor" in row[2]}
        return [sorted(clients & _below(process.id, children)) for process in self.processes]


def _below(root: int, children: dict[int, list[int]]) -> set[int]:
    found, waiting = set(), [root]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.add(child)
            waiting.append(child)
    return found


@contextlib.contextmanager
def _variables(**given: str) -> Iterator[None]:
    """Set environment variables for this process and those it starts, until the context ends."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
