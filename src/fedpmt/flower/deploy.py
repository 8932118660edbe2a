"""Deploy a run on this machine: write the app, start processes, watch the rounds, stop everything.

app/        the Flower app, which `flwr run` runs too
run/        the records, as of any run
nodes/      what devices keep between rounds, one folder each
processes/  logs, and Flower's own files
"""

from __future__ import annotations

import importlib.util
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt import records
from fedpmt.api import method_of
from fedpmt.devices.fleet import make_fleet
from fedpmt.flower.deployment import (
    Deployment,
    check_deployable,
    check_promise,
    make_deployment,
    read_app,
    read_start,
    refuse_simulated,
    write_app,
)
from fedpmt.flower.loopback import FINISHED, Loopback, node_configs
from fedpmt.records import RunRecord, read_rounds, read_run
from fedpmt.simulation.runner import is_finished
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fedpmt.records import RoundRecord
    from fedpmt.settings import Settings

LOOK_SECONDS = 0.5
STATUS_SECONDS = 15.0
"""Asking Flower for a run's status takes a second of a core; the records tell everything else."""

SMALL: dict[str, Any] = {"devices": 5, "rounds": 10}
"""Defaults of a deployment: as many devices as one machine can start as processes."""


@dataclass(frozen=True)
class Places:
    """Where a deployment's files are."""

    folder: Path

    @property
    def app(self) -> Path:
        """The Flower app."""
        return self.folder / "app"

    @property
    def run(self) -> Path:
        """The records."""
        return self.folder / "run"

    @property
    def nodes(self) -> Path:
        """What devices keep between rounds."""
        return self.folder / "nodes"

    @property
    def processes(self) -> Path:
        """Logs and Flower's own files."""
        return self.folder / "processes"


def split_settings(
    places: Places, given: dict[str, Any], typed: dict[str, Any], *, resume: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell the run's settings from the deployment's: typed, else from the settings file, else as the app has them."""
    own = set(Deployment.model_fields) - {"out", "resume"}
    before: dict[str, Any] = {}
    if resume and (places.app / "pyproject.toml").exists():
        before = {key: value for key, value in read_app(places.app).items() if key in own}
    of_file = {key: value for key, value in given.items() if key in own}
    flags = {key: value for key, value in typed.items() if value is not None}
    return {key: value for key, value in given.items() if key not in own}, {**before, **of_file, **flags}


def write(places: Places, settings: Settings, changes: dict[str, Any], *, resume: bool) -> None:
    """Write the app folder; one that holds a run already is only changed by a resume."""
    if importlib.util.find_spec("flwr") is None:
        raise SettingError("Flower is not installed: pip install 'fedpmt[flower]'")
    refuse_simulated(settings)
    deployment = make_deployment({**changes, "out": str(places.run.absolute()), "resume": resume})
    check_deployable(method_of(settings), settings, deployment)
    if (places.run / records.CONFIG).exists() and not resume:
        raise SettingError(
            f"out = '{places.folder}' already holds a run; continue it with --resume or name another folder"
        )
    read_start(places.run, deployment)
    check_promise(places.run, settings)
    write_app(places.app, settings, deployment)


def deploy_here(
    places: Places,
    settings: Settings,
    on_start: Callable[[], None],
    on_round: Callable[[RoundRecord], None],
) -> RunRecord:
    """Run a written app on a SuperLink and SuperNodes of this machine, and stop them whatever happens."""
    if is_finished(places.run, settings):
        return read_run(places.run)
    # One of fewer rounds would end the watch below.
    (places.run / records.RESULT).unlink(missing_ok=True)
    fleet = make_fleet(settings)
    speeds = [float(speed) for speed in fleet.speeds]
    with exit_on_signals(), Loopback(places.processes) as federation:
        for config in node_configs(settings.devices, places.nodes, speeds):
            federation.start_node(config)
        done = len(read_rounds(places.run / records.ROUNDS))
        run = federation.submit(places.app)
        on_start()
        watch(federation, run, places.run, done, on_round)
    return read_run(places.run)


def replay_here(folder: Path) -> RunRecord:
    """Play the recorded arrivals of a deployment in the simulator.

    Raises:
        SettingError: The weights are not those of the deployment.
    """
    from fedpmt.flower.replaying import replay

    with tempfile.TemporaryDirectory() as temporary:
        replayed = replay(folder, Path(temporary) / "replay")
    deployed = read_run(folder).result
    if (
        deployed is None
        or replayed.result is None
        or deployed.weights_sha256 != replayed.result.weights_sha256
    ):
        raise SettingError(f"the replay of '{folder}' has ended with other weights")
    return replayed


def watch(
    federation: Loopback, run: int, folder: Path, done: int, on_round: Callable[[RoundRecord], None]
) -> None:
    """Report rounds as they are written down, until the result is there or Flower has given up."""
    asked = time.monotonic()
    ended = ""
    while True:
        for record in read_rounds(folder / records.ROUNDS):
            if record.round > done:
                on_round(record)
                done = record.round
        if (folder / records.RESULT).exists():
            return
        if ended:
            raise ChildProcessError(f"the run has ended as {ended}; {find_error(federation.log(run))}")
        if time.monotonic() - asked > STATUS_SECONDS:
            status = federation.status(run)
            ended = status if status.startswith(FINISHED) else ""
            asked = time.monotonic()
        time.sleep(LOOK_SECONDS)


def find_error(log: str) -> str:
    """The line of a log that says what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["its log is empty"])[-1]


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that they stop what was started too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
