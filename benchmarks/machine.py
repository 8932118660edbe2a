"""The machine that was measured on, and the best it can do: multiply matrices and copy memory."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel

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
        multiply = best(lambda: torch.mm(left, right, out=product), seconds)
        copy = best(lambda: target.copy_(source), seconds / 2)
    finally:
        torch.set_num_threads(threads)
    return Peak(gflops=2 * side**3 / multiply / 1e9, copy_gb_per_second=copy_bytes / copy / 1e9)


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
