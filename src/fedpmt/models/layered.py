"""Any `nn.Module` as an ordered list of layers that can be run in two halves."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpmt.models.axes import chain_axes, declared_axes, fit_attributes, traced_axes
from fedpmt.models.structure import Axes, Layer, Structure
from fedpmt.types import Arrays, SettingError, Tensors

if TYPE_CHECKING:
    from fedpmt.models.axes.declared import Declared

PREFIX_BATCH = 64
"""Samples at a time when a frozen prefix is run for the cache: enough to be fast, few enough to stay in memory."""

NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
)


class LayeredModel:
    """A module, its layers in the order of the forward pass, and ways to run it on given tensors.

    Weights are arguments, never state: the module only lends its forward pass. It is changed while
    it runs, so each thread works on its own `clone`.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[tuple[str, Sequence[str]]],
        axes: Axes | Callable[[], Axes] | None,
        composable: bool,
    ) -> None:
        self.module = module
        self.composable = composable
        # Looking for tensors with two names costs a fifth of a step on a small net: only where there are some.
        self._tied = len(list(module.named_parameters(remove_duplicate=False))) > len(
            list(module.parameters())
        )
        self._stages = tuple((name, tuple(paths)) for name, paths in stages)
        self._halves: dict[tuple[int, int], tuple[nn.Module, dict[str, str]]] = {}
        state = {name for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
        # What its owner has frozen (requires_grad_(False)) is part of the module, not of the federation.
        parameters = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        layers = tuple(
            Layer(
                name,
                tuple(n for n in parameters if _inside(n, paths)),
                tuple(n for n, _ in module.named_buffers() if n in state and _inside(n, paths)),
            )
            for name, paths in self._stages
        )
        shapes = {n: tuple(t.shape) for n, t in (*module.named_parameters(), *module.named_buffers())}
        covered = {name for layer in layers for name in layer.tensors}
        self.structure = Structure(layers, {name: shapes[name] for name in covered}, axes)

    def clone(self) -> LayeredModel:
        """The same model for another thread."""
        # What was found out about the channels is shared, or found once for all.
        axes = partial(getattr, self.structure, "axes")
        return LayeredModel(copy.deepcopy(self.module), self._stages, axes, self.composable)

    def to(self, device: torch.device) -> LayeredModel:
        """The same model on a device; itself where it is there already."""
        if all(tensor.device.type == device.type for tensor in self.module.state_dict().values()):
            return self
        moved = copy.deepcopy(self.module).to(device)
        return LayeredModel(moved, self._stages, partial(getattr, self.structure, "axes"), self.composable)

    def initial(self) -> dict[str, Tensor]:
        """A copy of the module's own weights."""
        state = self.module.state_dict()
        return {name: state[name].detach().clone().contiguous() for name in self.structure.tensors}

    def set_training(self, trained: Sequence[bool], *, norms: bool = True) -> None:
        """Put trained layers in training mode; frozen ones stay as received, in evaluation mode.

        Without `norms` modules with running statistics stay so as well, wherever they are.
        """
        self.module.train(all(trained))
        for (_, paths), on in zip(self._stages, trained, strict=True):
            for path in paths:
                self.module.get_submodule(path).train(on)
        if not norms:
            for module in self.module.modules():
                if getattr(module, "track_running_stats", False):
                    module.eval()

    def forward(self, tensors: Tensors, inputs: Arrays) -> Tensor:
        """Run the whole model on these tensors."""
        with fit_attributes(self.module, self.structure, tensors):
            return _call(self.module, dict(tensors), inputs, tied=self._tied)

    def run(self, first: int, last: int, tensors: Tensors, inputs: Arrays) -> Tensor:
        """Run layers `first` to `last - 1` (counted from 0) of a model that is a chain of its layers."""
        if (first, last) not in self._halves:
            self._halves[first, last] = self._chain(first, last)
        chain, names = self._halves[first, last]
        return _call(chain, {local: tensors[name] for name, local in names.items()}, inputs, tied=self._tied)

    def prefix(self, cut: int, tensors: Tensors, inputs: Arrays) -> Tensor:
        """The first `cut` layers, without a graph."""
        with torch.no_grad():
            return self.run(0, cut, tensors, inputs)

    def suffix(self, cut: int, tensors: Tensors, hidden: Tensor) -> Tensor:
        """The layers from `cut` on."""
        return self.run(cut, len(self._stages), tensors, hidden)

    def modules_of(self, first: int, last: int) -> list[tuple[str, nn.Module]]:
        """The modules of layers `first` to `last - 1` in order, each with its path."""
        paths = [path for _, stage in self._stages[first:last] for path in stage]
        return [(path, self.module.get_submodule(path)) for path in paths]

    def _chain(self, first: int, last: int) -> tuple[nn.Module, dict[str, str]]:
        if not self.composable:
            raise SettingError("this model is not a chain of its layers, so it cannot be run in halves")
        modules = self.modules_of(first, last)
        chain = nn.Sequential(*(module for _, module in modules))
        names = {}
        for position, (path, _) in enumerate(modules):
            for name in self.structure.tensors:
                if _inside(name, (path,)):
                    names[name] = f"{position}.{name[len(path) + 1 :]}"
        return chain, names


def _call(module: nn.Module, tensors: dict[str, Tensor], inputs: Arrays, *, tied: bool = True) -> Tensor:
    # A dict of inputs is a call by keyword, as most modules with several inputs expect.
    arguments, keywords = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    outputs: Tensor = functional_call(module, tensors, arguments, keywords, tie_weights=tied)
    return outputs


def _inside(name: str, paths: Sequence[str]) -> bool:
    return any(path == "" or name.startswith(f"{path}.") for path in paths)


def layered(
    module: nn.Module,
    *,
    layers: Sequence[str] | None = None,
    example: Arrays | None = None,
    axes: Axes | Declared | None = None,
) -> LayeredModel:
    """Find the layers of a module.

    An `nn.Sequential` gives its own. For another module, `layers` names its submodules in the order
    of the forward pass (a residual block is one layer), or they are found by running `example`, one
    batch of inputs. What cannot be found is refused with the reason. Only a plain `nn.Sequential` is known to
    be a chain of its layers, so only there can a frozen prefix be cached. `axes` says which channels go together, for
    cutting by width: for each tensor, a group's name for each of its axes. They are read off a chain, and found for
    another module by following `example` through it.

    >>> net = nn.Sequential(OrderedDict(flat=nn.Flatten(), a=nn.Linear(4, 3), act=nn.ReLU(), b=nn.Linear(3, 2)))
    >>> [layer.name for layer in layered(net).structure.layers]
    ['a', 'b']
    """
    check_shapes(module)
    found: Axes | Callable[[], Axes] | None = None
    if isinstance(axes, Mapping):
        axes = declared_axes(module, axes, example)
    if layers is not None:
        stages, composable = _declared(module, layers), False
    elif _is_plain_sequential(module):
        stages, composable = (
            _grouped([(path, module.get_submodule(path)) for path in _leaves(module, "")]),
            True,
        )
        found = chain_axes(module, [path for _, paths in stages for path in paths])
    elif example is not None:
        stages, composable = _found(module, example), False
    else:
        raise SettingError(
            f"model: {type(module).__name__} is not an nn.Sequential; "
            "name its layers in the order of the forward pass (layers=[...])"
        )
    if not stages:
        raise SettingError(f"model: {type(module).__name__} has no layer with weights")
    _check_cover(module, stages)
    if found is None and example is not None:
        found = partial(traced_axes, module, example)
    return LayeredModel(module, stages, axes or found, composable)


def check_shapes(module: nn.Module) -> None:
    """Refuse a module whose lazy layers have not seen a batch yet."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise SettingError(
                f"model: parameter '{name}' has no shape yet; run one batch through the module first"
            )


def _leaves(module: nn.Module, path: str) -> Iterator[str]:
    """Paths of the modules a (nested) Sequential runs one after another."""
    # Not named_children, which leaves out the second use of one module, such as a shared activation.
    for name, child in module._modules.items():
        child_path = f"{path}.{name}" if path else name
        if child is not None and _is_plain_sequential(child):
            yield from _leaves(child, child_path)
        else:
            yield child_path


def _is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module does nothing but run its children in a row."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and not hooked(module)
    )


def hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _has_weights(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _grouped(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, list[str]]]:
    """Each weighted module opens a layer; norms and stateless modules belong to the layer before."""
    stages: list[tuple[str, list[str]]] = []
    leading: list[str] = []
    for path, module in modules:
        if _has_weights(module) and (not stages or not isinstance(module, NORMS)):
            stages.append((path, [*leading, path]))
            leading = []
        elif stages:
            stages[-1][1].append(path)
        else:
            leading.append(path)
    return stages


def _declared(module: nn.Module, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    paths = [path for path, _ in module.named_modules()]
    for name in names:
        if name not in paths:
            raise SettingError.unknown("model: layer", name, [path for path in paths if path])
    return [(name, [name]) for name in names]


def _found(module: nn.Module, example: Arrays) -> list[tuple[str, list[str]]]:
    """The weighted children in the order in which the forward pass enters them."""
    candidates: OrderedDict[str, nn.Module] = OrderedDict()

    def descend(parent: nn.Module, path: str) -> None:
        for name, child in parent.named_children():
            child_path = f"{path}.{name}" if path else name
            if _is_stack(child):
                descend(child, child_path)
            else:
                candidates[child_path] = child

    descend(module, "")
    order: list[str] = []
    hooks = [
        child.register_forward_pre_hook(lambda _m, _a, path=path: order.append(path))
        for path, child in candidates.items()
    ]
    was_training = module.training
    try:
        module.eval()
        with torch.no_grad():
            _call(module, {}, example)
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    weighted = [path for path in order if _has_weights(candidates[path])]
    twice = next((path for path in weighted if weighted.count(path) > 1), None)
    if twice is not None:
        raise SettingError(
            f"model: '{twice}' runs more than once in a forward pass, so its depth is not defined; "
            "name the layers (layers=[...]) with it inside one of them"
        )
    return _grouped([(path, candidates[path]) for path in weighted])


def _is_stack(module: nn.Module) -> bool:
    """Whether a module only holds layers in a row, as nn.TransformerEncoder does; anything else is one layer."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return True
    holds_list = any(isinstance(child, nn.ModuleList) for child in module.children())
    return holds_list and next(module.parameters(recurse=False), None) is None


def _check_cover(module: nn.Module, stages: Sequence[tuple[str, Sequence[str]]]) -> None:
    owners: dict[str, str] = {}
    for layer, paths in stages:
        for name, _ in module.named_parameters(remove_duplicate=False):
            if _inside(name, paths):
                if name in owners:
                    raise SettingError(
                        f"model: parameter '{name}' is in two layers, '{owners[name]}' and '{layer}'"
                    )
                owners[name] = layer
    missing = [name for name, p in module.named_parameters() if name not in owners and p.requires_grad]
    if missing:
        raise SettingError(
            f"model: parameter '{missing[0]}' is in none of the layers "
            f"({', '.join(name for name, _ in stages)}); wrap it in a submodule or name the layers (layers=[...])"
        )
    tied: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = tied.setdefault(id(parameter), name)
        if owners.get(first) != owners.get(name):
            raise SettingError(
                f"model: '{first}' and '{name}' are one tensor in two layers, so it cannot be frozen in one and "
                "trained in the other; name layers that hold both"
            )
