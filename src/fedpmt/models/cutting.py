"""Cut the forward pass of any module before a layer, at run time.

While the layers from the cut on are trained, each submodule that ran before it answers with what it answered before:
those whose answers are still needed from memory, the others with zeros of the right shape, which cost
nothing. The module's own `forward` runs on top, so nothing needs to be known of how it is written.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedpmt.models.trees import is_channels_last, map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from fedpmt.models.layout import Layout
    from fedpmt.models.tracing import Call, Trace


@dataclass(frozen=True)
class Answer:
    """The shape of one tensor that a submodule returns."""

    shape: tuple[int, ...]  # with one sample, or of all where samples have no axis
    axis: int | None  # of the samples; None: the same for any number of them
    dtype: torch.dtype
    channels_last: bool = False  # whether the channels of each pixel lie side by side in memory

    def rows(self, tensor: Tensor, samples: int) -> Tensor:
        """Turn what was returned for some samples into one row per sample."""
        if self.axis is None:
            return tensor.unsqueeze(0).expand(samples, *tensor.shape)
        rows = tensor.movedim(self.axis, 0)
        return rows.reshape(samples, -1, *rows.shape[1:])

    def restore(self, rows: Tensor) -> Tensor:
        """Turn rows back into what was returned."""
        if self.axis is None:
            return rows[0].to(self.dtype)
        found = rows.flatten(0, 1).movedim(0, self.axis).to(self.dtype)
        return found.contiguous(memory_format=torch.channels_last) if self.channels_last else found

    def zeros(self, samples: int, device: torch.device) -> Tensor:
        """Stand in for what nobody reads: one zero in the right shape."""
        shape = list(self.shape)
        if self.axis is not None:
            shape[self.axis] *= samples
        return torch.zeros((), dtype=self.dtype, device=device).expand(shape)


@dataclass(frozen=True)
class UnitCall:
    """One run of a submodule that is, or is part of, a layer."""

    path: str
    layer: int  # -1: the base
    value: Any  # the shape of what it returns: its tensors are empty
    answers: tuple[Answer, ...]  # one for each tensor in it


@dataclass(frozen=True)
class Cut:
    """What happens before a layer: the runs of submodules, and which of their answers the rest needs."""

    calls: tuple[UnitCall, ...]
    needed: frozenset[int]  # positions of calls
    written: bool = False  # whether answers are changed in place, so that copies are kept and given

    @property
    def last(self) -> int:
        """The position after which nothing needs to run any more."""
        return max(self.needed, default=-1)


class _Reached(BaseException):
    """Ends a forward pass at the cut. Not an Exception, which a module might catch."""


def unit_calls(
    layout: Layout, few: Trace, many: Trace, counts: tuple[int, int]
) -> tuple[UnitCall, ...] | None:
    """Read off two traces, of few and of many samples, what submodules return; None where samples have no axis."""
    layers = dict.fromkeys(layout.base, -1)
    layers |= {path: place for place, stage in enumerate(layout.stages) for path in stage.paths}
    pairs = [[call for call in trace.calls if call.path in layers and call.path] for trace in (few, many)]
    if [call.path for call in pairs[0]] != [call.path for call in pairs[1]]:
        return None
    found = []
    for one, other in zip(*pairs, strict=True):
        answers = _answers(one, other, counts)
        if answers is None:
            return None
        found.append(UnitCall(one.path, layers[one.path], map_tensors(one.value, _forget), answers))
    return tuple(found)


def _forget(_: Tensor) -> Tensor:
    return torch.empty(0)


def _answers(few: Call, many: Call, counts: tuple[int, int]) -> tuple[Answer, ...] | None:
    found = []
    shapes = [[tuple(tensor.shape) for tensor in tensors_in(call.value)] for call in (few, many)]
    if len(shapes[0]) != len(shapes[1]):
        return None
    for tensor, less, more in zip(tensors_in(few.value), *shapes, strict=True):
        differing = [axis for axis, sizes in enumerate(zip(less, more, strict=False)) if sizes[0] != sizes[1]]
        if len(less) != len(more) or len(differing) > 1:
            return None
        axis = differing[0] if differing else None
        shape = list(less)
        if axis is not None:
            if less[axis] * counts[1] != more[axis] * counts[0]:
                return None
            shape[axis] //= counts[0]
        found.append(Answer(tuple(shape), axis, tensor.dtype, is_channels_last(tensor)))
    return tuple(found)


def find_cut(calls: Sequence[UnitCall], trace: Trace, layer: int) -> Cut | None:
    """Find what the layers from `layer` on need of those before; None where nothing runs before it."""
    places = {call.path for call in calls}
    runs = [call for call in trace.calls if call.path in places]
    first_after = next((place for place, call in enumerate(calls) if call.layer >= layer), len(calls))
    if first_after in (0, len(calls)):
        return None
    before = runs[:first_after]
    return Cut(tuple(calls[:first_after]), _needed(trace, before))


def _needed(trace: Trace, before: Sequence[Call]) -> frozenset[int]:
    """The runs whose answers reach an operation after the cut through nothing but the module's own code."""
    made: dict[int, frozenset[int]] = {}  # storage -> runs
    found: frozenset[int] = frozenset()
    end = max(call.end for call in before)
    pending = list(enumerate(before))
    for operation in trace.operations:
        while pending and pending[0][1].end < operation.time:
            place, call = pending.pop(0)
            made.update(dict.fromkeys(call.outputs, frozenset([place])))
        if any(call.start < operation.time < call.end for call in before):
            continue
        read = frozenset().union(*(made.get(storage, frozenset()) for storage in operation.reads))
        for storage in operation.writes:
            made[storage] = made.get(storage, frozenset()) | read
        if operation.time > end:
            found |= read
    return found


