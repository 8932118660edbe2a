"""Runs a module with fewer channels: what it must know for that, and whether it then computes what it should.

Many modules keep numbers that must fit their tensors: the heads of attention, the groups of a convolution. Which of
them do is found by trying: a cut module must return what the whole one returns with the other channels zeroed.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpmt.models.adapters import find_factors
from fedpmt.models.axes.factors import Dim, Factor, leaves
from fedpmt.models.axes.following import call, describe, results, watch
from fedpmt.models.structure import Axes, Fit
from fedpmt.models.tracing import Watching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fedpmt.models.axes.following import Trace
    from fedpmt.models.structure import Structure
    from fedpmt.types import Arrays, Tensors


RECENT = 3
"""Modules that may have caused a failure in one that ran after them."""


def fit_attributes(module: nn.Module, structure: Structure, tensors: Tensors) -> None:
    """Let the numbers that a module keeps fit the tensors that it is going to be run with.

    Args:
        module: The module; no other thread may use it. Given its own tensors, or none, it is as it was made.
        structure: Its structure.
        tensors: All of its tensors, or those of a narrower part.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items() if name in structure.shapes}
    if callable(structure.channels) and all(
        shape == structure.shapes[name]
        for name, shape in shapes.items()
        if name not in find_factors(structure)  # the rank of an adapter is nobody's number of channels
    ):
        return  # nobody has asked for its axes yet, so that it was never narrower
    if structure.axes is not None and structure.axes.fits:
        _set_numbers(module, structure.axes, shapes)


