"""What Flower's programs are started with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedpmt.flower.guard import start_time
from fedpmt.flower.processes import environment_of, program

if TYPE_CHECKING:
    from collections.abc import Callable


def test_flowers_programs_are_found_by_name_where_no_environment_is_activated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`.venv/bin/fedpmt deploy` from any shell: the SuperLink starts `flower-superexec` by its bare name."""
    monkeypatch.setenv("PATH", os.defpath)
    found = shutil.which("flower-superexec", path=environment_of({})["PATH"])
    assert found is not None
    assert Path(found).parent == Path(program("flower-superlink")).parent


def test_folders_of_modules_hold_in_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["here", str(tmp_path)]))
    assert environment_of({})["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "here"), str(tmp_path)])


STARTER = """
import subprocess, sys, time
from fedpmt.flower.guard import Guard

child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
child += "start_new_session=True); time.sleep(600)"
guard = Guard()
left = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
guard.watch(left.pid)
print(left.pid, flush=True)
sys.stdin.readline()
guard.release()
"""
"""Starts a program that starts another in a session of its own, as Flower does."""


def below(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    return [child for child, parent in rows if parent == process]


def gone(process: int) -> bool:
    """Ended, or a defunct entry that nobody has collected."""
    listed = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False
    )
    return listed.stdout.strip()[:1] in ("", "Z")


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_killed_program_has_started_is_stopped_and_what_it_released_is_not(killed: bool) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=pipe, stdout=pipe, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        until(lambda: len(below(child)) == 1)
        (grandchild,) = below(child)
        if killed:
            starter.send_signal(signal.SIGKILL)
        else:
            starter.stdin.write("\n")
            starter.stdin.flush()
        starter.wait(60)
    try:
        if killed:
            until(lambda: gone(child) and gone(grandchild))
        else:
            time.sleep(1.0)
            assert not gone(child)
            assert not gone(grandchild)
    finally:
        for process in (child, grandchild):
            if not gone(process):
                os.kill(process, signal.SIGKILL)


def test_a_process_is_known_by_when_it_began() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid()) != ""
    assert start_time(2**22 + 1) == ""  # above the largest id