def capture(module: nn.Module, cut: Cut, samples: int, run: Callable[[], Any]) -> dict[str, Tensor]:
    """Run up to the cut and keep the answers that are needed, one row per sample."""
    kept: dict[str, Tensor] = {}
    position = 0

    def record(call: UnitCall, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal position
        value = original(*args, **kwargs)
        if position in cut.needed:
            for place, (answer, tensor) in enumerate(zip(call.answers, tensors_in(value), strict=True)):
                rows = answer.rows(tensor, samples)
                kept[f"{position}.{place}"] = rows.clone() if cut.written else rows
            if position == cut.last:
                raise _Reached
        position += 1
        return value

    with _patched(module, cut, record), contextlib.suppress(_Reached):
        run()
    return kept


def replay(
    module: nn.Module,
    cut: Cut,
    kept: Mapping[str, Tensor],
    samples: int,
    device: torch.device,
    run: Callable[[], Any],
) -> Any:
    """Run the module, which is on a device, with everything before the cut answered from memory."""
    position = 0

    def answer(call: UnitCall, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal position
        if cut.calls[position] is not call:
            raise RuntimeError(f"'{call.path}' ran out of order")
        own = position
        answers = iter(enumerate(call.answers))
        position += 1

        def restored(_: Tensor) -> Tensor:
            place, spec = next(answers)
            if own in cut.needed:
                found = spec.restore(kept[f"{own}.{place}"])
                return found.clone() if cut.written else found
            return spec.zeros(samples, device)

        return map_tensors(call.value, restored)

    with _patched(module, cut, answer):
        return run()


@contextlib.contextmanager
def _patched(
    module: nn.Module, cut: Cut, handle: Callable[[UnitCall, Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """Let the submodules before the cut answer through `handle`, as often as they ran; later runs are their own."""
    by_path: dict[str, list[UnitCall]] = {}
    for call in cut.calls:
        by_path.setdefault(call.path, []).append(call)
    patched = []

    def patch(child: nn.Module, calls: list[UnitCall]) -> None:
        original, waiting = child.forward, iter(calls)

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = next(waiting, None)
            return original(*args, **kwargs) if call is None else handle(call, original, args, kwargs)

        patched.append((child, child.__dict__.get("forward")))
        child.__dict__["forward"] = forward  # a class may set attributes in a way of its own

    try:
        for path, calls in by_path.items():
            patch(module.get_submodule(path), calls)
        yield
    finally:
        for child, own in reversed(patched):
            if own is None:
                del child.__dict__["forward"]
            else:
                child.__dict__["forward"] = own
