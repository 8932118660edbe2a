"""Our own rounds: the time of each depth against `exact` pricing, of each stage, and of an evaluation."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel

from benchmarks.measure import Case, Plan, job_of
from benchmarks.page import table
from benchmarks.results import Machine, Measurement, Peak, describe, measure_peak
from benchmarks.runner import Way, measure, python_of
from benchmarks.settings import FEDAVG, Setting
from benchmarks.summary import best_peak, seconds_text, share_of_peak
from fedpmt.api import paper_problem_of, settings_of
from fedpmt.kernels.layout import own_net, shapes_of
from fedpmt.kernels.library import compiled
from fedpmt.parts.depth import suffixes
from fedpmt.parts.part import GLOBAL
from fedpmt.seeds import Seeds
from fedpmt.simulation.assemble import make_price
from fedpmt.training.batches import CPU, PlacedData
from fedpmt.training.local import Job, LocalWork, Site, local_settings
from fedpmt.training.loop import compiled_round, train
from fedpmt.training.messages import Task
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fedpmt.parts.part import Part
    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem


class DepthTime(BaseModel):
    """One depth of one net, relative to the full model."""

    setting: str
    epochs: int
    depth: int
    seconds: float  # of a device's local round on one core
    time: float  # over the full depth's
    operations: float  # `exact`, over the full depth's


class StageTime(BaseModel):
    """Where one device's round at full depth goes, in seconds on one core."""

    setting: str
    laid_out: float  # the weights, as the compiled code reads them
    trained: float
    handed_back: float  # what training changed


class EvaluationTime(BaseModel):
    """What evaluating the whole test set adds to a round."""

    setting: str
    round_seconds: float
    evaluated_seconds: float  # of a round that ends with an evaluation
    operations: float  # multiply-adds of the evaluation

    @property
    def share(self) -> float:
        """Of a round."""
        return self.evaluated_seconds / self.round_seconds - 1


class OwnResults(BaseModel):
    """One run of this part of the benchmark."""

    machine: Machine
    peaks: list[Peak] = []  # one per setting
    depths: list[DepthTime] = []
    stages: list[StageTime] = []
    evaluations: list[EvaluationTime] = []


def run(plan: Plan, *, epochs: Sequence[int] = (1, 5)) -> OwnResults:
    """Each setting's depths, then its evaluation; `plan.repeat` repetitions in turn."""
    results = OwnResults(machine=describe())
    for setting in plan.settings:
        results.peaks.append(measure_peak(seconds=plan.peak_seconds))
        for count in epochs:
            results.depths += depth_times(setting, count, plan)
        stages = stage_times(setting, plan)
        if stages is not None:
            results.stages.append(stages)
        results.evaluations.append(evaluation_time(setting, plan))
        print(f"{setting.name}: done", file=sys.stderr, flush=True)
    return results


def depth_times(setting: Setting, epochs: int, plan: Plan) -> list[DepthTime]:
    """A device's local round at every depth, as the simulator runs it, on one thread."""
    settings, problem = _problem(setting, epochs, plan)
    site = Site({GLOBAL: problem.model}, problem.objective, local_settings(settings), fast=True)
    weights = problem.model.initial()
    parts = suffixes(problem.model.structure, settings.depths or problem.depths)
    data = PlacedData(problem.data, CPU, images_last=True).shard(0)

    def once(part: Part) -> float:
        begun = time.perf_counter()
        train(
            LocalWork(),
            Job(site, Task((part,), {MODEL: weights}), part, None, data, partial(Seeds(0, 0), device=0)),
        )
        return time.perf_counter() - begun

    with _one_thread():
        once(parts[-1])
        seconds: list[list[float]] = [[] for _ in parts]
        for _ in range(plan.rounds * plan.repeat):
            for taken, part in zip(seconds, parts, strict=True):
                taken.append(once(part))
    price = make_price(settings, problem)
    full, most = median(seconds[-1]), price(parts[-1]).sustained
    return [
        DepthTime(
            setting=setting.name,
            epochs=epochs,
            depth=number,
            seconds=median(taken),
            time=median(taken) / full,
            operations=price(part).sustained / most,
        )
        for number, (taken, part) in enumerate(zip(seconds, parts, strict=True), start=1)
    ]


