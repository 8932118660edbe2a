"""The channel axes of a model, read off its modules: a chain's directly, another module's from a trace of it.

Channels are followed from module to module. A convolution or a linear layer opens a group of its own, a norm and
whatever works on each channel alone leaves the group as it is, a flatten makes each channel a run of inputs, and
tensors that are added are of one group: a residual block and its shortcut keep the same channels.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn import functional

from fedpmt.models.structure import Axes, Axis, Group, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

POOLS = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)
ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
    nn.Identity,
    nn.Flatten,
    *POOLS,
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

# What a forward pass may call by itself. All of it works on each channel alone.
CALLS = {
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    functional.relu,
    functional.leaky_relu,
    functional.elu,
    functional.gelu,
    functional.silu,
    functional.dropout,
}
POOL_CALLS = {
    functional.max_pool2d,
    functional.avg_pool2d,
    functional.adaptive_avg_pool2d,
    functional.adaptive_max_pool2d,
}
SUMS = {operator.add, operator.iadd, torch.add}


@dataclass(frozen=True)
class _Channels:
    """What is known of a hidden tensor: its group, and whether its samples are images or rows."""

    group: str
    images: bool


class _Unknown(Exception):  # noqa: N818
    """A module or a call that may mix channels in a way of its own."""


@dataclass
class _Groups:
    """Groups and tensor axes as they are met; groups that are added become one."""

    groups: dict[str, Group] = field(default_factory=dict)
    tensors: dict[str, tuple[Axis, ...]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)  # group -> the one it is part of

    def root(self, name: str) -> str:
        while name in self.same:
            name = self.same[name]
        return name

    def join(self, one: str, other: str) -> None:
        """These two are added, so their channels go together."""
        # The one met first gives its name.
        first, second = sorted((self.root(one), self.root(other)), key=list(self.groups).index)
        if first == second:
            return
        if self.groups[first].size != self.groups[second].size:
            raise _Unknown
        kinds = {self.groups[first].kind, self.groups[second].kind}
        # What is added to the inputs cannot be cut either.
        kind: Kind = next(kind for kind in ("input", "output", "conv", "linear") if kind in kinds)
        self.groups[first] = replace(self.groups[first], kind=kind)
        del self.groups[second]
        self.same[second] = first

    def weighted(self, path: str, child: nn.Module, inputs: str | None) -> str:
        """A linear layer or a convolution: a new group; None stands for the model's inputs."""
        if f"{path}.weight" in self.tensors:
            raise _Unknown  # it runs twice
        if type(child) is nn.Linear:
            before, after, kernel = child.in_features, child.out_features, 0
        elif isinstance(child, CONVOLUTIONS) and type(child) in CONVOLUTIONS and child.groups == 1:
            before, after, kernel = child.in_channels, child.out_channels, len(child.kernel_size)
        else:
            raise _Unknown
        if inputs is None:
            inputs = "input"
            self.groups.setdefault(inputs, Group(inputs, before, "input"))
        size = self.groups[self.root(inputs)].size
        if before % size:
            raise _Unknown
        self.groups[path] = Group(path, after, "conv" if kernel else "linear")
        self.tensors[f"{path}.weight"] = (Axis(path), Axis(inputs, before // size), *[Axis()] * kernel)
        if child.bias is not None:
            self.tensors[f"{path}.bias"] = (Axis(path),)
        return path

    def norm(self, path: str, child: nn.modules.batchnorm._BatchNorm, inputs: str | None) -> None:
        """BatchNorm. After a flatten each channel is normalised at every position: the statistics repeat."""
        if inputs is None or f"{path}.weight" in self.tensors:
            raise _Unknown
        repeat = child.num_features // self.groups[self.root(inputs)].size
        self.tensors |= {
            f"{path}.{name}": (Axis(inputs, repeat),)
            for name in ("weight", "bias", "running_mean", "running_var")
        }

    def axes(self, output: str) -> Axes:
        """All that was met; the outputs are the classes."""
        last = self.root(output)
        self.groups[last] = replace(self.groups[last], kind="output")
        tensors = {
            name: tuple(
                axis if axis.group is None else replace(axis, group=self.root(axis.group)) for axis in each
            )
            for name, each in self.tensors.items()
        }
        return Axes(self.groups, tensors)


def sequential_axes(module: nn.Module, paths: Sequence[str]) -> Axes | None:
    """Follow the channels through a chain of modules; None where one of them mixes channels in its own way."""
    if _is_frozen_or_tied(module):
        return None
    found, current = _Groups(), None
    try:
        for path in paths:
            child = module.get_submodule(path)
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                found.norm(path, child, current)
            elif not isinstance(child, ELEMENTWISE):
                current = found.weighted(path, child, current)
    except _Unknown:
        return None
    return None if current is None else found.axes(current)


def traced_axes(module: nn.Module) -> Axes | None:
    """Follow the channels through the calls that a forward pass makes: a ResNet's, for one.

    None where the pass cannot be traced without inputs, or does what is not known here to leave channels apart.
    """
    if _is_frozen_or_tied(module):
        return None
    try:
        graph = fx.Tracer().trace(module)
    except Exception:
        # A user's forward pass meets a stand-in for its inputs here, and may fail on it in any way.
        return None
    found = _Groups()
    known: dict[fx.Node, _Channels | None] = {}
    output: _Channels | None = None
    try:
        for node in graph.nodes:
            if node.op == "output":
                output = known[_only(node)]
            else:
                known[node] = _follow(module, node, known, found)
    except (_Unknown, KeyError):
        return None
    numbers = {name for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    if output is None or not numbers <= found.tensors.keys():
        return None
    return found.axes(output.group)


def _is_frozen_or_tied(module: nn.Module) -> bool:
    """Whether some weights do not go their own way, which cutting does not know how to follow."""
    every = list(module.named_parameters(remove_duplicate=False))
    return len(every) > len(list(module.parameters())) or not all(one.requires_grad for _, one in every)


def _only(node: fx.Node) -> fx.Node:
    """The one tensor that a call works on."""
    if len(node.all_input_nodes) != 1:
        raise _Unknown
    return node.all_input_nodes[0]


def _follow(
    module: nn.Module, node: fx.Node, known: dict[fx.Node, _Channels | None], found: _Groups
) -> _Channels | None:
    """What comes out of one call; None for the model's inputs and what leaves them as they are."""
    if node.op == "placeholder":
        return None
    if node.op == "call_module":
        return _module(str(node.target), module.get_submodule(str(node.target)), known[_only(node)], found)
    if node.op not in ("call_function", "call_method"):
        raise _Unknown
    target = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target), None)
    if target in SUMS or target in (torch.Tensor.add, torch.Tensor.add_):
        return _sum(node, known, found)
    before = known[_only(node)]
    if target in CALLS or target in (torch.Tensor.relu, torch.Tensor.relu_, torch.Tensor.tanh):
        return before
    if target in POOL_CALLS and _images(before):
        return before
    if target in (torch.flatten, torch.Tensor.flatten) and _argument(node, 1, "start_dim") == 1:
        return before and replace(before, images=False)
    if target in (torch.mean, torch.Tensor.mean) and _images(before):
        # Over positions, not over channels; kept axes leave an image of one position.
        over = _argument(node, 1, "dim")
        if set(over if isinstance(over, tuple | list) else [over]) in ({2, 3}, {-1, -2}):
            return before and replace(before, images=bool(_argument(node, 2, "keepdim")))
    raise _Unknown


def _module(path: str, child: nn.Module, before: _Channels | None, found: _Groups) -> _Channels | None:
    inputs = None if before is None else before.group
    if isinstance(child, nn.modules.batchnorm._BatchNorm):
        found.norm(path, child, inputs)
        return before
    if isinstance(child, nn.Flatten):
        if (child.start_dim, child.end_dim) != (1, -1):
            raise _Unknown
        return before and replace(before, images=False)
    if isinstance(child, POOLS) and not _images(before):
        raise _Unknown
    if isinstance(child, ELEMENTWISE):
        return before
    convolution = isinstance(child, CONVOLUTIONS)
    if before is not None and before.images != convolution:
        raise _Unknown  # a linear layer works on the last axis, where an image has no channels
    return _Channels(found.weighted(path, child, inputs), images=convolution)


def _sum(node: fx.Node, known: dict[fx.Node, _Channels | None], found: _Groups) -> _Channels:
    terms = [known[term] for term in node.all_input_nodes]
    first = terms[0] if terms else None
    if len(node.args) != 2 or len(terms) not in (1, 2) or first is None:
        raise _Unknown
    if len(terms) == 1 and node.args[0] is not node.args[1]:
        raise _Unknown  # a number is added, which a dropped channel would not have
    for other in terms[1:]:
        if other is None or other.images != first.images:
            raise _Unknown
        found.join(first.group, other.group)
    return first


def _images(channels: _Channels | None) -> bool:
    return channels is None or channels.images


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)
