"""Aggregation alone: updates of a large model through our mean, against memory bandwidth and Flower's FedAvg."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from pydantic import BaseModel

from benchmarks.results import Machine, best, cores, describe
from benchmarks.runner import Way, environment, python_of
from fedpmt.aggregation import CoverageMean
from fedpmt.parts.part import WHOLE, Part

TENSORS = 10
PARAMETERS = 100_000_000
UPDATES = 10
FLOAT_BYTES = 4


class AggregationResults(BaseModel):
    """Seconds to average all updates once, each repetition listed."""

    machine: Machine
    parameters: int
    updates: int
    copy_seconds: list[float]  # one update through copy_, best number of threads, in turn with ours
    ours_by_threads: dict[str, list[float]]
    flower_seconds: list[float] = []
    flower_note: str = ""

    @property
    def bytes(self) -> int:
        """Of all updates."""
        return self.parameters * FLOAT_BYTES * self.updates

    @property
    def threads(self) -> str:
        """The number of threads that is best for ours; the round loop itself has one."""
        return min(self.ours_by_threads, key=lambda count: median(self.ours_by_threads[count]))

    @property
    def ours_seconds(self) -> list[float]:
        """With the best number of threads."""
        return self.ours_by_threads[self.threads]

    @property
    def ours_gb_per_second(self) -> float:
        """Bytes of updates folded in a second."""
        return self.bytes / median(self.ours_seconds) / 1e9

    @property
    def copy_gb_per_second(self) -> float:
        """Bytes copied in a second, counted once."""
        return self.parameters * FLOAT_BYTES / median(self.copy_seconds) / 1e9

    @property
    def share_of_copy(self) -> float:
        """Our rate over the machine's copy rate at the time: the median over repetitions."""
        pairs = zip(self.copy_seconds, self.ours_seconds, strict=True)
        return median(copied * self.updates / ours for copied, ours in pairs)

    @property
    def times_flower(self) -> float | None:
        """How many times longer Flower takes."""
        return median(self.flower_seconds) / median(self.ours_seconds) if self.flower_seconds else None


def aggregation_text(results: AggregationResults) -> str:
    """Describe the results in a paragraph."""
    flower = f"Flower: {results.flower_note or 'not measured'}."
    if results.times_flower is not None:
        flower = f"Flower's FedAvg takes {results.times_flower:.1f} times as long."
    return (
        f"{results.updates} updates of {results.parameters:,} parameters: {results.ours_gb_per_second:.1f} GB/s "
        f"with {results.threads} threads, "
        f"{results.share_of_copy:.0%} of the machine's copy rate ({results.copy_gb_per_second:.1f} GB/s). {flower}"
    )


def shape_of(parameters: int) -> tuple[int, int]:
    """The shape of each of the tensors that a model is made of.

    >>> shape_of(100_000_000)
    (10000, 1000)
    """
    return parameters // TENSORS // 1000, 1000


def run(
    *, parameters: int = PARAMETERS, updates: int = UPDATES, repeat: int = 5, flower: bool = True
) -> AggregationResults:
    """Ours and copying in this process, Flower in its own; the memory is given back in between."""
    copy, ours = _measure_ours(parameters, updates, repeat)
    results = AggregationResults(
        machine=describe(),
        parameters=parameters,
        updates=updates,
        copy_seconds=copy,
        ours_by_threads=ours,
    )
    if flower:
        seconds, note = _measure_flower(parameters, updates, repeat)
        results = results.model_copy(update={"flower_seconds": seconds, "flower_note": note})
    return results


def _model(parameters: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{n}": torch.rand(shape_of(parameters), generator=generator) for n in range(TENSORS)}


def _measure_ours(parameters: int, updates: int, repeat: int) -> tuple[list[float], dict[str, list[float]]]:
    weights = _model(parameters, 0)
    replies = [_model(parameters, 1 + number) for number in range(updates)]
    part = Part("global", dict.fromkeys(weights, WHOLE), dict.fromkeys(weights, WHOLE), "all")

    def average() -> float:
        begun = time.perf_counter()
        mean = CoverageMean(weights)
        for reply in replies:
            mean.add(part, reply, 300.0)
        mean.result()
        return time.perf_counter() - begun

    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in replies[0].items():
            target[name].copy_(tensor)

    before = torch.get_num_threads()
    ours: dict[str, list[float]] = {str(threads): [] for threads in sorted({1, cores()})}
    copies: list[float] = []
    try:
        average()
        for _ in range(repeat):
            # In turn, since the memory is shared with whoever else is on the machine.
            copied = []
            for threads, taken in ours.items():
                torch.set_num_threads(int(threads))
                copied.append(best(copy, 0.5))
                taken.append(average())
            copies.append(min(copied))
    finally:
        torch.set_num_threads(before)
    return copies, ours


def _measure_flower(parameters: int, updates: int, repeat: int) -> tuple[list[float], str]:
    python = python_of("flower")
    with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as folder:
        done = subprocess.run(
            [
                str(python),
                "-P",
                "-m",
                "benchmarks.peers.flower_aggregation",
                *map(str, (parameters, updates, repeat)),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=environment(Way(""), folder),
            cwd=Path(folder),
        )
    if done.returncode:
        return [], (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1][:300]
    return [float(word) for word in done.stdout.split()], ""
