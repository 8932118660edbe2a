"""What every peer's script shares: the job it reads, the shards all have in common, and the lines it prints.

Runs in the environment of any peer, so it needs nothing but NumPy.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Job:
    """What a peer is asked to compute: some rounds of federated averaging, evaluated after the last."""

    data: str  # folder written by `benchmarks.export`
    cohort: int
    batch: int
    epochs: int
    lr: float
    rounds: int  # in all, with those of the warm-up
    warmup: int
    filters: tuple[int, ...] = ()  # of a chain, as are the hidden layers
    hidden: tuple[int, ...] = ()
    module: str = ""  # the name of a user's class instead of a chain, see `benchmarks.peers.modules`
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # the peer's own, such as threads

    def dump(self) -> str:
        """Write the job as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Job:
        """Read a line written by `dump`."""
        given = json.loads(text)
        return cls(**{**given, "filters": tuple(given["filters"]), "hidden": tuple(given["hidden"])})


class Shards:
    """The same arrays for all: mapped, so that several processes hold them once."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def _array(self, name: str) -> np.ndarray:
        array: np.ndarray = np.load(self._folder / f"{name}.npy", mmap_mode="r")
        return array

    @cached_property
    def split(self) -> np.ndarray:
        """Rows of the training set that each device holds, devices x samples."""
        return self._array("split")

    @cached_property
    def _inputs(self) -> np.ndarray:
        return self._array("inputs")

    @cached_property
    def _labels(self) -> np.ndarray:
        return self._array("labels")

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.split)

    def shard(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (of images, channels first) and labels of one device."""
        rows = self.split[device]
        return self._inputs[rows], self._labels[rows]

    def training(self) -> tuple[np.ndarray, np.ndarray]:
        """The training set of all devices together."""
        return np.array(self._inputs), np.array(self._labels)

    def test(self) -> tuple[np.ndarray, np.ndarray]:
        """The test set."""
        return np.array(self._array("test_inputs")), np.array(self._array("test_labels"))

    @cached_property
    def initial(self) -> list[np.ndarray]:
        """The tensors all begin with, in the order of the net's state_dict, as PyTorch lays them out."""
        count = len(list(self._folder.glob("initial_*.npy")))
        return [np.array(self._array(f"initial_{number}")) for number in range(count)]


def read_job() -> Job:
    """The job named on the command line."""
    return Job.load(Path(sys.argv[1]).read_text(encoding="utf-8"))


def say_round(number: int, seconds: float) -> None:
    """Report how long a round took; the benchmark cuts off a peer that is silent for too long."""
    print(json.dumps({"round": number, "seconds": seconds}), flush=True)


def say_done(*, steps: float, accuracy: float | None, packages: list[str], **more: Any) -> None:
    """Report what was reached. `steps` is the mean number of SGD steps a round, as counted, not as planned."""
    versions = {name: version(name) for name in packages if _installed(name)}
    print(json.dumps({"steps": steps, "accuracy": accuracy, "versions": versions, **more}), flush=True)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False  # ours, run from its source folder
    return True


class Stopwatch:
    """Seconds from one call to the next; rounds of the warm-up have numbers up to 0."""

    def __init__(self, warmup: int) -> None:
        self._number = -warmup
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Start the current lap again."""
        self._last = time.perf_counter()

    def lap(self) -> None:
        """Report a round that has just ended."""
        now = time.perf_counter()
        self._number += 1
        say_round(self._number, now - self._last)
        self._last = time.perf_counter()
