"""What a run of the benchmark writes down: every measurement, and the machine that it was measured on.

The best that the machine can do, multiplying matrices and copying memory, tells how far a measurement is from it.
"""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel

from fedpmt import kernels

if TYPE_CHECKING:
    from collections.abc import Callable


SIDE = 2048
GIB = 2**30


class Machine(BaseModel):
    """What a reader needs to judge the numbers."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    torch: str
    blas: str


class Peak(BaseModel):
    """Best rates found, on all cores."""

    gflops: float  # fp32 matrix product, 1 multiply-add = 2 flops
    copy_gb_per_second: float  # bytes copied, counted once


def describe() -> Machine:
    """This machine; no names or paths of it."""
    return Machine(
        cpu=_cpu(),
        cores=cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=version("torch"),
        blas="MKL" if "BLAS_INFO=mkl" in torch.__config__.show() else "other",
    )


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def measure_peak(*, side: int = SIDE, copy_bytes: int = 2**28, seconds: float = 1.5) -> Peak:
    """The best of as many tries as fit in the time, each on all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        left, right = torch.rand(side, side), torch.rand(side, side)
        product = torch.empty(side, side)
        source = torch.rand(copy_bytes // 4)
        target = torch.empty_like(source)
        # PyTorch has two libraries of products, and on some processors one of them leaves vector units unused.
        multiply = min(
            best(lambda: torch.mm(left, right, out=product), seconds / 2),
            best(lambda: faster_product(left, right), seconds / 2),
        )
        copy = best(lambda: target.copy_(source), seconds / 2)
    finally:
        torch.set_num_threads(threads)
    return Peak(gflops=2 * side**3 / multiply / 1e9, copy_gb_per_second=copy_bytes / copy / 1e9)


def faster_product(left: torch.Tensor, right: torch.Tensor) -> None:
    """Left times the transpose of right, as linear layers of users' modules are computed."""
    with kernels.faster():
        torch.nn.functional.linear(left, right)


def best(work: Callable[[], object], seconds: float) -> float:
    """The shortest time of a piece of work, after one try that does not count."""
    work()
    shortest = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or shortest == float("inf"):
        begun = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - begun)
    return shortest


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
