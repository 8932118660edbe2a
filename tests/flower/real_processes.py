"""Runs on Flower's own processes on the loopback interface, and what they are compared with."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.flower.deployment import Deployment, write_app
from fedpmt.records import ROUNDS, RunRecord, read_rounds, read_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.flower.loopback import Loopback

HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(api.__file__).parents[1]), str(HERE)])
"""Flower's processes are to import the package that is tested here, and the bad node's app."""

METHODS = ("fedpmt", "fedavg", "feddrop", "scaffold", "heterofl")
RUN_SECONDS = 600.0


def written(folder: Path, given: dict[str, Any], **deployment: Any) -> Path:
    """An app folder; its records go to `folder`/run."""
    own = Deployment(out=str(folder / "run"), **deployment)
    write_app(folder / "app", api.settings_of(given), own)
    return folder / "app"


def finished(federation: Loopback, run: int, folder: Path, seconds: float = RUN_SECONDS) -> RunRecord:
    """The records of a run that has completed."""
    status = federation.wait(run, seconds)
    assert status == "finished:completed", federation.log(run)[-3000:]
    return read_run(folder / "run")


def simulated(folder: Path, given: dict[str, Any]) -> str:
    """The weights that the simulator's plain executor ends with."""
    return digest(api.run(out=folder / "simulated", **given))


def digest(run: RunRecord) -> str:
    assert run.result is not None
    return run.result.weights_sha256


def until(holds: Callable[[], bool], seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def rounds_done(folder: Path) -> int:
    return len(read_rounds(folder / "run" / ROUNDS))


def left_of(port: int) -> list[int]:
    """What is left of a SuperLink on this port, its nodes and all that they have started."""
    return processes(f"127.0.0.1:{port} ") + processes(f"--port {port} ")


def processes(text: str) -> list[int]:
    """The processes whose command line has this text in it, defunct ones left out."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,stat=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [
        int(row[0]) for row in rows if len(row) == 3 and text in f"{row[2]} " and not row[1].startswith("Z")
    ]