@contextmanager
def fitted(module: nn.Module, axes: Axes, shapes: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Let a module's own numbers fit tensors of these shapes for a while."""
    try:
        _set_numbers(module, axes, shapes)
        yield
    finally:
        _set_numbers(module, axes, {})


def _set_numbers(module: nn.Module, axes: Axes, shapes: Mapping[str, Sequence[int]]) -> None:
    counts = axes.counts(shapes)
    for fit in axes.fits:
        owner = module.get_submodule(fit.module)
        number = fit.times * counts.get(fit.group, axes.groups[fit.group].size)
        if fit.place is None:
            setattr(owner, fit.attribute, number)
        else:
            value = list(getattr(owner, fit.attribute))
            value[fit.place] = number
            setattr(owner, fit.attribute, tuple(value))


@dataclass(frozen=True)
class Stop:
    """Where a run with fewer channels failed, or returned something else than it should."""

    path: tuple[str, ...]  # the modules that were running, outermost first
    ended: tuple[str, ...]  # those that had run just before
    progress: int  # operations until then


class _Wrong(Exception):  # noqa: N818
    """A module returned something else than it should."""


class _Count(Watching):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Trial:
    """A module to be run with fewer channels."""

    module: nn.Module
    inputs: Arrays
    axes: Axes
    tensors: Tensors  # those of the narrow module
    groups: Callable[[str], Sequence[str]]  # the groups with fewer channels that a module works on
    accepts: Callable[[int, list[Tensor]], bool] = lambda _place, _outputs: True
    """Whether the module that ends as the n-th one returned what it should."""

    def run(self, fits: Sequence[Fit]) -> Stop | None:
        """Where the narrow module fails with these numbers fitted; None if nowhere."""
        stack, ended, count = list[str](), list[str](), _Count()

        def leave(_path: str, _module: nn.Module, outputs: Any) -> None:
            if not self.accepts(len(ended), results(outputs)):
                raise _Wrong
            ended.append(stack.pop())

        axes = replace(self.axes, fits=tuple(fits))
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        try:
            with (
                fitted(self.module, axes, shapes),
                watch(self.module, lambda path, _: stack.append(path), leave),
                count,
            ):
                call_with(self.module, self.tensors, self.inputs)
        except Exception:
            # A user's module that runs on tensors of sizes it was not made for may fail in any way.
            return Stop(tuple(stack), tuple(ended[-RECENT:]), count.count)
        return None

    def candidates(self, path: str) -> Iterator[Fit]:
        """Numbers of a module that are multiples of how many channels it works on."""
        module = self.module.get_submodule(path)
        for group in self.groups(path):
            size = self.axes.groups[group].size
            for attribute, value in vars(module).items():
                for place, number in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
                    if type(number) is int and number > 0 and number % size == 0:
                        yield Fit(path, attribute, group, number // size, place)


class Halved:
    """A module that was followed, with half of the channels of the groups in `cut`.

    Each of its modules must return what it returns with the other channels zeroed. Where that is not so, because
    channels are normalised together, only the shapes are compared: then it is not `exact`.
    """

    def __init__(self, module: nn.Module, trace: Trace, cut: Mapping[Factor, str], *, exact: bool) -> None:
        self.trace, self.cut, self.exact = trace, cut, exact
        random = torch.Generator().manual_seed(0)
        self.kept = {
            leaf: torch.randperm(leaf.size, generator=random)[: (leaf.size + 1) // 2].sort().values
            for leaf in cut
        }
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.tensors = {name: self.narrow(state[name], dims) for name, dims in trace.tensors.items()}
        self.zeroed = {name: self.zero(state[name], dims) for name, dims in trace.tensors.items()}
        self.expected: list[list[Tensor]] = []

    def trial(self, module: nn.Module, inputs: Arrays, axes: Axes) -> Trial:
        """Run the module with zeroed channels, and get ready to run it without them."""
        with watch(module, lambda *_: None, self.expect):
            call_with(module, self.zeroed, inputs)
        return Trial(module, inputs, axes, self.tensors, self.groups, self.accepts)

    def expect(self, _path: str, _module: nn.Module, outputs: Any) -> None:
        """Keep what a module returns, before others change it in place."""
        self.expected.append([tensor.detach().clone() for tensor in results(outputs)])

    def narrow(self, tensor: Tensor, dims: Sequence[Dim]) -> Tensor:
        """The kept channels of a tensor."""
        flat = [leaf for dim in dims for leaf in leaves(dim)]
        found = tensor.detach().reshape([leaf.size for leaf in flat])
        for place, leaf in enumerate(flat):
            if leaf in self.cut:
                found = found.index_select(place, self.kept[leaf].to(tensor.device))
        return found.reshape(self.shape(dims))

    def zero(self, tensor: Tensor, dims: Sequence[Dim]) -> Tensor:
        """A tensor with zeros for the other channels."""
        flat = [leaf for dim in dims for leaf in leaves(dim)]
        found = tensor.detach().clone().reshape([leaf.size for leaf in flat])
        for place, leaf in enumerate(flat):
            if leaf in self.cut:
                gone = torch.ones(leaf.size, dtype=torch.bool)
                gone[self.kept[leaf]] = False
                found.index_fill_(place, gone.nonzero().flatten().to(tensor.device), 0)
        return found.reshape(tensor.shape)

    def shape(self, dims: Sequence[Dim]) -> list[int]:
        """The shape of a tensor that has only the kept channels."""
        return [
            math.prod(len(self.kept[leaf]) if leaf in self.cut else leaf.size for leaf in leaves(dim))
            for dim in dims
        ]

    def accepts(self, place: int, outputs: list[Tensor]) -> bool:
        """Whether a module returned what it does with zeroed channels, but for these."""
        _, dims = self.trace.exits[place]
        expected = self.expected[place]
        if len(outputs) != len(expected):
            return False
        for output, wanted, axes in zip(outputs, expected, dims, strict=True):
            if list(output.shape) != self.shape(axes):
                return False
            if (
                self.exact
                and output.is_floating_point()
                and not _are_close(output, self.narrow(wanted, axes))
            ):
                return False
        return True

    def groups(self, path: str) -> list[str]:
        """The groups to be cut that a module works on by itself, apart from its submodules."""
        dims = self.trace.touched.get(path, [])
        return list(dict.fromkeys(self.cut[leaf] for dim in dims for leaf in leaves(dim) if leaf in self.cut))


def call_with(module: nn.Module, tensors: Tensors, inputs: Arrays) -> None:
    """Run a module on these tensors, in the way in which it was followed."""
    functional_call(
        _Caller(module), {f"module.{name}": tensor for name, tensor in tensors.items()}, (inputs,)
    )


class _Caller(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Arrays) -> Any:
        return call(self.module, inputs)


def _are_close(one: Tensor, other: Tensor) -> bool:
    near = 1e-3 if one.dtype in (torch.float32, torch.float64) else 5e-2
    scale = float(other.detach().abs().nan_to_num(posinf=0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=near, atol=near * scale + 1e-6, equal_nan=True)


def settle(trial: Trial, fits: Sequence[Fit]) -> tuple[tuple[Fit, ...], Stop | None]:
    """Find the numbers that must be fitted, one after another; a stop where none of those left helps."""
    found = list(fits)
    stop = trial.run(found)
    while stop is not None:
        helps = _next_fit(trial, found, stop)
        if helps is None:
            return tuple(found), stop
        fit, stop = helps
        found.append(fit)
        # What a block needs the others need as well, unless they then fail where they did not before.
        alike = _alike(trial, fit, found)
        if alike and stop is not None:
            further = trial.run([*found, *alike])
            if further is None or further.progress >= stop.progress:
                found, stop = [*found, *alike], further
    return tuple(found), None


def _next_fit(trial: Trial, found: Sequence[Fit], stop: Stop) -> tuple[Fit, Stop | None] | None:
    """The number with which the run gets furthest, and how far that is; the first that leads out of the module."""
    best: tuple[Fit, Stop] | None = None
    for path in reversed(stop.ended + stop.path):
        for fit in trial.candidates(path):
            if any(_same_number(fit, one) for one in found):
                continue
            further = trial.run([*found, fit])
            if further is None:
                return fit, None
            if further.progress > (best[1] if best else stop).progress:
                best = fit, further
                if stop.path[-1] not in further.path:
                    return best
    return best


def _same_number(one: Fit, other: Fit) -> bool:
    return (one.module, one.attribute, one.place) == (other.module, other.attribute, other.place)


def _alike(trial: Trial, fit: Fit, found: Sequence[Fit]) -> list[Fit]:
    """The same number in modules whose paths differ in how they are counted alone: `h.3.attn` for `h.0.attn`."""
    return [
        other
        for path, _ in trial.module.named_modules()
        if _uncounted(path) == _uncounted(fit.module)
        for other in trial.candidates(path)
        if (other.attribute, other.place, other.times) == (fit.attribute, fit.place, fit.times)
        and not any(_same_number(other, one) for one in found)
    ]


def _uncounted(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def blame(trial: Trial, stop: Stop) -> tuple[Sequence[str], str]:
    """The groups of which a module needs all channels, and which module that is."""
    for path in reversed(stop.path):
        if groups := trial.groups(path):
            return groups, f"{describe(path, trial.module.get_submodule(path))} can't run with fewer channels"
    return list(trial.axes.groups), "the forward pass can't run with fewer channels"
