"""Where local work is computed. Which devices are trained, in what order and how, is fixed by the cohort
alone: an executor only decides where a unit runs, so the bits are the same for any number of workers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from fedpmt.training.local import Job, LocalSettings, LocalWork, Rng, Site
from fedpmt.training.loop import compiled_round, conclude, local_round, why_not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np

    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.records import ComputePath
    from fedpmt.training.messages import Reply, Task
    from fedpmt.training.objective import Objective
    from fedpmt.types import Examples

Item = TypeVar("Item")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Unit:
    """One device's local round, to be computed somewhere."""

    device: int
    round_index: int
    task: Task
    part: Part
    own: Any
    shard: Callable[[], Examples]  # loaded where it is used
    rng: Rng
    settings: LocalSettings
    samples: int  # |D_k|


@dataclass
class PathsTaken:
    """How local rounds were computed; all threads write to one of these."""

    seen: set[ComputePath] = field(default_factory=set)
    left_to_autograd: str | None = None  # what compiled code does not know although it knows the model
    checked: bool = False  # whether the last was looked for: once is enough


class Executor(Protocol):
    """Computes units and other pieces of work, results in the order given."""

    @property
    def paths(self) -> PathsTaken:
        """How units were computed so far."""
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


@dataclass(frozen=True)
class Plain:
    """One device after another, in this thread. By autograd alone it is the oracle; `fast` may use compiled code."""

    models: Mapping[str, LayeredModel]
    objective: Objective
    settings: LocalSettings
    stochastic: bool = False  # whether a forward pass draws from torch's global generator (dropout)
    fast: bool = False
    public: Examples | None = None
    paths: PathsTaken = field(default_factory=PathsTaken)

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        for unit in units:
            yield self.compute(work, unit)

    def compute(self, work: LocalWork[Any], unit: Unit) -> tuple[Reply, Any]:
        """One local round."""
        job = Job(
            self.site(unit.settings),
            unit.task,
            unit.part,
            unit.own,
            unit.shard(),
            unit.rng,
            unit.device,
            unit.round_index,
        )
        found = compiled_round(work, job)
        self.paths.seen.add("autograd" if found is None else "compiled")
        if found is None:
            if self.fast and not self.paths.checked:
                self.paths.checked = True
                self.paths.left_to_autograd = why_not_compiled(work, job)
            with _seeded(unit.rng("forward")) if self.stochastic else contextlib.nullcontext():
                found = local_round(work, job)
        return conclude(work, *found)

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        for item in items:
            yield function(self.site(self.settings), item)

    def close(self) -> None:
        pass

    def site(self, settings: LocalSettings) -> Site:
        """What a device has at hand here."""
        return Site(self.models, self.objective, settings, self.public, self.fast)

    def copy(self) -> Plain:
        """The same for another thread."""
        models = {name: model.clone() for name, model in self.models.items()}
        return replace(self, models=models)


class Parallel:
    """Several devices at a time, one thread and one copy of the models each; two results per worker are held."""

    def __init__(self, one: Plain, workers: int) -> None:
        self._one, self._workers, self.paths = one, workers, one.paths
        self._own = threading.local()
        # deepcopy of one module from several threads at once is not safe: copies are made one by one.
        self._copying = threading.Lock()
        self._pool = ThreadPoolExecutor(workers, "device", initializer=lambda: torch.set_num_threads(1))

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        return self._ordered(lambda unit: self._local().compute(work, unit), units)

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        return self._ordered(lambda item: function(self._local().site(self._one.settings), item), items)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _local(self) -> Plain:
        if not hasattr(self._own, "plain"):
            with self._copying:
                self._own.plain = self._one.copy()
        plain: Plain = self._own.plain
        return plain

    def _ordered(self, function: Callable[[Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        waiting: deque[Future[Out]] = deque()
        try:
            for item in items:
                if len(waiting) == 2 * self._workers:
                    yield waiting.popleft().result()
                waiting.append(self._pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


_GLOBAL_GENERATOR = threading.Lock()


@contextlib.contextmanager
def _seeded(rng: np.random.Generator) -> Iterator[None]:
    """torch's global generator, seeded for one unit and put back; one unit at a time, as it is global."""
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**63)))
        yield
