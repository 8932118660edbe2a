"""Find the layers of any module: the chain of repeated blocks, what runs before it, and the heads.

The module's tree is read from the root down. A submodule is looked through where it is a wrapper, a list, or a plain
chain; a block, through which more than one tensor finds its way (a residual block, an attention layer), is one layer.
Blocks are the elements of lists in which each works on what the one before made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from fedpmt.models.chain import is_plain_sequential
from fedpmt.models.tracing import Flow
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.models.tracing import Call, Trace

NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
)
LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass
class Stage:
    """Submodules that run one after another and make one layer; parameters that were named one by one."""

    name: str
    paths: list[str]
    parameters: list[str] = field(default_factory=list)


def is_inside(name: str, paths: Sequence[str]) -> bool:
    """Whether a submodule, parameter or buffer is one of these submodules or in one of them."""
    return any(path in ("", name) or name.startswith(f"{path}.") for path in paths)


def group(items: Sequence[tuple[str, nn.Module]], blocks: Sequence[str] = ()) -> list[Stage]:
    """Make layers of submodules in the order in which they run.

    Each module with weights opens a layer. Norms and modules without weights belong to the layer before them,
    dropout to the one after it, since it is part of training what it feeds. All that runs before the first of `blocks`
    is one layer.
    """
    stages: list[Stage] = []
    leading: list[str] = []
    first_block = next((path for path, _ in items if path in blocks), None)
    in_blocks = first_block is None
    for path, module in items:
        was_in_blocks, in_blocks = in_blocks, in_blocks or path == first_block
        opens = has_parameters(module) and (not stages or not is_norm(module))
        if opens and (in_blocks or not stages):
            stages.append(Stage(path, [*leading, path]))
            leading = []
        elif not stages or (is_dropout(module) and was_in_blocks):
            leading.append(path)
        else:
            stages[-1].paths += [*leading, path]
            leading = []
    if stages:
        stages[-1].paths += leading
    return stages


def has_parameters(module: nn.Module) -> bool:
    """Whether a module holds any parameter, trained or frozen."""
    return next(module.parameters(), None) is not None


def is_norm(module: nn.Module) -> bool:
    """Whether a module scales what it is given: a norm, or anything whose parameters are all vectors."""
    return isinstance(module, NORMS) or all(parameter.ndim <= 1 for parameter in module.parameters())


def is_dropout(module: nn.Module) -> bool:
    """Whether a module drops at random in training, by torch's or somebody else's class."""
    return isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__.startswith("Drop")


def may_hold_blocks(module: nn.Module) -> bool:
    """Whether a module has a list with two composite modules of one class, which may be layers of their own."""
    for parent in module.modules():
        if isinstance(parent, LISTS) or is_plain_sequential(parent):
            kinds = [type(child) for child in parent.children() if next(child.children(), None) is not None]
            if len(set(kinds)) < len(kinds):
                return True
    return False


class Finder:
    """Finds the layers of one module by a trace of it."""

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        self._modules = dict(module.named_modules())
        self._trace = trace
        self._first: dict[str, Call] = {}
        for call in trace.calls:
            self._first.setdefault(call.path, call)

    def stages(self) -> list[Stage]:
        """The layers in the order of the forward pass."""
        units = sorted(self._units(""), key=lambda path: self._first[path].start)
        blocks = [path for path in units if self._is_block(path)]
        items = sorted([*units, *self._others(units)], key=lambda path: self._first[path].start)
        stages = group([(path, self._modules[path]) for path in items], blocks)
        return self._join_heads(stages, blocks)

    def _join_heads(self, stages: list[Stage], blocks: Sequence[str]) -> list[Stage]:
        """Make one layer of heads that stand side by side behind the blocks, such as a distillation head."""
        last_block = max((self._first[path].start for path in blocks), default=self._trace.time)
        found: list[Stage] = []
        for stage in stages:
            behind_head = bool(found) and self._first[found[-1].name].start > last_block
            if behind_head and not self._depends(stage.name, found[-1].name):
                found[-1].paths += stage.paths
            else:
                found.append(stage)
        return found

    def declared(self, layers: Sequence[str | Sequence[str]]) -> list[Stage]:
        """The layers that a user has named; what runs between two of them belongs to the first."""
        stages = [_named(self._modules, entry) for entry in layers]
        paths = [path for stage in stages for path in stage.paths]
        starts = [self._start(stage) for stage in stages]
        for earlier, later in zip(range(len(stages)), range(1, len(stages)), strict=False):
            if starts[earlier] > starts[later]:
                raise SettingError(
                    f"layers must be in the order of the forward pass: '{stages[later].name}' runs before "
                    f"'{stages[earlier].name}'"
                )
        units = [path for path in self._units_outside(paths) if not is_inside(path, paths)]
        others = [path for path in self._others([*paths, *units]) if path not in units]
        for path in sorted([*units, *others], key=lambda one: self._first[one].start):
            before = [place for place, start in enumerate(starts) if start <= self._first[path].start]
            place = before[-1] if before else 0
            if is_dropout(self._modules[path]) and place + 1 < len(stages) and before:
                place += 1
            stages[place].paths.append(path)
        return stages

    def _start(self, stage: Stage) -> int:
        """When the first of a stage's modules ran, or its first parameter was read."""
        uses = self._trace.uses()
        times = [self._first[path].start for path in stage.paths if path in self._first]
        times += [uses[name][0] for name in stage.parameters if name in uses]
        if not times:
            raise SettingError(f"layers: '{stage.name}' doesn't run in the forward pass")
        return min(times)

    def _units_outside(self, paths: Sequence[str]) -> list[str]:
        """Submodules with parameters that ran and have nothing to do with the named ones."""
        found: list[str] = []
        for path in self._first:
            holds_named = any(is_inside(named, [path]) for named in paths)
            if (
                path
                and not holds_named
                and has_parameters(self._modules[path])
                and not is_inside(path, found)
            ):
                found.append(path)
        return found

    def _units(self, path: str) -> list[str]:
        children = self._children(path)
        if children and (path == "" or self._is_looked_through(path)):
            return [unit for child in children for unit in self._units(child)]
        return [path]

    def _children(self, path: str) -> list[str]:
        """The nearest submodules that hold parameters and ran."""
        found = []
        for name, child in self._modules[path].named_children():
            child_path = f"{path}.{name}" if path else name
            if child_path not in self._first:
                if child_path in self._modules:
                    found += self._children(child_path)
            elif has_parameters(child):
                found.append(child_path)
        return sorted(found, key=lambda one: self._first[one].start)

    def _others(self, units: Sequence[str]) -> list[str]:
        """Modules without parameters that ran outside of the units."""
        found: list[str] = []
        for path in self._first:
            if path and not has_parameters(self._modules[path]) and not is_inside(path, [*units, *found]):
                found.append(path)
        return found

    def _is_looked_through(self, path: str) -> bool:
        if is_plain_sequential(self._modules[path]):
            return True
        children = self._children(path)
        if len(children) == 1 and not self._children(children[0]):
            return False  # a pooler around one linear layer: its own name says more
        if self._is_block(path):
            return self._holds_blocks(path) and self._is_transparent(path)
        return self._holds_blocks(path) or self._is_transparent(path)

    def _is_block(self, path: str) -> bool:
        return self._in_list(path) and type(self._modules[path]) in self._block_classes

    def _in_list(self, path: str) -> bool:
        if not path:
            return False
        parent = self._modules[path.rpartition(".")[0]]
        return isinstance(parent, LISTS) or is_plain_sequential(parent)

    def _holds_blocks(self, path: str) -> bool:
        inside = (one for one in self._first if one != path and is_inside(one, [path]))
        return any(self._is_block(one) for one in inside)

    @cached_property
    def _block_classes(self) -> set[type[nn.Module]]:
        """Classes of which a list runs several, each on what the one before made."""
        found: set[type[nn.Module]] = set()
        last: dict[tuple[str, type[nn.Module]], str] = {}
        for path, module in self._modules.items():
            if path not in self._first or not self._in_list(path) or is_plain_sequential(module):
                continue
            if not self._children(path):
                continue
            key = path.rpartition(".")[0], type(module)
            if key in last and type(module) not in found and self._depends(path, last[key]):
                found.add(type(module))
            last[key] = path
        return found

    def _depends(self, later: str, earlier: str) -> bool:
        """Whether one submodule works on what another one made."""
        first, second = self._first[earlier], self._first[later]
        made = set(first.outputs)
        for operation in self._trace.operations:
            if first.end < operation.time < second.start and made.intersection(operation.reads):
                made.update(operation.writes)
        return bool(made.intersection(second.inputs))

    def _is_transparent(self, path: str) -> bool:
        """Whether modules of this class are plain chains of their children wherever they run."""
        own = type(self._modules[path])
        return all(
            self._is_chain(other)
            for other in self._first
            if type(self._modules[other]) is own and self._children(other)
        )

    def _is_chain(self, path: str) -> bool:
        call = self._first[path]
        return all(
            self._flow.crossing(self._first[child].end, call.end) <= 1 for child in self._children(path)[:-1]
        )

    @cached_property
    def _flow(self) -> Flow:
        return Flow.of(self._trace)


