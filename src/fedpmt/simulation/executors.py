"""Where local work is computed. Which devices are trained, in what order and how, is fixed by the cohort
alone: an executor only decides where a unit runs, so the bits are the same for any number of workers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from fedpmt.training.local import LocalSettings, LocalWork, Rng, Site, train
from fedpmt.types import Arrays, Examples

if TYPE_CHECKING:
    import numpy as np

    from fedpmt.models.layered import LayeredModel
    from fedpmt.submodel.part import Part
    from fedpmt.training.messages import Reply, Task
    from fedpmt.training.objective import Objective

Item = TypeVar("Item")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Unit:
    """One device's local round, ready to be computed."""

    device: int
    round_index: int
    task: Task
    part: Part
    own: Any
    shard: Callable[[], Examples]  # loaded where it is used
    rng: Rng
    settings: LocalSettings


class Executor(Protocol):
    """Computes units and other pieces of work, results in the order given."""

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        """Local rounds."""
        ...

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        """Any function of a site, e.g. evaluation."""
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...


class Plain:
    """One device after another, in this thread, by autograd: the oracle."""

    def __init__(
        self,
        models: Mapping[str, LayeredModel],
        objective: Objective,
        settings: LocalSettings,
        *,
        stochastic: bool = False,
    ) -> None:
        self._models = models
        self._objective = objective
        self._settings = settings
        self._stochastic = stochastic

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        for unit in units:
            yield compute(work, self.site(unit.settings), unit, stochastic=self._stochastic)

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        for item in items:
            yield function(self.site(self._settings), item)

    def copy(self) -> Plain:
        """The same for another thread."""
        models = {name: model.clone() for name, model in self._models.items()}
        return Plain(models, self._objective, self._settings, stochastic=self._stochastic)

    def site(self, settings: LocalSettings) -> Site:
        """What a device has at hand here."""
        return Site(self._models, self._objective, settings)

    def close(self) -> None:
        pass


class Parallel:
    """Several devices at a time, one thread and one copy of the model each; two results per worker are held."""

    def __init__(
        self,
        models: Mapping[str, LayeredModel],
        objective: Objective,
        settings: LocalSettings,
        workers: int,
        *,
        stochastic: bool = False,
    ) -> None:
        self._own = threading.local()
        self._model = Plain(models, objective, settings, stochastic=stochastic)
        # deepcopy of one module from several threads at once is not safe: copies are made one by one.
        self._making = threading.Lock()
        self._workers = workers
        self._stochastic = stochastic
        self._settings = settings
        self._pool = ThreadPoolExecutor(
            workers, thread_name_prefix="device", initializer=lambda: torch.set_num_threads(1)
        )

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        return self._ordered(
            lambda unit: compute(work, self._local().site(unit.settings), unit, stochastic=self._stochastic),
            units,
        )

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        return self._ordered(lambda item: function(self._local().site(self._settings), item), items)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _local(self) -> Plain:
        if not hasattr(self._own, "plain"):
            with self._making:
                self._own.plain = self._model.copy()
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


def compute(work: LocalWork[Any], site: Site, unit: Unit, *, stochastic: bool) -> tuple[Reply, Any]:
    """One unit. Layers that draw from torch's global generator (dropout) are seeded per device."""
    guard = _seeded(unit.rng("forward")) if stochastic else contextlib.nullcontext()
    with guard:
        data = to_torch(unit.shard())
        return train(
            work,
            site,
            unit.task,
            unit.part,
            unit.own,
            data,
            unit.rng,
            device=unit.device,
            round_index=unit.round_index,
        )


_GLOBAL_GENERATOR = threading.Lock()


@contextlib.contextmanager
def _seeded(rng: np.random.Generator) -> Iterator[None]:
    """torch's global generator, seeded for one unit and put back; one unit at a time, as it is global."""
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**63)))
        yield


def to_torch(examples: Examples) -> Examples:
    """The same samples as tensors, without a copy where NumPy allows it."""
    return Examples(_tensor(examples.inputs), _tensor(examples.targets), examples.ids)


def _tensor(arrays: Arrays) -> Arrays:
    if isinstance(arrays, Mapping):
        return {name: _tensor(array) for name, array in arrays.items()}
    return torch.as_tensor(arrays)
