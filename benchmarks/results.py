"""What a run of the benchmark writes down: every measurement, and what is needed to understand it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from benchmarks.machine import Machine, Peak

if TYPE_CHECKING:
    from pathlib import Path


class Measurement(BaseModel):
    """One process of one peer: some rounds of one setting."""

    setting: str
    peer: str
    variant: str  # the method and its local epochs
    repetition: int
    threads: str  # how the peer used the cores
    seconds: list[float] = []  # of each round after the warm-up
    rounds: int = 0  # in all
    steps: float | None = None  # SGD steps a round, as the peer counted them
    accuracy: float | None = None  # on the test set, after all rounds
    versions: dict[str, str] = {}
    operations: list[float] = []  # `exact` multiply-adds of each timed round; ours only
    peak_mib: float | None = None
    path: str | None = None  # compiled, autograd or mixed, as the run recorded it; ours only
    cut_off: bool = False  # a round took longer than the limit
    error: str | None = None


class Tried(BaseModel):
    """The ways of using the cores that were tried for a peer, and the median round of each."""

    setting: str
    peer: str
    seconds: dict[str, float | None]  # None: cut off, or it failed
    chosen: str


class Results(BaseModel):
    """One run of the benchmark."""

    format: int = 1
    machine: Machine
    peaks: list[Peak] = []  # one per repetition
    limit_seconds: float
    settings: dict[str, dict[str, Any]]
    threads: list[Tried] = []
    measurements: list[Measurement] = []

    def write(self, path: Path) -> None:
        """Replace the file; it is written after each measurement, so that nothing is lost."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read back what `write` has written."""
        return cls.model_validate_json(path.read_bytes())
