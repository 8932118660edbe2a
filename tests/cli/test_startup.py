"""What is loaded, and when: commands that need no torch answer at once, a run's folder comes first."""

from __future__ import annotations

import json
import resource
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
        ("methods", "fedpmt"),
        ("init", "-"),
        ("run", "--method", "nope"),
    ],
)
def test_no_torch_where_none_is_needed(arguments: tuple[str, ...]) -> None:
    """Help, the list of methods and a refusal are quick: torch is not loaded for them."""
    ended = python(WITHOUT, "torch,matplotlib,mlxtend", *arguments)
    assert "loaded" not in ended.stderr
    assert ended.returncode == (2 if arguments[-1] == "nope" else 0), ended.stderr


def processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_takes_little_processor_time() -> None:
    """Real time says nothing on a machine that does other work, too."""
    before = processor_seconds()
    ended = python("from fedpmt.cli import main; main(['--help'])")
    assert ended.returncode == 0, ended.stderr
    assert processor_seconds() - before < 0.5


def test_a_run_is_on_disk_soon_and_does_without_the_compiler_of_torch(tmp_path: Path) -> None:
    """The compiler takes more to load than all of the rest of torch, which is the measure: machines differ."""
    start = processor_seconds()
    assert python("import torch").returncode == 0
    before, out = processor_seconds(), tmp_path / "run"
    ended = python(WITHOUT, "torch._dynamo,sympy,matplotlib", "run", "--rounds", "1", "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert (out / "result.json").exists()
    assert processor_seconds() - before < 2.5 * (before - start)


def test_the_folder_is_written_before_torch_is_loaded(tmp_path: Path) -> None:
    """A run killed while torch loads can already be resumed."""
    out = tmp_path / "run"
    ended = python(FIRST_TORCH, out, "run", *TINY, "--rounds", "1", "--out", out)
    assert ended.stdout == "first torch config there True\n", ended.stderr
    assert json.loads((out / "config.json").read_bytes())["settings"]["rounds"] == 1
