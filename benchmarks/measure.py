"""The order of measurements: threads first, then repetition by repetition, one peer after the other."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.export import export
from benchmarks.results import Measurement, Results, Tried, describe, measure_peak
from benchmarks.runner import CannotInstallError, Way, cache_folder, measure, python_of, ways
from benchmarks.settings import CLASS_SUFFIX, FEDAVG, VARIANTS, Setting, Variant

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.peers.common import Job

LONG_ROUNDS = 2
"""Timed rounds of a repetition with several local epochs; one more is evaluated and not timed."""

PEERS = ("ours", "plain", "flower", "pfl", "fedjax", "blazefl", "appfl")


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and how long."""

    settings: tuple[Setting, ...]
    peers: tuple[str, ...] = PEERS
    variants: tuple[Variant, ...] = VARIANTS  # of ours
    repeat: int = 3
    warmup: int = 2
    rounds: int = 10  # with the warm-up
    accuracy_rounds: int = 20  # of the first repetition, and of ours in all of them
    limit: float = 60.0  # seconds a round
    search: bool = True  # try all ways of using the cores; else the first
    known: tuple[Tried, ...] = ()  # ways that were found before, not tried again
    trial_rounds: int = 5  # of each way, with the warm-up
    peak_seconds: float = 1.5  # spent on finding the machine's peak, in each repetition
    data_dir: Path | None = None
    work: Path = field(default_factory=cache_folder)
    own_environment: bool = True  # False: peers run in ours, which must have what they need
    out: Path | None = None


@dataclass(frozen=True)
class Case:
    """One peer on one setting."""

    setting: Setting
    peer: str
    variant: Variant = FEDAVG


def cases(plan: Plan) -> list[Case]:
    """List all that is measured in one repetition, a setting's peers one after the other."""
    return [
        Case(setting, peer, variant)
        for setting in plan.settings
        for peer in peers_of(plan, setting)
        for variant in (plan.variants if peer == "ours" else (FEDAVG,))
    ]


def peers_of(plan: Plan, setting: Setting) -> list[str]:
    """List the peers that can train a setting's net; fedjax cannot train a PyTorch module."""
    return [peer for peer in plan.peers if peer != "fedjax" or not setting.module]


def job_of(case: Case, way: Way, plan: Plan, *, rounds: int, seed: int) -> Job:
    """Make the job that the peer is asked to do."""
    setting = case.variant.of(case.setting)
    options = dict(way.options)
    if case.peer == "ours":
        options |= setting.ours(case.variant.method)
        if plan.data_dir is not None and not setting.module:
            options["data_dir"] = str(plan.data_dir)
    data = str(export(case.setting, plan.work / "arrays", plan.data_dir))
    return setting.job(options, rounds=rounds, warmup=plan.warmup, seed=seed, data=data)


