"""Where local work is computed. Which devices are trained, in what order and how, is fixed by the cohort
alone: an executor only decides where a unit runs, so the bits are the same for any number of workers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import torch

from fedpmt import kernels
from fedpmt.simulation.workers import Workers
from fedpmt.training.kept import KeptOutputs
from fedpmt.training.local import Job, LocalSettings, LocalWork, Rng, Site
from fedpmt.training.loop import compiled_round, conclude, local_round, why_not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np

    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.records import ComputePath
    from fedpmt.training.batches import PlacedData
    from fedpmt.training.messages import Reply, Task
    from fedpmt.training.objective import Objective

Item = TypeVar("Item")
Out = TypeVar("Out")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Unit:
    """One device's local round, to be computed somewhere."""

    device: int
    round_index: int
    task: Task
    part: Part
    own: Any
    rng: Rng
    settings: LocalSettings
    samples: int  # |D_k|
    operations: float = 0.0  # what it will take, to start the longest first


@dataclass
class PathsTaken:
    """How local rounds were computed; all threads write to one of these."""

    seen: set[ComputePath] = field(default_factory=set)
    left_to_autograd: str | None = None  # what compiled code does not know although it knows the model
    checked: bool = False  # whether the last was looked for: once is enough

    def add(self, other: PathsTaken) -> None:
        """Take over what another process has seen."""
        self.seen |= other.seen
        self.left_to_autograd = self.left_to_autograd or other.left_to_autograd
        self.checked = self.checked or other.checked


class Pending(Protocol[Result_co]):
    """A piece of work that was begun."""

    def result(self) -> Result_co:
        """Wait for it."""
        ...

    def cancel(self) -> object:
        """Say that nobody wants it any more."""
        ...


@dataclass(frozen=True)
class Later(Generic[Result_co]):
    """Work that is done when its result is asked for."""

    function: Callable[[], Result_co]

    def result(self) -> Result_co:
        return self.function()

    def cancel(self) -> None:
        pass


@dataclass(frozen=True)
class Sent:
    """A unit that a process computes."""

    workers: Workers
    number: int
    paths: PathsTaken

    def result(self) -> tuple[Reply, Any]:
        reply, own, paths = self.workers.take(self.number)
        self.paths.add(paths)
        return reply, own

    def cancel(self) -> None:
        """A process cannot be asked to stop: it ends, and is made anew when it is needed again."""
        self.workers.close()


class Executor(Protocol):
    """Computes units and other pieces of work, results in the order given."""

    @property
    def paths(self) -> PathsTaken:
        """How units were computed so far."""
        ...

    def submit(self, work: LocalWork[Any], unit: Unit) -> Pending[tuple[Reply, Any]]:
        """Begin a local round, or see to it that it is computed when somebody asks for its result."""
        ...

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        """Local rounds."""
        ...

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        """Any function of a site, e.g. evaluation."""
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...


_GLOBAL_GENERATOR = threading.Lock()

HELD_BYTES = 2**28


@dataclass(frozen=True)
class Plain:
    """One device after another, in this thread. By autograd alone it is the oracle; `fast` may use compiled code."""

    models: Mapping[str, LayeredModel]
    objective: Objective
    settings: LocalSettings
    stochastic: bool = False  # whether a forward pass draws from torch's global generator (dropout)
    fast: bool = False
    data: PlacedData | None = None  # only training needs it
    paths: PathsTaken = field(default_factory=PathsTaken)
    seeding: threading.Lock = _GLOBAL_GENERATOR  # held while that generator is a unit's own
    kept: KeptOutputs = field(default_factory=KeptOutputs)  # all threads share them

    def submit(self, work: LocalWork[Any], unit: Unit) -> Later[tuple[Reply, Any]]:
        return Later(partial(self.compute, work, unit))

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        for unit in units:
            yield self.compute(work, unit)

    def compute(self, work: LocalWork[Any], unit: Unit) -> tuple[Reply, Any]:
        """One local round."""
        job = self.job(unit)
        found = compiled_round(work, job)
        self.paths.seen.add("autograd" if found is None else "compiled")
        if found is None:
            if self.fast and not self.paths.checked:
                self.paths.checked = True
                self.paths.left_to_autograd = why_not_compiled(work, job)
            seeded = _seeded(unit.rng("forward"), job.model.device, self.seeding) if self.stochastic else None
            quick = kernels.faster() if self.fast else contextlib.nullcontext()
            with seeded or contextlib.nullcontext(), quick:
                found = local_round(work, job)
        return conclude(work, *found)

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        for item in items:
            yield function(self.site, item)

    def close(self) -> None:
        pass

    @cached_property
    def site(self) -> Site:
        """What a device has at hand here."""
        public = None if self.data is None else self.data.public
        return Site(self.models, self.objective, self.settings, public, self.fast, self.kept)

    def job(self, unit: Unit) -> Job[Any]:
        """A unit with all that it takes to compute it."""
        assert self.data is not None, "an executor without data cannot train"
        return Job(
            replace(self.site, settings=unit.settings),
            unit.task,
            unit.part,
            unit.own,
            self.data.shard(unit.device),
            unit.rng,
            unit.device,
            unit.round_index,
        )

    def copy(self) -> Plain:
        """The same for another thread."""
        models = {name: model.clone() for name, model in self.models.items()}
        return replace(self, models=models)


