"""What is loaded, and when: commands that need no torch answer at once, a run's folder comes first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from command_line import TINY, python

if TYPE_CHECKING:
    from pathlib import Path

WITHOUT = """
import sys
import fedpmt.cli
code = fedpmt.cli.main.__globals__["program"](sys.argv[2:])
heavy = [name for name in sys.argv[1].split(",") if name in sys.modules]
sys.exit(f"loaded {heavy}" if heavy else code)
"""

FIRST_TORCH = """
import os
import sys
from pathlib import Path

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "mlxtend"):
            print("first", name, "config there", (Path(sys.argv[1]) / "config.json").exists(), flush=True)
            os._exit(0)
        return None

sys.meta_path.insert(0, Watch())
from fedpmt.cli.main import program

program(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("run", "--help"),
        ("methods",),
        ("run", "--method", "nope"),
    ],
)
def test_no_torch_where_none_is_needed(arguments: tuple[str, ...]) -> None:
    """Help, the list of methods and a refusal are quick: torch is not loaded for them."""
    ended = python(WITHOUT, "torch,matplotlib,mlxtend", *arguments)
    assert "loaded" not in ended.stderr
    assert ended.returncode == (2 if arguments[-1] == "nope" else 0), ended.stderr


def test_a_run_does_without_the_compiler_of_torch(tmp_path: Path) -> None:
    """It takes two seconds to load, more than all of the rest of torch."""
    ended = python(
        WITHOUT, "torch._dynamo,sympy,matplotlib", "run", *TINY, "--rounds", "1", "--out", tmp_path / "run"
    )
    assert ended.returncode == 0, ended.stderr


def test_the_folder_is_written_before_torch_is_loaded(tmp_path: Path) -> None:
    """A run killed while torch loads can already be resumed."""
    out = tmp_path / "run"
    ended = python(FIRST_TORCH, out, "run", *TINY, "--rounds", "1", "--out", out)
    assert ended.stdout == "first torch config there True\n", ended.stderr
    assert json.loads((out / "config.json").read_bytes())["settings"]["rounds"] == 1
