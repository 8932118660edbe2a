"""Ours: the real loop, `fedpmt.api.run_in`, with its records and checkpoints.

A round is what lies between two calls of `on_round`. The last round is not timed, since it is evaluated.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.common import Stopwatch, read_job, say_done

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.peers.common import Job
    from fedpmt.records import RoundRecord
    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem

BEGUN = time.perf_counter()
UNKNOWN = "unknown_module"
"""Asks for the net inside a module of a user's own: no chain of known layers, so autograd runs it."""

INITIAL_SEED = 0
"""Of the weights that `benchmarks.export` writes for the peers."""


def steps_of(record: RoundRecord, batch: int, epochs: int) -> int:
    """SGD steps of the devices whose replies counted."""
    return sum(
        epochs * math.ceil(device.samples / batch) for device in record.devices if device.outcome == "arrived"
    )


def peak_mib() -> float:
    """The most memory this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def problem_of(settings: Settings, job: Job) -> Problem:
    """The paper's task, or its net with other widths on the same data.

    Its weights are those that every peer begins with, whatever the seed of this repetition: accuracies
    then differ by who was asked and in which order, and by nothing else.
    """
    from fedpmt.api import paper_problem_of
    from fedpmt.models.build import build
    from fedpmt.models.layered import layered
    from fedpmt.models.nets import net
    from fedpmt.seeds import generator
    from fedpmt.simulation.problem import Problem

    problem = paper_problem_of(settings.model_copy(update={"seed": INITIAL_SEED}))
    if job.options.get(UNKNOWN):
        layers = [f"net.{layer.name}" for layer in problem.model.structure.layers]
        model = layered(own_module(problem.model.module), layers=layers)
        return Problem(model, problem.data, net=problem.net)
    if job.hidden == net(settings.task).hidden:
        return problem
    scaled = dataclasses.replace(net(settings.task), hidden=job.hidden)
    return Problem(build(scaled, generator(INITIAL_SEED, "init")), problem.data, net=scaled)


def own_module(net: nn.Module) -> nn.Module:
    """The net as a user's own class, whose forward pass is only known to itself."""
    from torch import nn

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.net(inputs)
            return outputs

    return Own()


def main() -> None:
    """A run as any user starts it, evaluated once, at its end."""
    from fedpmt.api import Request, method_of, settings_of, start

    job = read_job()
    given: dict[str, Any] = {
        "cohort": job.cohort,
        "batch": job.batch,
        "epochs": job.epochs,
        "lr": job.lr,
        "rounds": job.rounds,
        "seed": job.seed,
        "eval_every": job.rounds,
        **{key: value for key, value in job.options.items() if key != UNKNOWN},
    }
    settings = settings_of(given)
    watch = Stopwatch(job.warmup)
    started: list[float] = []
    rounds: list[RoundRecord] = []

    def on_start() -> None:
        started.append(time.perf_counter() - BEGUN)
        watch.restart()

    def on_round(record: RoundRecord) -> None:
        rounds.append(record)
        if record.round < job.rounds:
            watch.lap()

    with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as folder:
        request = Request(settings, method_of(settings), lambda: problem_of(settings, job))
        result = start(request, Path(folder) / "run", on_round=on_round, on_start=on_start).result
    if result is None:
        raise RuntimeError("the run did not finish")
    say_done(
        steps=sum(steps_of(record, job.batch, job.epochs) for record in rounds) / len(rounds),
        accuracy=result.accuracy,
        packages=["fedpmt", "torch", "numpy"],
        operations=[record.operations for record in rounds[job.warmup : -1]],
        startup_seconds=started[0],
        peak_mib=peak_mib(),
    )


if __name__ == "__main__":
    main()