class Parallel:
    """Several devices at a time, the longest local rounds first, so that no worker is left with one at the end.

    Compiled code holds no lock: it runs in threads, with a copy of the models each, as does all that is not training.
    Autograd holds the interpreter's lock for much of a step, so it runs in processes where there may be some.
    """

    def __init__(self, one: Plain, workers: int, processes: int = 0) -> None:
        self._one, self._workers, self.paths = one, workers, one.paths
        self._own = threading.local()
        # deepcopy of one module from several threads at once is not safe: copies are made one by one.
        self._copying = threading.Lock()
        self._pool = ThreadPoolExecutor(workers, "device", initializer=self._equip)
        self._count = processes
        self._compiled: bool | None = None  # whether compiled code takes local rounds, once one has been seen
        self._forked: tuple[LocalWork[Any], Workers] | None = None

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        places: deque[int] = deque()
        held: dict[int, tuple[Reply, Any]] = {}
        due = count()
        wanted = next(due)
        for result in self._ordered(partial(self.submit, work), self._longest_first(units, places)):
            held[places.popleft()] = result
            while wanted in held:
                yield held.pop(wanted)
                wanted = next(due)

    def _longest_first(self, units: Iterable[Unit], places: deque[int]) -> Iterator[Unit]:
        """The units in the order in which they are computed; `places` says where each one stood."""
        rest = enumerate(units)
        while some := list(islice(rest, self._ahead)):
            for place, unit in sorted(some, key=lambda one: -one[1].operations):
                places.append(place)
                yield unit

    def submit(self, work: LocalWork[Any], unit: Unit) -> Pending[tuple[Reply, Any]]:
        if self._count and self._compiled is None:
            self._compiled = compiled_round(work, self._one.job(unit)) is not None
        if self._count and not self._compiled:
            workers = self._workers_for(work)
            return Sent(workers, workers.submit(unit), self.paths)
        return self._pool.submit(self._compute, work, unit)

    def _compute(self, work: LocalWork[Any], unit: Unit) -> tuple[Reply, Any]:
        return cast("Plain", self._own.plain).compute(work, unit)

    @cached_property
    def _ahead(self) -> int:
        """How many results may be held until it is their turn: few of a large model."""
        largest = max(
            sum(one.nbytes for one in model.initial().values()) for model in self._one.models.values()
        )
        return min(8 * self._workers, max(2 * self._workers, HELD_BYTES // max(1, largest)))

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        return self._ordered(
            lambda item: self._pool.submit(lambda: function(self._own.plain.site, item)), items
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._forked is not None:
            self._forked[1].close()

    def _equip(self) -> None:
        """Prepare a thread."""
        torch.set_num_threads(1)
        with self._copying:
            self._own.plain = self._one.copy()

    def _workers_for(self, work: LocalWork[Any]) -> Workers:
        """The processes that do this work, which they know by being forked."""
        if self._forked is not None:
            known, workers = self._forked
            if known == work and not workers.closed:
                return workers
            workers.close()
        # Locks of its own: the others may be held by a thread that does not exist in a fork.
        one = replace(self._one, paths=PathsTaken(), seeding=threading.Lock(), kept=KeptOutputs())
        not_sent = (one.settings.optimizer, one.settings.transform)
        workers = Workers(partial(_answer, one, work), self._count, not_sent)
        self._forked = work, workers
        return workers

    def _ordered(self, begin: Callable[[Item], Pending[Out]], items: Iterable[Item]) -> Iterator[Out]:
        waiting: deque[Pending[Out]] = deque()
        try:
            for item in items:
                if len(waiting) == 2 * self._workers:
                    yield waiting.popleft().result()
                waiting.append(begin(item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for pending in waiting:
                pending.cancel()


def _answer(one: Plain, work: LocalWork[Any], unit: Unit) -> tuple[Reply, Any, PathsTaken]:
    return *one.compute(work, unit), one.paths


@contextlib.contextmanager
def _seeded(rng: np.random.Generator, device: torch.device, lock: threading.Lock) -> Iterator[None]:
    """torch's global generators, seeded for one unit and put back; one unit at a time, as they are global."""
    seed, on_cpu = int(rng.integers(2**63)), device.type == "cpu"
    count = 0 if on_cpu else torch.get_device_module(device).device_count()
    with lock, torch.random.fork_rng(range(count), device_type=None if on_cpu else device.type):
        if on_cpu:
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)  # those of all accelerators too
        yield
