"""Progress is shown on a terminal and in a notebook, as lines where it is asked for, and nowhere else."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import fedpmt

TINY: dict[str, Any] = {"rounds": 2, "devices": 5, "samples": 20, "cohort": 5, "batch": 10}


class ZMQInteractiveShell:
    """What a notebook's shell is called."""


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows below its cell, update by update."""
    shown: list[str] = []

    def display(html: str, display_id: bool) -> Any:
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    parts: dict[str, Any] = {
        "IPython": SimpleNamespace(get_ipython=ZMQInteractiveShell),
        "IPython.display": SimpleNamespace(HTML=str, display=display),
    }
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    return shown


def test_nothing_is_written_to_a_pipe_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    fedpmt.run(**TINY)
    assert capsys.readouterr() == ("", "")
    fedpmt.compare(["fedpmt", "fedavg"], progress=True, **TINY)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(",")[0] for line in err.splitlines()] == ["fedpmt", "fedavg"]
    assert all("round 2/2, accuracy " in line for line in err.splitlines())


def test_a_terminal_has_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fedpmt.run(progress=False, **TINY)
    assert capsys.readouterr() == ("", "")
    fedpmt.run(**TINY)
    out, err = capsys.readouterr()
    assert out == ""
    assert "━" in err
    assert "2/2" in err


def test_a_notebook_has_a_bar_with_the_score(cells: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = fedpmt.run(**TINY)
    assert len(cells) == 3
    assert '<progress value="2" max="2">' in cells[-1]
    assert f"2/2 accuracy {run.rounds[-1].score_text}, " in cells[-1]
    assert capsys.readouterr() == ("", "")
