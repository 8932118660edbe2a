"""The channel axes of any module, found by following one batch through it and checked by running it narrower."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedpmt.models.axes.factors import Dim, Factor, fix, leaves, size_of
from fedpmt.models.axes.fitting import Halved, Stop, Trial, blame, settle
from fedpmt.models.axes.following import INPUTS, OUTPUTS, Trace, trace
from fedpmt.models.structure import Axes, Axis, Fit, Group, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.types import Arrays

ROWS = 2
"""Samples that are followed."""


def traced_axes(module: nn.Module, example: Arrays) -> Axes:
    """Find which channels of a module can be cut together.

    Filters, hidden units and heads of attention are followed through one forward pass. A residual stream that is
    normalised over its channels, as a transformer's is, stays whole: with fewer channels its norms would compute
    something else. The axes found are checked by running the module with half of all channels.

    Args:
        module: Any module; it is left as it is.
        example: A batch of its inputs, or a mapping of them by name.

    Returns:
        The axes; where nothing can be cut, `stopped` says which module is in the way.
    """
    copied, inputs = randomise(module), first_rows(example)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        met = trace(copied, inputs)
        names = _name_groups(met)
        fits = _check(copied, inputs, met, names)
    axes = _axes(module, met, names)
    return replace(axes, fits=tuple(fit for fit in fits if fit.group in axes.groups))


def randomise(module: nn.Module) -> nn.Module:
    """A copy in which no weight is zero, so that a channel that is missing shows."""
    copied = copy.deepcopy(module).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=random)
                inputs = parameter[0].numel() if parameter.dim() > 1 else 16
                parameter.copy_((parameter.dim() <= 1) + noise / inputs**0.5)
    return copied


def first_rows(example: Arrays) -> Arrays:
    """A few samples of a batch."""
    if isinstance(example, Tensor):
        return example[:ROWS]
    return {name: value[:ROWS] if value.dim() else value for name, value in example.items()}


def _name_groups(met: Trace) -> dict[Factor, str]:
    """Name what can be cut after the module to whose weights it belongs first."""
    for dim in _dims(met):
        for leaf in leaves(dim):
            if leaf.normed and leaf.added:
                fix((leaf,), leaf.normed)
    for dim in _dims(met):
        # Whole heads are cut, or whole groups, not some channels of each.
        for leaf in [leaf for leaf in leaves(dim) if leaf.reason is None][1:]:
            fix((leaf,), "some channels of each group can't be cut")
    names: dict[Factor, str] = {}
    for name, dims in met.tensors.items():
        owner = name.rpartition(".")[0] or name
        for leaf in (
            leaf for dim in (dims[::-1] if name in met.transposed else dims) for leaf in leaves(dim)
        ):
            if leaf not in names and (leaf.reason is None or leaf.output):
                names[leaf] = owner if owner not in names.values() else f"{name} ({len(names)})"
    return names


def _dims(met: Trace) -> list[Dim]:
    return [dim for dims in met.tensors.values() for dim in dims]


def _check(copied: nn.Module, inputs: Arrays, met: Trace, names: Mapping[Factor, str]) -> tuple[Fit, ...]:
    """Run the module with half of all channels; a group that some module can't have fewer of is fixed."""
    fits: tuple[Fit, ...] = ()

    def attempt(cut: Mapping[Factor, str], exact: bool) -> tuple[Trial, tuple[Fit, ...], Stop | None]:
        trial = Halved(copied, met, cut, exact=exact).trial(copied, inputs, _axes(copied, met, names))
        return trial, *settle(trial, [fit for fit in fits if fit.group in cut.values()])

    for exact in (True, False):
        while cut := _to_cut(names, exact):
            trial, fits, stop = attempt(cut, exact)
            if stop is None:
                break
            groups, reason = blame(trial, stop)
            suspects = {leaf: name for leaf, name in cut.items() if name in groups}
            # Of several groups in one module only some may be to blame: those that can't be cut alone.
            alone = [leaf for leaf, name in suspects.items() if attempt({leaf: name}, exact)[2] is not None]
            fix(alone or suspects, reason)
    return fits


def _to_cut(names: Mapping[Factor, str], exact: bool) -> dict[Factor, str]:
    """What is cut in a check: all groups, or if only those can be compared, the groups that nothing normalises."""
    cut = {leaf: name for leaf, name in names.items() if leaf.reason is None}
    if exact:
        return {leaf: name for leaf, name in cut.items() if not leaf.normed}
    return cut if any(leaf.normed for leaf in cut) else {}


def _axes(module: nn.Module, met: Trace, names: Mapping[Factor, str]) -> Axes:
    standing = {leaf: name for leaf, name in names.items() if leaf.reason is None or leaf.output}
    tensors = {
        name: tuple(_axis(dim, standing) for dim in met.tensors[name])
        if name in met.tensors
        else (Axis(),) * tensor.dim()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    groups = {
        name: Group(name, leaf.size, "output" if leaf.output else _kind(name, tensors, met))
        for leaf, name in standing.items()
    }
    hidden = any(group.hidden for group in groups.values())
    return Axes(groups, tensors, met.transposed, stopped="" if hidden else _reason(met))


def _axis(dim: Dim, names: Mapping[Factor, str]) -> Axis:
    factors = leaves(dim)
    for place, leaf in enumerate(factors):
        if leaf in names:
            return Axis(names[leaf], size_of(factors[place + 1 :]), size_of(factors[:place]))
    return Axis()


def _kind(group: str, tensors: Mapping[str, tuple[Axis, ...]], met: Trace) -> Kind:
    """What the weights are that give a group's channels."""
    weights = {name: axes for name, axes in tensors.items() if len(axes) > 1}
    leaving = [
        (len(axes), axes[1 if name in met.transposed else 0].repeat)
        for name, axes in weights.items()
        if axes[1 if name in met.transposed else 0].group == group
    ]
    if any(dimensions > 2 for dimensions, _ in leaving):
        return "conv"
    return "heads" if any(repeat > 1 for _, repeat in leaving) else "linear"


def _reason(met: Trace) -> str:
    """What stops outputs of the first weights, else any tensor, from being cut."""
    leaving = [
        dims[1 if name in met.transposed else 0] for name, dims in met.tensors.items() if len(dims) > 1
    ]
    for leaf in (leaf for dim in (*leaving, *_dims(met)) for leaf in leaves(dim)):
        if leaf.reason not in (None, INPUTS, OUTPUTS):
            return str(leaf.reason)
    return "all of its channels are inputs or outputs"
