"""All parts of the benchmark one after another: each once, kept when it is complete, and all shown on the pages."""

from __future__ import annotations

import shutil
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

UNPUBLISHED = ("threads",)
"""What other parts read and no page shows."""


@dataclass(frozen=True)
class Part:
    """One part: a command of its own, which writes one JSON file."""

    name: str  # of its file
    command: tuple[str, ...]
    needs_data: bool = True  # whether it takes --data-dir
    quick: tuple[str, ...] = ()  # what makes it short
    after: str = ""  # the part whose ways of using the cores it takes


PARTS = (
    Part("threads", ("threads",)),
    Part("compare", ("run", "--repeat", "3"), quick=("--quick",), after="threads"),
    Part("models", ("models", "--repeat", "3"), quick=("--quick",), after="compare"),
    Part("own", ("own", "--repeat", "3", "--rounds", "8"), quick=("--repeat", "1", "--rounds", "2")),
    Part("aggregation", ("aggregation",), needs_data=False, quick=("--parameters", "1000000", "--repeat", "1")),
    Part("scale", ("scale", "--repeat", "3"), needs_data=False, quick=("--quick", "--repeat", "1")),
    Part("methods", ("methods", "--repeat", "3"), quick=("--repeat", "1", "--rounds", "2")),
    Part("events", ("events", "--repeat", "3"), quick=("--repeat", "1", "--replies", "20")),
    Part("cluster", ("cluster", "--repeat", "3"), needs_data=False, quick=("--repeat", "1", "--small")),
)  # fmt: skip
NAMES = tuple(part.name for part in PARTS)


def arguments_of(part: Part, folder: Path, out: Path, *, quick: bool, data_dir: Path | None) -> list[str]:
    """Write the command line of a part; what comes last of an option counts."""
    made = [*part.command, *(part.quick if quick else ()), "--out", str(out)]
    if part.needs_data and data_dir is not None:
        made += ["--data-dir", str(data_dir)]
    if part.after and (folder / f"{part.after}.json").exists():
        made += ["--ways", str(folder / f"{part.after}.json")]
    return made


def run(
    start: Callable[[list[str]], int],
    folder: Path,
    names: Sequence[str] = NAMES,
    *,
    again: Sequence[str] = (),
    quick: bool = False,
    data_dir: Path | None = None,
) -> list[str]:
    """Make the parts that are missing in a folder.

    A part is written under another name until it is complete, so a run that was killed repeats only the part that it
    was at. A part that fails does not keep the others from being measured.

    Args:
        start: Runs a command line of the benchmark and returns its exit code.
        folder: Where the parts' files are kept.
        names: The parts to make.
        again: Parts to make even if they are there.
        quick: Whether to make all parts short.
        data_dir: The folder of the data sets.

    Returns:
        The names of the parts that failed.
    """
    failed = []
    for part in PARTS:
        final = folder / f"{part.name}.json"
        if part.name not in names or (final.exists() and part.name not in again):
            continue
        print(f"== {part.name}", file=sys.stderr, flush=True)
        partial = folder / "partial" / final.name
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            code = start(arguments_of(part, folder, partial, quick=quick, data_dir=data_dir))
        except Exception:
            traceback.print_exc()
            code = 1
        if code or not partial.exists():
            failed.append(part.name)
            continue
        partial.replace(final)
    return failed


def publish(folder: Path, docs: Path) -> list[Path]:
    """Copy the complete parts that pages show to the documentation; returns their new places."""
    target = docs / "benchmarks"
    target.mkdir(parents=True, exist_ok=True)
    there = [folder / f"{name}.json" for name in NAMES if name not in UNPUBLISHED]
    return [shutil.copyfile(file, target / file.name) for file in there if file.exists()]
