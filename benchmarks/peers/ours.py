"""Ours: a run as any user starts it, with its records and checkpoints.

A round is what lies between two calls of `on_round`. The first one, which has the start in it, is of the warm-up.
The last one is not timed, since it is evaluated.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.common import Shards, Stopwatch, read_job, say_done

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.peers.common import Job
    from fedpmt.records import RoundRecord, RunRecord
    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem

INITIAL_SEED = 0
"""Of the weights that `benchmarks.export` writes for the peers."""


def steps_of(record: RoundRecord, batch: int, epochs: int) -> int:
    """Count the SGD steps of the devices whose replies counted."""
    return sum(
        epochs * math.ceil(device.samples / batch) for device in record.devices if device.outcome == "arrived"
    )


def peak_mib() -> float:
    """Find the most memory this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def problem_of(settings: Settings, job: Job) -> Problem:
    """Make the paper's task, or one with its net in other widths on the same data.

    Its weights are those that every peer begins with, whatever the seed of this repetition: accuracies
    then differ by who was asked and in which order, and by nothing else.
    """
    from fedpmt.api import paper_problem_of
    from fedpmt.models.build import build
    from fedpmt.models.nets import net
    from fedpmt.seeds import generator
    from fedpmt.simulation.problem import Problem

    problem = paper_problem_of(settings.model_copy(update={"seed": INITIAL_SEED}))
    if job.hidden == net(settings.task).hidden:
        return problem
    scaled = dataclasses.replace(net(settings.task), hidden=job.hidden)
    return Problem(build(scaled, generator(INITIAL_SEED, "init")), problem.data, net=scaled)


def run(job: Job, folder: Path, on_round: Callable[[RoundRecord], None]) -> RunRecord:
    """Run one of the paper's tasks, or a user's module by `fedpmt.run`; evaluated once, at its end."""
    given: dict[str, Any] = {
        "cohort": job.cohort,
        "batch": job.batch,
        "epochs": job.epochs,
        "lr": job.lr,
        "rounds": job.rounds,
        "seed": job.seed,
        "eval_every": job.rounds,
        **job.options,
    }
    if not job.module:
        from fedpmt.api import Request, method_of, settings_of, start

        settings = settings_of(given)
        request = Request(settings, method_of(settings), lambda: problem_of(settings, job))
        return start(request, folder, on_round=on_round)
    import fedpmt
    from benchmarks.peers.torch_net import build

    shards = Shards(job.data)
    model = build(job, shards.initial)
    return fedpmt.run(
        model=model, train=shards.training(), test=shards.test(), out=folder, on_round=on_round, **given
    )


def main() -> None:
    """Run the job and report its rounds."""
    job = read_job()
    watch = Stopwatch(job.warmup)
    rounds: list[RoundRecord] = []

    def on_round(record: RoundRecord) -> None:
        rounds.append(record)
        if record.round < job.rounds:
            watch.lap()

    with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as folder:
        result = run(job, Path(folder) / "run", on_round).result
    if result is None:
        raise RuntimeError("the run did not finish")
    say_done(
        steps=sum(steps_of(record, job.batch, job.epochs) for record in rounds) / len(rounds),
        accuracy=result.accuracy,
        packages=["fedpmt", "torch", "numpy"],
        operations=[record.operations for record in rounds[job.warmup : -1]],
        peak_mib=peak_mib(),
        path=result.path,
    )


if __name__ == "__main__":
    main()
