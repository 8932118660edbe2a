"""Where local work is computed. Which devices are trained, in what order and how, is fixed by the cohort
alone: an executor only decides where a unit runs, so the bits are the same for any number of workers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch

from fedpmt.kernels.fused import fused_train, fusible, stackable, steps_taken
from fedpmt.training.local import LocalSettings, LocalWork, Outcome, Rng, Site, train
from fedpmt.training.messages import Reply
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np

    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.training.objective import Objective
    from fedpmt.types import Examples

Group: TypeAlias = "list[tuple[int, Unit]]"
Placed: TypeAlias = "tuple[int, tuple[Reply, Any]]"
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
    samples: int  # |D_k|

    def kind(self) -> tuple[object, ...]:
        """What two units must share to be computed together."""
        shapes = tuple(
            (name, tuple(tensor.shape)) for name, tensor in self.task.tensors.get(MODEL, {}).items()
        )
        # Widths are drawn for each batch and device: such a unit is alone.
        alone = self.device if self.part.inner else None
        scalars = tuple(sorted(self.task.scalars.items()))
        return (
            self.part.model,
            tuple(self.part.trained),
            shapes,
            self.samples,
            self.task.steps,
            self.task.epochs,
            scalars,
            alone,
        )

    def reply(self, outcome: Outcome) -> Reply:
        """What the device sends."""
        return Reply(
            self.device,
            self.round_index,
            self.part,
            self.samples,
            outcome.tensors,
            outcome.scalars,
            outcome.metrics,
        )


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


def in_order(groups: Iterable[list[Placed]]) -> Iterator[tuple[Reply, Any]]:
    """Results in the order of their units, as soon as those before them are there."""
    early: dict[int, tuple[Reply, Any]] = {}
    turn = 0
    for group in groups:
        early.update(group)
        while turn in early:
            yield early.pop(turn)
            turn += 1


@dataclass(frozen=True)
class Plain:
    """One device after another, in this thread. By autograd it is the oracle; `fast` takes the fused loop."""

    models: Mapping[str, LayeredModel]
    objective: Objective
    settings: LocalSettings
    stochastic: bool = False  # whether a forward pass draws from torch's global generator (dropout)
    fast: bool = False
    public: Examples | None = None

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        return in_order(self.compute_group(work, group) for group in self.groups(units))

    def groups(self, units: Iterable[Unit]) -> Iterator[Group]:
        """Units to be computed together: pairs of a kind on the fast path, where devices can share products.

        Fixed by the units alone, never by who computes them.
        """
        pairs = self.fast and all(stackable(model, self.settings) for model in self.models.values())
        waiting: dict[tuple[object, ...], tuple[int, Unit]] = {}
        for place, unit in enumerate(units):
            kind = unit.kind() if pairs else (place,)
            if kind in waiting:
                yield [waiting.pop(kind), (place, unit)]
            elif pairs:
                waiting[kind] = (place, unit)
            else:
                yield [(place, unit)]
        for single in waiting.values():
            yield [single]

    def compute_group(self, work: LocalWork[Any], group: Group) -> list[Placed]:
        """The units of a group, each with its place."""
        units = [unit for _, unit in group]
        site, data = self.site(units[0].settings), [unit.shard() for unit in units]
        if not self.fast or not all(
            fusible(work, site, unit.task, unit.part, one) for unit, one in zip(units, data, strict=True)
        ):
            return [
                (place, self._by_autograd(work, unit, one))
                for (place, unit), one in zip(group, data, strict=True)
            ]
        outcomes = fused_train(
            site,
            [unit.task for unit in units],
            [unit.part for unit in units],
            data,
            [unit.rng for unit in units],
            work,
            [unit.own for unit in units],
        )
        results = []
        for (place, unit), outcome in zip(group, outcomes, strict=True):
            steps = steps_taken(unit.settings, unit.samples, unit.task.steps)
            sent, own = work.concluded(outcome, site, unit.task, unit.own, steps)
            results.append((place, (unit.reply(sent), own)))
        return results

    def map(self, function: Callable[[Site, Item], Out], items: Iterable[Item]) -> Iterator[Out]:
        for item in items:
            yield function(self.site(self.settings), item)

    def close(self) -> None:
        pass

    def _by_autograd(self, work: LocalWork[Any], unit: Unit, data: Examples) -> tuple[Reply, Any]:
        with _seeded(unit.rng("forward")) if self.stochastic else contextlib.nullcontext():
            return train(
                work,
                self.site(unit.settings),
                unit.task,
                unit.part,
                unit.own,
                data,
                unit.rng,
                device=unit.device,
                round_index=unit.round_index,
            )

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
        self._one, self._workers = one, workers
        self._own = threading.local()
        # deepcopy of one module from several threads at once is not safe: copies are made one by one.
        self._copying = threading.Lock()
        self._pool = ThreadPoolExecutor(workers, "device", initializer=lambda: torch.set_num_threads(1))

    def train(self, work: LocalWork[Any], units: Iterable[Unit]) -> Iterator[tuple[Reply, Any]]:
        groups = self._one.groups(units)
        return in_order(self._ordered(lambda group: self._local().compute_group(work, group), groups))

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
