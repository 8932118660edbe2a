"""`fedpmt deploy` with real processes: it trains, resumes after a kill, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
from real_processes import digest, left_of, rounds_done, simulated, until

from fedpmt.records import read_run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.flower

RUN = {"method": "scaffold", "devices": 2, "samples": 20, "cohort": 2, "batch": 10, "rounds": 3, "lr": 0.1}
RUN |= {"levels": "1/2,1", "executor": "plain"}


def command(out: Path, *more: str) -> list[str]:
    flags = [text for key, value in RUN.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "fedpmt", "deploy", *flags, "--out", str(out), *more]


def port_of(out: Path) -> int:
    """The SuperLink's port, as Flower is told it."""
    config = tomllib.loads((out / "processes" / "flower" / "config.toml").read_text())
    return int(config["superlink"]["loopback"]["address"].rpartition(":")[2])


def deploy(out: Path, *more: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(out, *more), stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def test_ctrl_c_stops_everything_and_a_resume_has_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "deployment"
    with deploy(out) as running:
        until(lambda: rounds_done(out) >= 1)
        assert len(left_of(port_of(out))) >= 4  # the ServerApp too
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert f"continue with fedpmt deploy --resume --out {out}" in said
    assert left_of(port_of(out)) == []
    with deploy(out, "--resume", "--json") as resumed:
        printed, said = resumed.communicate(timeout=400)
    assert resumed.returncode == 0, said
    assert json.loads(printed.splitlines()[-1])["rounds"] == 3
    assert digest(read_run(out / "run")) == simulated(tmp_path, RUN)
    assert left_of(port_of(out)) == []


def test_a_sigkill_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "deployment"
    with deploy(out) as running:
        until(lambda: rounds_done(out) >= 1)
        port = port_of(out)
        assert len(left_of(port)) >= 4
        running.kill()
        running.communicate(timeout=60)
    until(lambda: left_of(port) == [], seconds=60)


def test_a_request_to_end_stops_everything_too(tmp_path: Path) -> None:
    out = tmp_path / "deployment"
    with deploy(out) as running:
        until(lambda: (out / "processes" / "supernode-1.log").exists() and len(left_of(port_of(out))) >= 3)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode == 130
    assert left_of(port_of(out)) == []
