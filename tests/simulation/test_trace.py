"""How much code one round runs through: what a newcomer has to read to follow it."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedpmt
from fedpmt import api, kernels
from fedpmt.simulation.assemble import assemble
from fedpmt.simulation.loop import Federation

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(fedpmt.__file__).parent
FUNCTIONS, FILES = (90, 20) if kernels.available() else (131, 26)
"""Without a compiler autograd trains, and its loop, the cut model and the optimizer come on top."""


def trace(folder: Path, **given: Any) -> set[tuple[str, str]]:
    """File and name of every function of the package that the second round runs; comprehensions are none."""
    settings = api.settings_of({"method": "fedpmt", "workers": 1, **given})
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and not code.co_name.startswith("<") and path.is_relative_to(ROOT):
            found.add((str(path.relative_to(ROOT)), code.co_qualname))

    # Workers are threads that start in the first round.
    threading.setprofile(note)
    try:
        with assemble(
            settings, api.paper_problem_of(settings), api.method_of(settings), folder
        ) as federation:
            progress, _ = federation.play(federation.start())
            found.clear()
            sys.setprofile(note)
            federation.play(progress)
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def test_one_round_runs_through_few_functions_in_few_files(tmp_path: Path) -> None:
    found = trace(tmp_path)
    files = {file for file, _ in found}
    assert ("simulation/loop.py", "Federation.play") in found
    assert ("training/loop.py", "conclude") in found  # workers are seen too
    assert len(found) <= FUNCTIONS, sorted(found)
    assert len(files) <= FILES, sorted(files)


def test_a_round_fits_on_one_screen() -> None:
    assert len(inspect.getsource(Federation.play).splitlines()) <= 40
