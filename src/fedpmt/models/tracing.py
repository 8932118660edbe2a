"""What a module does with a few samples: which submodules run when, which tensors they read, and what depends on what.

Layers are found, parameters get their owners and cuts are made by what is seen here. The module that runs should
be a copy: a forward pass may change buffers.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedpmt.models.trees import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fedpmt.types import Arrays


@dataclass
class Call:
    """One run of a submodule; times count operations and calls."""

    path: str
    start: int
    end: int = 0
    inputs: tuple[int, ...] = ()  # storages of the tensors it was given
    outputs: tuple[int, ...] = ()  # storages of the tensors it returned
    value: Any = None  # what it returned
    takes: tuple[int, ...] | None = None  # the shape of the first tensor it was given, if of real numbers


@dataclass(frozen=True)
class Operation:
    """One operation of torch: the storages it read and wrote."""

    time: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass
class Trace:
    """Everything that happened in one forward pass, in order."""

    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # storage -> the parameter or buffer that it holds
    trained: set[int] = field(default_factory=set)  # storages of parameters
    time: int = 0
    outputs: Any = None

    def first_call(self, path: str) -> Call | None:
        """The first run of a submodule, if it ran."""
        return next((call for call in self.calls if call.path == path), None)

    def forget_values(self) -> None:
        """Let go of the activations, once nobody needs them any more."""
        self.outputs = None
        for call in self.calls:
            call.value = None

    def uses(self) -> dict[str, list[int]]:
        """When each parameter and buffer was read."""
        found: dict[str, list[int]] = defaultdict(list)
        for operation in self.operations:
            for storage in operation.reads:
                if storage in self.names:
                    found[self.names[storage]].append(operation.time)
        return found

    def births(self) -> dict[int, int]:
        """When each storage that depends on parameters was first written; parameters themselves are left out."""
        born: dict[int, int] = {}
        for operation in self.operations:
            if any(storage in born or storage in self.trained for storage in operation.reads):
                for storage in operation.writes:
                    if storage not in self.names:
                        born.setdefault(storage, operation.time)
        return born

    def reads(self) -> dict[int, list[int]]:
        """When each storage was read, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for operation in self.operations:
            for storage in operation.reads:
                found[storage].append(operation.time)
        return found


@dataclass(frozen=True)
class Flow:
    """The data flow of a trace, ready to be asked."""

    born: dict[int, int]
    read: dict[int, list[int]]

    @classmethod
    def of(cls, trace: Trace) -> Flow:
        """Prepare a trace for questions."""
        return cls(trace.births(), trace.reads())

    def crossing(self, time: int, until: int) -> int:
        """How many tensors made before `time` are read after it and up to `until`."""
        return sum(
            1 for storage, birth in self.born.items() if birth <= time and self._is_read(storage, time, until)
        )

    def _is_read(self, storage: int, after: int, until: int) -> bool:
        times = self.read.get(storage, [])
        place = bisect_right(times, after)
        return place < len(times) and times[place] <= until


def trace(module: nn.Module, inputs: Arrays, run: Callable[[nn.Module, Arrays], Any]) -> Trace:
    """Run the module in evaluation mode and write down what happens; the module is changed as any run changes it."""
    found = Trace()
    keep: list[Any] = []  # storages that are freed would be reused, and mistaken for each other
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.names.setdefault(_storage(tensor), name)
        if isinstance(tensor, nn.Parameter):
            found.trained.add(_storage(tensor))
    open_calls: list[Call] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            found.time += 1
            given = next(tensors_in((args, kwargs)), None)
            takes = tuple(given.shape) if given is not None and given.is_floating_point() else None
            call = Call(path, found.time, inputs=_storages((args, kwargs)), takes=takes)
            found.calls.append(call)
            open_calls.append(call)

        return hook

    def leave(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        found.time += 1
        call = open_calls.pop()
        call.end, call.outputs, call.value = found.time, _storages(outputs), outputs

    with contextlib.ExitStack() as stack:
        for path, child in module.named_modules():
            before = child.register_forward_pre_hook(enter(path), with_kwargs=True, prepend=True)
            after = child.register_forward_hook(leave, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        module.eval()
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(NoFastPath())
        stack.enter_context(_Watch(found, keep))
        found.outputs = run(module, inputs)
    return found


def _storages(value: Any) -> tuple[int, ...]:
    return tuple(_storage(tensor) for tensor in tensors_in(value))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation that torch runs; what it does with it is up to those derived from it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled, and to say so torch would load its compiler: a second of every start.
        return False


class _Watch(Watching):
    """Writes down each operation that torch runs."""

    def __init__(self, found: Trace, keep: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._keep = found, keep

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note which storages it reads and writes."""
        result = func(*args, **(kwargs or {}))
        read = [*_flat(args), *_flat(list((kwargs or {}).values()))]
        written = list(_flat(result))
        self._keep.append([one.untyped_storage() for one in (*read, *written) if one.layout == torch.strided])
        self._found.time += 1
        self._found.operations.append(
            Operation(
                self._found.time,
                tuple(_storage(one) for one in read),
                tuple(_storage(one) for one in written),
            )
        )
        return result


class NoFastPath(TorchFunctionMode):
    """Keeps modules on their ordinary path: torch's fused encoder layer is one operation without parts.

    Modules look for such a mode before they fuse; unlike torch's global switch it holds for this thread only.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function as it is."""
        return func(*args, **(kwargs or {}))