def stage_times(setting: Setting, plan: Plan) -> StageTime | None:
    """A device's round at full depth, stage by stage; None where there is no compiled code."""
    settings, problem = _problem(setting, 1, plan)
    site = Site({GLOBAL: problem.model}, problem.objective, local_settings(settings), fast=True)
    data = PlacedData(problem.data, CPU, images_last=True)
    weights = problem.model.initial()
    shapes = shapes_of(problem.model, weights, data.shard(0).inputs)
    if shapes is None:
        return None
    part = suffixes(problem.model.structure, settings.depths or problem.depths)[-1]
    task, net = Task((part,), {MODEL: weights}), own_net(shapes)
    chain = ctypes.byref(net.structure), ctypes.c_int32(len(shapes))
    taken: list[tuple[float, ...]] = []
    with _one_thread():
        for turn in range(plan.rounds * plan.repeat + 1):
            device = turn % setting.devices
            shard = data.shard(device)
            marks = [time.perf_counter()]
            net.give(weights)
            compiled().fedpmt_lay_out(*chain)
            marks.append(time.perf_counter())
            compiled_round(
                LocalWork(), Job(site, task, part, None, shard, partial(Seeds(0, turn), device=device))
            )
            marks.append(time.perf_counter())
            wanted = net.train({}, part.trained)  # tensors that the compiled code writes to
            compiled().fedpmt_hand_back(*chain, ctypes.c_int32(1))
            marks.append(time.perf_counter())
            taken.append(tuple(last - first for first, last in pairwise(marks)))
            del wanted  # not sooner: theirs is the memory
    packing, whole, reading = (median(stage) for stage in zip(*taken[1:], strict=True))
    return StageTime(
        setting=setting.name,
        laid_out=packing,
        trained=whole - packing - reading,  # of which the whole consists, too
        handed_back=reading,
    )


def _problem(setting: Setting, epochs: int, plan: Plan) -> tuple[Settings, Problem]:
    given = {
        **setting.ours("fedpmt"),
        "cohort": setting.cohort,
        "batch": setting.batch,
        "epochs": epochs,
        "lr": setting.lr,
    }
    if plan.data_dir is not None:
        given["data_dir"] = str(plan.data_dir)
    settings = settings_of(given)
    return settings, paper_problem_of(settings)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def evaluation_time(setting: Setting, plan: Plan) -> EvaluationTime:
    """Measure rounds with and without an evaluation, in turn."""
    bare, evaluated = _in_turn(setting, (Way(""), Way("", {"eval_every": 1})), plan)
    settings, problem = _problem(setting, 1, plan)
    each = sum(layer.forward for layer in make_price(settings, problem).layers()) / settings.batch
    return EvaluationTime(
        setting=setting.name,
        round_seconds=bare,
        evaluated_seconds=evaluated,
        operations=each * len(problem.data.test.ids),
    )


def _in_turn(setting: Setting, ways: Sequence[Way], plan: Plan) -> list[float]:
    """The median over repetitions of our median round, for each way."""
    taken: list[list[float]] = [[] for _ in ways]
    for repetition in range(plan.repeat):
        for way, found in zip(ways, taken, strict=True):
            # The last round is not timed, since it is evaluated in any case.
            rounds = plan.warmup + plan.rounds + 1
            job = job_of(Case(setting, "ours", FEDAVG), way, plan, rounds=rounds, seed=repetition)
            blank = Measurement(
                setting=setting.name,
                peer="ours",
                variant=FEDAVG.name,
                repetition=repetition,
                threads=way.name,
            )
            one = measure("ours", python_of("ours"), way, job, blank, limit=plan.limit)
            if not one.seconds or one.error:
                raise RuntimeError(f"{setting.name}: {one.error or 'no round was measured'}")
            found.append(median(one.seconds))
    return [median(found) for found in taken]


def tables(results: OwnResults) -> dict[str, str]:
    """Make a table of each kind of result."""
    depths = [
        [
            one.setting,
            str(one.epochs),
            str(one.depth),
            seconds_text(one.seconds),
            f"{one.time:.2f}",
            f"{one.operations:.2f}",
            f"{one.time / one.operations - 1:+.0%}",
        ]
        for one in results.depths
    ]
    stages = [
        [one.setting, *map(seconds_text, (one.laid_out, one.trained, one.handed_back))]
        for one in results.stages
    ]
    peak = best_peak(results.peaks) or math.nan
    evaluations = [
        [
            one.setting,
            *map(seconds_text, (one.round_seconds, one.evaluated_seconds)),
            f"{one.share:.2f}",
            f"{share_of_peak(one.operations, one.evaluated_seconds - one.round_seconds, peak):.0%}",
        ]
        for one in results.evaluations
    ]
    head = ("setting", "E", "depth", "a device's round", "time of the full", "`exact` of the full", "apart")
    return {
        "depths": table(head, depths),
        "stages": table(("setting", "weights laid out", "trained", "changes handed back"), stages),
        "evaluations": table(
            ("setting", "a round", "with an evaluation", "evaluation over round", "its share of peak"),
            evaluations,
        ),
    }