class Benchmark:
    """A run of the benchmark, written down as it goes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.results = Results(
            machine=describe(),
            limit_seconds=plan.limit,
            settings={setting.name: {**asdict(setting), "steps": setting.steps} for setting in plan.settings},
        )
        self._pythons: dict[str, Path | str] = {}
        self._ways: dict[tuple[str, str], Way] = {}

    def run(self) -> Results:
        """Measure everything."""
        self.prepare()
        self.find_ways()
        for repetition in range(self.plan.repeat):
            self.results.peaks.append(measure_peak(seconds=self.plan.peak_seconds))
            say(
                f"repetition {repetition + 1}: the machine's peak is {self.results.peaks[-1].gflops:.0f} GFLOP/s"
            )
            for case in cases(self.plan):
                self.add(self.one(case, repetition))
        return self.results

    def prepare(self) -> None:
        """Make environments and arrays, before anything is timed."""
        for peer in dict.fromkeys(case.peer for case in cases(self.plan)):
            try:
                own = self.plan.own_environment
                self._pythons[peer] = python_of(peer, self.plan.work) if own else python_of("ours")
            except CannotInstallError as error:
                say(str(error))
                self._pythons[peer] = str(error)
        for setting in self.plan.settings:
            export(setting, self.plan.work / "arrays", self.plan.data_dir)

    def find_ways(self) -> None:
        """Find the best way to use the cores, for each peer on each setting."""
        for setting in self.plan.settings:
            for peer in peers_of(self.plan, setting):
                case = Case(setting, peer)
                options = ways(peer)
                known = self.known_way(setting, peer)
                if known is not None and known.chosen in [way.name for way in options]:
                    self._ways[setting.name, peer] = next(way for way in options if way.name == known.chosen)
                    self.results.threads.append(known)
                    continue
                if not self.plan.search or len(options) == 1 or isinstance(self._pythons[peer], str):
                    self._ways[setting.name, peer] = options[0]
                    continue
                tried = {way.name: self.trial(case, way) for way in options}
                chosen = best_way(tried) or options[0].name
                self._ways[setting.name, peer] = next(way for way in options if way.name == chosen)
                self.results.threads.append(
                    Tried(setting=setting.name, peer=peer, seconds=tried, chosen=chosen)
                )
                shown = ", ".join(
                    f"{name}: {'-' if s is None else f'{s:.3f} s'}" for name, s in tried.items()
                )
                say(f"{setting.name} {peer}: {shown}; best: {chosen}")
                self.save()

    def known_way(self, setting: Setting, peer: str) -> Tried | None:
        """Find what was tried before, for this setting or for the other one with the same net."""
        found = {(one.setting.removesuffix(CLASS_SUFFIX), one.peer): one for one in self.plan.known}
        known = found.get((setting.base, peer))
        return known and known.model_copy(update={"setting": setting.name})

    def trial(self, case: Case, way: Way) -> float | None:
        """Find the median round of a short run."""
        rounds = max(self.plan.trial_rounds, self.plan.warmup + 2)
        found = self.start(case, way, rounds=rounds, seed=0, repetition=-1)
        if found.error:
            say(f"{case.setting.name} {case.peer}, {way.name}: {found.error}")
        return median(found.seconds) if found.seconds and not found.error and not found.cut_off else None

    def one(self, case: Case, repetition: int) -> Measurement:
        """Measure a case once, with the peer's best way of using the cores."""
        # Ours says with each seed how far accuracies lie apart by chance alone.
        full = repetition == 0 or (case.peer == "ours" and case.variant == FEDAVG)
        rounds = self.plan.accuracy_rounds if full else self.plan.rounds
        if case.variant.epochs > 1:
            # Such rounds are long, and nobody compares accuracies after them.
            rounds = min(rounds, self.plan.warmup + LONG_ROUNDS + 1)
        way = self._ways[case.setting.name, case.peer]
        return self.start(case, way, rounds=rounds, seed=repetition, repetition=repetition)

    def start(self, case: Case, way: Way, *, rounds: int, seed: int, repetition: int) -> Measurement:
        """Start a peer and wait for it."""
        blank = Measurement(
            setting=case.setting.name,
            peer=case.peer,
            variant=case.variant.name,
            repetition=repetition,
            threads=way.name,
        )
        python = self._pythons[case.peer]
        if isinstance(python, str):
            return blank.model_copy(update={"error": python})
        job = job_of(case, way, self.plan, rounds=rounds, seed=seed)
        return measure(case.peer, python, way, job, blank, self.plan.limit)

    def add(self, found: Measurement) -> None:
        """Keep a measurement and print it."""
        self.results.measurements.append(found)
        name = f"{found.setting} {found.peer}" + (f" ({found.variant})" if found.peer == "ours" else "")
        if found.error:
            say(f"  {name}: {found.error}")
        elif found.cut_off:
            say(f"  {name}: cut off, a round takes over {self.plan.limit:.0f} s")
        else:
            reached = (
                "" if found.accuracy is None else f", accuracy {found.accuracy:.3f} after {found.rounds}"
            )
            say(f"  {name}: {median(found.seconds):.4f} s a round, {found.threads}{reached}")
        self.save()

    def save(self) -> None:
        """Write the results so far."""
        if self.plan.out is not None:
            self.results.write(self.plan.out)


def best_way(tried: dict[str, float | None]) -> str | None:
    """Find the fastest of the ways tried.

    >>> best_way({"1 threads": 0.4, "2 threads": 0.3, "pmap": None})
    '2 threads'
    """
    timed = {name: seconds for name, seconds in tried.items() if seconds is not None}
    return min(timed, key=timed.__getitem__) if timed else None


def quick(plan: Plan) -> Plan:
    """Shorten a plan to a few minutes: fewer rounds and repetitions, the same settings."""
    return replace(
        plan, repeat=min(plan.repeat, 2), rounds=5, accuracy_rounds=5, trial_rounds=4, variants=VARIANTS[:2]
    )


def say(text: str) -> None:
    """Print progress, apart from results."""
    print(text, file=sys.stderr, flush=True)
