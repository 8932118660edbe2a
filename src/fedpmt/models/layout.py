"""Which tensors and which submodules belong to which layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from fedpmt.models.finding import Stage, is_inside
from fedpmt.models.structure import Axes, Layer, Structure
from fedpmt.models.trees import map_tensors, tensors_in
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from fedpmt.models.tracing import Trace

TiedOwner: TypeAlias = Literal["first", "last"]


@dataclass(frozen=True)
class Layout:
    """A module's layers as paths of submodules, and its state as tensors with one name each."""

    structure: Structure
    stages: tuple[Stage, ...]  # one for each layer
    base: tuple[str, ...]  # submodules that run before the first layer and hold nothing to be trained
    aliases: Mapping[str, tuple[str, ...]]  # parameter or buffer -> all names of that tensor
    owners: Mapping[str, int]  # parameter or buffer -> its layer; -1: the base
    returned: Mapping[int, Any]  # optional layer -> the shape of what its module returns: its tensor is empty


def arrange(
    module: nn.Module,
    stages: Sequence[Stage],
    trace: Trace | None,
    axes: Axes | Callable[[], Axes] | None,
    tied: TiedOwner = "last",
) -> Layout:
    """Give every tensor of a module its layer.

    A parameter belongs to the layer in which it is used; one that no submodule of a layer holds, such as a class token,
    to the layer that runs when it is first read. `tied` says where a parameter belongs that two layers use. One that is
    never used belongs to the first layer, which only devices that train everything train.
    """
    aliases = _aliases(module)
    owners = _Owners(module, list(stages), trace, aliases, tied)
    stages, base = owners.merge()
    parameters = dict(module.named_parameters())
    trained = {
        place: [n for n in parameters if owners.all[n] == place and parameters[n].requires_grad]
        for place in range(len(stages))
    }
    averaged = {place: [n for n in owners.buffers if owners.all[n] == place] for place in range(len(stages))}
    held = {place: [*trained[place], *averaged[place]] for place in trained}
    returned = {} if trace is None else _find_optional(stages, trace, held)
    layers = tuple(
        Layer(
            stage.name or type(module).__name__,  # the module itself has no path
            tuple(trained[place]),
            tuple(averaged[place]),
            place in returned,
        )
        for place, stage in enumerate(stages)
    )
    state = module.state_dict(keep_vars=True)
    covered = dict.fromkeys(name for layer in layers for name in layer.tensors)
    names = {name: own[0] for own in aliases.values() for name in own}
    fixed = tuple(dict.fromkeys(names[n] for n in state if n in names and names[n] not in covered))
    tensors = {**parameters, **dict(module.named_buffers())}
    own = {name: tensors[name] for name in (*covered, *fixed)}
    based = [tensors[name] for name in fixed if not is_counter(tensors[name])]
    structure = Structure(
        layers,
        {name: tuple(tensor.shape) for name, tensor in own.items()},
        axes,
        fixed,
        sum(tensor.numel() * tensor.element_size() for tensor in based),
        {name: tensor.element_size() for name, tensor in own.items()},
    )
    return Layout(structure, tuple(stages), tuple(base), aliases, owners.all, returned)


def _find_optional(
    stages: Sequence[Stage], trace: Trace, held: Mapping[int, Sequence[str]]
) -> dict[int, Any]:
    """Find the layers whose one module runs once, and returns one tensor of the shape of the first it is given."""
    found = {}
    for place, stage in enumerate(stages):
        alone = all(is_inside(name, [stage.name]) for name in held[place])
        runs = [call for call in trace.calls if call.path == stage.name] if alone else []
        values = list(tensors_in(runs[0].value)) if len(runs) == 1 else []
        if len(values) == 1 and values[0].is_floating_point() and tuple(values[0].shape) == runs[0].takes:
            found[place] = map_tensors(runs[0].value, lambda _: torch.empty(0))
    return found


