"""What Flower's programs are started with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fedpmt.flower.processes import environment_of, program

if TYPE_CHECKING:
    import pytest


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
