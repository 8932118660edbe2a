"""What must hold of every registered method: the contract of `fedpmt.testing`, and a little more."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fedpmt.methods.registry import METHODS, create
from fedpmt.testing import CHECKS, Subject
from fedpmt.testing.federations import learns_with_default_settings
from support import STAGES

SHARED = {"depths": None, "splitting": "server"}
ROUNDS = {"fjord": 24, "comet": 80, "fedgkt": 6, "prunefl": 24}
"""That a method needs to get off the ground, where narrow nets learn little at first, or one device is alone."""

ALONE = ("comet",)
"""Methods whose devices learn by themselves, a few steps each time they are asked: that takes a minute."""

TOGETHER: dict[str, dict[str, Any]] = {"prunefl": {"initial_rounds": 0, "interval": 1}}
"""What lets several devices reply from the first round on."""

QUICK: dict[str, dict[str, Any]] = {"feddf": {"steps": 20}}
"""What spares time on a bench, where a server without a cap would work for long."""

NO_FEDAVG = {"comet", "fedgkt", "flexlora"}
"""Methods that do not average weights, and so are FedAvg under no settings; their own tests have their reductions."""


def subject(name: str, *, quick: bool = True) -> Subject:
    options = QUICK.get(name, {}) if quick else {}
    together, early = (
        create(name, table[name], SHARED) if name in table else None for table in (TOGETHER, STAGES)
    )
    return Subject(create(name, options, SHARED), together, early, ROUNDS.get(name, 12))


def cases() -> list[Any]:
    """Every check of every method."""
    found = []
    for name in METHODS:
        for check in CHECKS:
            slow = [pytest.mark.slow] if name in ALONE and check is learns_with_default_settings else []
            found.append(pytest.param(name, check, id=f"{name}-{check.__name__}", marks=slow))
    return found


@pytest.mark.parametrize(("name", "check"), cases())
def test_keeps_the_contract(name: str, check: Any) -> None:
    check(subject(name, quick=check is not learns_with_default_settings))


def test_only_these_are_fedavg_under_no_settings() -> None:
    assert {name for name in METHODS if create(name, {}, SHARED).neutral() is None} == NO_FEDAVG


def test_files_of_methods_load_no_torch() -> None:
    """Settings are refused before torch is loaded, and hooks stand in the same files."""
    modules = sorted({module for module, _ in METHODS.values()})
    program = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n"
    program += "    assert 'torch' not in sys.modules, name\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