def is_counter(tensor: Tensor) -> bool:
    """Whether a tensor is an integer buffer, which the module's own code makes, and changes as it runs."""
    return not (tensor.is_floating_point() or tensor.is_complex() or isinstance(tensor, nn.Parameter))


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


class _Owners:
    def __init__(
        self,
        module: nn.Module,
        stages: list[Stage],
        trace: Trace | None,
        aliases: Mapping[str, tuple[str, ...]],
        tied: TiedOwner,
    ) -> None:
        self._stages, self._aliases, self._tied = stages, aliases, tied
        self._parameters = dict(module.named_parameters())
        self._uses = {} if trace is None else trace.uses()
        self._starts = [] if trace is None else _starts(stages, trace)
        state = module.state_dict(keep_vars=True)
        self.buffers = [
            name for name, buffer in module.named_buffers() if name in state and buffer.is_floating_point()
        ]
        self.all = {name: self._find(name) for name in (*self._parameters, *self.buffers)}

    def merge(self) -> tuple[list[Stage], list[str]]:
        """Leave out stages that train nothing: those before the first are the base, others join a neighbour."""
        used = {place for name in self._parameters if self._is_trained(name) for place in self._places(name)}
        owning = {self.all[name] for name in self._parameters if self._is_trained(name)}
        if not owning:
            raise SettingError("model: no parameter requires a gradient, so there is nothing to train")
        first = min(used)
        merged: list[Stage] = []
        places = dict.fromkeys(range(first), -1)
        waiting: list[
            Stage
        ] = []  # before the first layer of its own: a tied embedding whose owner is the head
        for place, stage in enumerate(self._stages[first:], start=first):
            if place not in owning and not merged:
                waiting.append(stage)
                places[place] = 0
                continue
            if place in owning:
                merged.append(Stage(stage.name, [*(p for one in waiting for p in one.paths), *stage.paths]))
                waiting = []
            else:
                merged[-1].paths += stage.paths
            places[place] = len(merged) - 1
        self.all = {name: places[place] for name, place in self.all.items()}
        return merged, [path for stage in self._stages[:first] for path in stage.paths]

    def _is_trained(self, name: str) -> bool:
        return self._parameters[name].requires_grad

    def _find(self, name: str) -> int:
        places = self._places(name)
        last = self._tied == "last" and name in self._parameters
        return max(places) if last else min(places)

    def _places(self, name: str) -> set[int]:
        """The layers that use a tensor."""
        names = self._aliases[name]
        named = {
            place for place, stage in enumerate(self._stages) if set(names).intersection(stage.parameters)
        }
        if named:
            return named
        holding = {
            place for place, stage in enumerate(self._stages) if any(is_inside(n, stage.paths) for n in names)
        }
        times = self._uses.get(name, [])
        if not times:
            if not holding and not self._starts:
                raise SettingError(
                    f"model: parameter '{name}' is in none of the layers "
                    f"({', '.join(stage.name for stage in self._stages)}); name the layer that holds it (layers=[...])"
                )
            return holding or {0}
        if len(holding) == 1 and len(names) == 1 and not self._outside(times):
            return holding
        return {self._at(time) for time in times}

    def _outside(self, times: list[int]) -> bool:
        """Whether a tensor is also read while none of the layers' own submodules runs, such as a tied table."""
        return any(not self._inside(time) for time in times)

    def _inside(self, time: int) -> bool:
        return any(start <= time <= end for spans in self._starts for start, end in spans)

    def _at(self, time: int) -> int:
        """The layer that runs at a time, or has run last."""
        begun = [
            place for place, spans in enumerate(self._starts) if any(start <= time for start, _ in spans)
        ]
        running = [
            place for place in begun if any(start <= time <= end for start, end in self._starts[place])
        ]
        return running[-1] if running else max(begun, default=0)


def _starts(stages: Sequence[Stage], trace: Trace) -> list[list[tuple[int, int]]]:
    """When the submodules of each layer ran, begin and end."""
    return [[(call.start, call.end) for call in trace.calls if call.path in stage.paths] for stage in stages]
