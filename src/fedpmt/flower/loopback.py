"""Start a SuperLink and SuperNodes on this machine, and submit runs to them."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from fedpmt.flower.deployment import toml
from fedpmt.flower.guard import Guard
from fedpmt.flower.processes import Process, environment_of, free_ports, program, stop, wait_for_port
from fedpmt.records import write_atomically
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONNECTION = "loopback"
COMMAND_SECONDS = 120.0
FAILED, FINISHED = "failed", "finished"


@dataclass(frozen=True)
class Tls:
    """A SuperLink's certificate, and the authority that nodes check it against."""

    authority: Path
    certificate: Path
    key: Path


@dataclass
class Loopback:
    """A federation on this machine. As a context manager it stops everything that it has started.

    `folder` keeps the logs, Flower's own files and, with `database`, the state from which a SuperLink can be restarted.
    """

    folder: Path
    database: bool = False
    tls: Tls | None = None
    authenticate: bool = False  # whether nodes need a registered key
    simulation: bool = False  # Ray in the place of nodes
    link: Process | None = None
    nodes: list[Process] = field(default_factory=list)
    port: int = 0
    guard: Guard | None = None  # inside the context

    def __enter__(self) -> Self:
        self.folder = self.folder.absolute()
        self.home.mkdir(parents=True, exist_ok=True)
        self.guard = Guard()
        try:
            self.start_link()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop everything that was started, nodes first."""
        stop([one for one in (self.link, *self.nodes) if one is not None])
        if self.guard is not None:
            self.guard.release()
            self.guard = None

    def _guard(self, process: Process) -> Process:
        if self.guard is not None:
            self.guard.watch(process.id)
        return process

    @property
    def home(self) -> Path:
        """The folder of Flower's own files, apart from those of the user's Flower."""
        return self.folder / "flower"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of all processes: no telemetry, no downloads, no installs, and Ray on loopback."""
        return {
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }

    def start_link(self) -> Process:
        """Start the SuperLink, or restart it on the same port and database."""
        self.port = self.port or free_ports(1)[0]
        command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation"]
        if self.tls is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-ca-certfile", str(self.tls.authority)]
            command += ["--ssl-certfile", str(self.tls.certificate), "--ssl-keyfile", str(self.tls.key)]
        command += ["--enable-supernode-auth"] if self.authenticate else []
        command += ["--simulation"] if self.simulation else []
        command += ["--database", str(self.folder / "superlink.db")] if self.database else []
        table: dict[str, Any] = {"address": f"127.0.0.1:{self.port}"}
        table |= {"insecure": True} if self.tls is None else {"root-certificates": str(self.tls.authority)}
        lines = [f"{key} = {toml(value)}" for key, value in table.items()]
        head = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]'
        write_atomically(self.home / "config.toml", "\n".join([head, *lines, ""]).encode())
        log = self.folder / "superlink.log"
        self.link = self._guard(Process("SuperLink", command, log, self.environment))
        wait_for_port(self.link, self.port)
        return self.link

    def start_node(
        self,
        config: Mapping[str, Any],
        key: Path | None = None,
        *,
        insecure: bool | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a SuperNode with this node config."""
        number = len(self.nodes)
        (port,) = free_ports(1)
        command = [program("flower-supernode"), "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--node-config", " ".join(f"{name}={toml(value)}" for name, value in config.items())]
        if self.tls is None or insecure:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self.tls.authority)]
        command += ["--auth-supernode-private-key", str(key)] if key else []
        log = self.folder / f"supernode-{number}.log"
        node = Process(f"SuperNode {number}", command, log, {**self.environment, **(environment or {})})
        self.nodes.append(self._guard(node))
        return node

    def _track(self) -> None:
        for process in (self.link, *self.nodes):
            if process is not None:
                process.track()

    def register(self, public_key: Path) -> None:
        """Register a node's key, so that the node may take part."""
        self.flwr("supernode", "register", str(public_key), CONNECTION)

    def submit(
        self,
        app: Path,
        run_config: Mapping[str, Any] | None = None,
        federation_config: Mapping[str, Any] | None = None,
    ) -> int:
        """Start a run of an app folder and return its id; `federation_config` is for a simulation."""
        arguments = ["run", str(app.absolute()), CONNECTION, "--format", "json"]
        for flag, changes in (("--run-config", run_config), ("--federation-config", federation_config)):
            if changes:
                arguments += [flag, " ".join(f"{key}={toml(value)}" for key, value in changes.items())]
        run = int(self.flwr(*arguments)["run-id"])
        self._track()
        return run

    def status(self, run: int) -> str:
        """Flower's status of a run: `running`, `finished:completed`, `finished:failed`, ..."""
        self._track()
        found: str = self.flwr("list", CONNECTION, "--run-id", str(run), "--format", "json")["runs"][0][
            "status"
        ]
        return found

    def wait(self, run: int, seconds: float) -> str:
        """Wait for the end of a run, at most this long, and return its status."""
        end = time.monotonic() + seconds
        while True:
            status = self.status(run)
            if status.startswith(FINISHED) or time.monotonic() >= end:
                return status
            time.sleep(3.0)

    def log(self, run: int) -> str:
        """The log of a run's ServerApp so far."""
        return self._run("log", str(run), CONNECTION, "--show").stdout

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run one of Flower's own commands and return the JSON that it prints, if any."""
        done = self._run(*arguments)
        start = done.stdout.find("{")
        answer: dict[str, Any] = json.JSONDecoder().raw_decode(done.stdout[start:])[0] if start >= 0 else {}
        if done.returncode != 0 or answer.get("success") is False:
            reason = " ".join((answer.get("error-message") or done.stderr or done.stdout).split())
            raise SettingError(f"flwr {arguments[0]} failed: {reason[-300:]}")
        return answer

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program("flwr"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
            env=environment_of(self.environment),
            cwd=self.folder,
        )


def node_configs(count: int, folder: Path, speeds: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """Make the node configs of this many devices, each with a state folder of its own."""
    configs: list[dict[str, Any]] = [
        {
            "partition-id": device,
            "num-partitions": count,
            "state-dir": str(folder.absolute() / f"node-{device}"),
        }
        for device in range(count)
    ]
    for config, speed in zip(configs, speeds or (), strict=bool(speeds)):
        config["speed"] = speed
    return configs