def candidates(module: nn.Module, trace: Trace | None, path: str = "") -> list[str]:
    """What could be layers: all that is trained of the outermost module that has several such things.

    With a trace, what it has not seen is left out, and the others are in the order in which they were used.
    """
    found = _trained(module, path)
    if trace is not None:
        starts = {name: times[0] for name, times in trace.uses().items()}
        for call in reversed(trace.calls):
            starts[call.path] = call.start
        found = {name: found[name] for name in sorted(found.keys() & starts, key=lambda name: starts[name])}
    if len(found) == 1:
        ((name, child),) = found.items()
        inner = [] if child is None else candidates(child, trace, f"{name}.")
        return inner or [name]
    return list(found)


def _trained(module: nn.Module, path: str) -> dict[str, nn.Module | None]:
    """A module's own trained parameters and the submodules with any; lists, which never run, are looked into."""
    found: dict[str, nn.Module | None] = {
        f"{path}{name}": None
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    for name, child in module.named_children():
        if isinstance(child, (*LISTS, nn.ParameterList, nn.ParameterDict)):
            found |= _trained(child, f"{path}{name}.")
        elif any(parameter.requires_grad for parameter in child.parameters()):
            found[f"{path}{name}"] = child
    return found


def _named(modules: dict[str, nn.Module], entry: str | Sequence[str]) -> Stage:
    """One layer as a user names it: a submodule, a parameter, or a list of these."""
    names = [entry] if isinstance(entry, str) else list(entry)
    if not names or not all(isinstance(name, str) for name in names):
        raise SettingError(f"layers must be paths, or lists of paths (got {entry!r})")
    parameters = {name for name, _ in modules[""].named_parameters(remove_duplicate=False)}
    stage = Stage(names[0], [])
    for name in names:
        if name in modules and name:
            stage.paths.append(name)
        elif name in parameters:
            stage.parameters.append(name)
        else:
            raise SettingError.unknown(
                "model: layer", name, [path for path in (*modules, *parameters) if path]
            )
    return stage


def declare(module: nn.Module, layers: Sequence[str | Sequence[str]]) -> list[Stage]:
    """The layers that a user has named, in the order given; without a forward pass to hold them against."""
    modules = dict(module.named_modules())
    return [_named(modules, entry) for entry in layers]
