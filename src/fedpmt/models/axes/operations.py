"""What each operation of a forward pass does to the axes of its tensors.

The operations are ATen's, a small set to which all of torch's functions and modules come down. One that is not
known here is taken to mix whatever it touches, so that an axis is never cut by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedpmt.models.axes.factors import Dim, Factor, fix, join, leaves, new_dim, regroup, size_of
from fedpmt.models.trees import tensors_in


@dataclass
class Followed:
    """A tensor of the forward pass: its axes, and whether it is made of parameters alone."""

    tensor: Tensor  # held, so that its identity is not given to another one
    dims: tuple[Dim, ...]
    weights: bool = False


@dataclass
class Follower:
    """All tensors that were met so far."""

    known: dict[int, Followed] = field(default_factory=dict)
    where: str = ""  # the module that runs now
    used: dict[int, None] = field(default_factory=dict)  # tensors that went into an operation, in order
    transposed: set[int] = field(default_factory=set)  # weights that are stored as inputs x outputs

    def of(self, tensor: Tensor) -> Followed:
        """A tensor's axes. One that came from nowhere has the size that the code gave it: it is fixed."""
        self.used.setdefault(id(tensor))
        if id(tensor) not in self.known:
            dims = tuple(new_dim(size, self.where) for size in tensor.shape)
            self.known[id(tensor)] = Followed(tensor, dims)
        return self.known[id(tensor)]

    def dims(self, tensor: Tensor) -> tuple[Dim, ...]:
        """The axes of a tensor."""
        return self.of(tensor).dims

    def give(self, tensor: Tensor, dims: Sequence[Dim], *, weights: bool = False) -> None:
        """Say what the axes of a result are."""
        self.known[id(tensor)] = Followed(tensor, tuple(dims), weights)

    def join(self, one: Dim, other: Dim) -> None:
        """Two axes are matched position by position."""
        if size_of(one) > 1 and size_of(other) > 1:
            join(one, other, self.where)

    def fix(self, *dims: Dim) -> None:
        """Positions of these axes are mixed."""
        for dim in dims:
            fix(dim, self.where)

    def fixed(self, size: int) -> Dim:
        """An axis of positions."""
        return new_dim(size, self.where)

    def contract(self, one: Followed, dim: Dim, other: Followed, with_dim: Dim) -> None:
        """Products are summed over an axis.

        A channel that a weight does not have adds nothing to the sum; among activations it would have.
        """
        self.join(dim, with_dim)
        if not (one.weights or other.weights):
            self.fix(dim, with_dim)


Arguments: TypeAlias = Mapping[str, Any]
"""What an operation was called with, by the names of its schema."""

Rule: TypeAlias = Callable[[Follower, Arguments, Any], None]
"""What follows for the result, the last argument, of an operation on these arguments."""

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what these operations do."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def follow(follower: Follower, operation: Any, arguments: Arguments, result: Any) -> None:
    """Apply the rule of an operation."""
    name = operation._schema.name.removeprefix("aten::")
    # `relu_` does in place what `relu` does.
    name = name if name in RULES or name.startswith("_") else name.removesuffix("_")
    if name in RULES:
        RULES[name](follower, arguments, result)
    elif _is_pointwise(operation, name):
        pointwise(follower, arguments, result)
    else:
        mix(follower, arguments, result)


def _is_pointwise(operation: Any, name: str) -> bool:
    if torch.Tag.pointwise in operation.tags:
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def mix(follower: Follower, arguments: Arguments, result: Any) -> None:
    """An operation that is not known: nothing that goes into it can be cut."""
    for tensor in tensors_in(arguments):
        follower.fix(*follower.dims(tensor))
    for tensor in tensors_in(result):
        follower.give(tensor, [follower.fixed(size) for size in tensor.shape])


def pointwise(follower: Follower, arguments: Arguments, result: Any) -> None:
    """Axes are matched from the last one on; one of size 1 goes with any."""
    inputs = [follower.of(tensor) for tensor in tensors_in(arguments)]
    for output in tensors_in(result):
        dims: list[Dim] = []
        for place in range(-output.dim(), 0):
            met = [
                one.dims[place]
                for one in inputs
                if len(one.dims) >= -place and one.tensor.shape[place] == output.shape[place]
            ]
            for dim in met[1:]:
                follower.join(met[0], dim)
            dims.append(met[0] if met else follower.fixed(output.shape[place]))
        follower.give(output, dims, weights=bool(inputs) and all(one.weights for one in inputs))


@rule("add", "sub")
def _add(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    pointwise(follower, arguments, result)
    terms = [follower.of(tensor) for tensor in tensors_in(arguments)]
    if sum(not term.weights for term in terms) > 1:
        for leaf in (leaf for dim in follower.dims(result) for leaf in leaves(dim)):
            leaf.added = True


@rule(
    *(
        "clone",
        "detach",
        "alias",
        "contiguous",
        "_to_copy",
        "lift_fresh",
        "copy",
        "dropout",
        "native_dropout",
    ),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "bernoulli", "fill"),
    *("masked_fill", "where", "addcmul", "addcdiv", "prelu", "_prelu_kernel", "rrelu_with_noise"),
    *("hardswish", "hardsigmoid", "hardtanh", "log_sigmoid_forward"),
)
def _same(follower: Follower, arguments: Arguments, result: Any) -> None:
    pointwise(follower, arguments, result)


# Sums of products


@rule("mm", "bmm", "addmm", "baddbmm")
def _matmul(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    *bias, left, right = tensors_in(arguments)
    a, b = follower.of(left), follower.of(right)
    follower.contract(a, a.dims[-1], b, b.dims[-2])
    for one, other in zip(a.dims[:-2], b.dims[:-2], strict=True):
        follower.join(one, other)
    if b.weights:
        follower.transposed.add(id(right))
    dims = (*a.dims[:-1], b.dims[-1])
    for added in bias:
        for dim, own in zip(reversed(dims), reversed(follower.dims(added)), strict=False):
            follower.join(dim, own)
    follower.give(result, dims, weights=a.weights and b.weights)


@rule("convolution")
def _convolution(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    weight, bias, transposed, groups = (
        arguments[name] for name in ("weight", "bias", "transposed", "groups")
    )
    x, w = follower.of(arguments["input"]), follower.of(weight)
    follower.fix(*x.dims[2:], *w.dims[2:])
    if groups > 1 and transposed:
        mix(follower, arguments, result)
        return
    if transposed:
        follower.transposed.add(id(weight))
    entering, leaving = (w.dims[0], w.dims[1]) if transposed else (w.dims[1], w.dims[0])
    if groups > 1:
        # Whole groups are cut, from the inputs and from the outputs.
        group = (Factor(groups),)
        entering = (*group, *entering)
        follower.join(leaving, (*group, *new_dim(size_of(leaving) // groups)))
    follower.contract(x, x.dims[1], w, entering)
    if bias is not None:
        follower.join(leaving, follower.dims(bias)[0])
    follower.give(result, [x.dims[0], leaving, *map(follower.fixed, result.shape[2:])])


@rule("embedding")
def _embedding(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    rows, columns = follower.dims(arguments["weight"])
    follower.fix(rows)
    follower.transposed.add(id(arguments["weight"]))
    follower.give(result, (*follower.dims(arguments["indices"]), columns))


# Norms and other reductions


@rule(
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
)
def _batch_norm(follower: Follower, arguments: Arguments, result: Any) -> None:
    inputs, *others = tensors_in(arguments)
    dims = follower.dims(inputs)
    for own in others:
        follower.join(dims[1], follower.dims(own)[0])
    _first(follower, result, dims)


@rule("native_group_norm")
def _group_norm(follower: Follower, arguments: Arguments, result: Any) -> None:
    inputs, *others = tensors_in(arguments)
    groups, dims = arguments["group"], follower.dims(inputs)
    within = new_dim(inputs.shape[1] // groups, follower.where)
    follower.join(dims[1], (*new_dim(groups), *within))
    follower.fix(*dims[2:])
    for own in others:
        follower.join(dims[1], follower.dims(own)[0])
    _first(follower, result, dims)


@rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(follower: Follower, arguments: Arguments, result: Any) -> None:
    inputs, *others = tensors_in(arguments)
    dims = follower.dims(inputs)
    over = dims[len(dims) - len(arguments["normalized_shape"]) :]
    # With fewer channels the statistics are others: the net is right, but not the same as one with zeroed channels.
    for leaf in (leaf for dim in over for leaf in leaves(dim)):
        leaf.normed = leaf.normed or follower.where
    for own in others:
        for dim, mine in zip(over, follower.dims(own), strict=True):
            follower.join(dim, mine)
    _first(follower, result, dims)


def _first(follower: Follower, result: Any, dims: Sequence[Dim]) -> None:
    """The first result has these axes; others are statistics that nobody reads."""
    follower.give(next(tensors_in(result)), dims)


@rule(
    "mean",
    "sum",
    "amax",
    "amin",
    "max",
    "min",
    "var",
    "std",
    "logsumexp",
    "linalg_vector_norm",
    "argmax",
    "any",
    "all",
)
def _reduction(follower: Follower, arguments: Arguments, result: Any) -> None:
    inputs = arguments["self"]
    dims, over = follower.dims(inputs), _places(inputs, arguments.get("dim"))
    follower.fix(*(dims[place] for place in over))
    for output in tensors_in(result):
        kept = output.dim() == inputs.dim()
        follower.give(
            output,
            [() if place in over else dim for place, dim in enumerate(dims) if kept or place not in over],
        )


def _places(inputs: Tensor, over: int | Sequence[int] | None) -> list[int]:
    """The axes that an operation is over, counted from the first one; without any it is over all."""
    if over is None or over == []:
        return list(range(inputs.dim()))
    return [place % max(1, inputs.dim()) for place in ([over] if isinstance(over, int) else over)]


@rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "flip", "roll", "sort", "topk")
def _along(follower: Follower, arguments: Arguments, result: Any) -> None:
    """Mixes along axes and leaves the others as they are."""
    inputs = arguments["self"]
    dims = list(follower.dims(inputs))
    for place in _places(inputs, arguments.get("dims", arguments.get("dim"))):
        follower.fix(dims[place])
        dims[place] = follower.fixed(next(tensors_in(result)).shape[place])
    for output in tensors_in(result):
        follower.give(output, dims)


@rule(
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
)
def _pool(follower: Follower, arguments: Arguments, result: Any) -> None:
    """Works on positions, which stand behind samples and channels."""
    dims = follower.dims(arguments["self"])
    follower.fix(*dims[2:])
    for output in tensors_in(result):
        follower.give(output, [*dims[:2], *map(follower.fixed, output.shape[2:])])


@rule("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def _pad(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    dims = list(follower.dims(arguments["self"]))
    for place, size in enumerate(result.shape):
        if size_of(dims[place]) != size:
            follower.fix(dims[place])
            dims[place] = follower.fixed(size)
    follower.give(result, dims)


# Views


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten")
def _view(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    inputs = follower.of(arguments["self"])
    dims = regroup(inputs.dims, result.shape)
    if dims is None:
        mix(follower, arguments, result)
    else:
        follower.give(result, dims, weights=inputs.weights)


@rule("permute")
def _permute(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    inputs, order = follower.of(arguments["self"]), arguments["dims"]
    follower.give(result, [inputs.dims[place] for place in order], weights=inputs.weights)


@rule("transpose", "t")
def _transpose(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    inputs = follower.of(arguments["self"])
    dims = list(inputs.dims)
    one, other = arguments.get("dim0", 0), arguments.get("dim1", -1)
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
    follower.give(result, dims, weights=inputs.weights)


@rule("expand")
def _expand(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    inputs = follower.of(arguments["self"])
    dims = ((),) * (result.dim() - len(inputs.dims)) + inputs.dims
    # An axis that is repeated matches one of any size.
    new = [
        dim if size_of(dim) == size else new_dim(size) for dim, size in zip(dims, result.shape, strict=True)
    ]
    follower.give(result, new, weights=inputs.weights)


@rule("select", "unbind")
def _select(follower: Follower, arguments: Arguments, result: Any) -> None:
    inputs = follower.of(arguments["self"])
    place = arguments["dim"] % len(inputs.dims)
    follower.fix(inputs.dims[place])
    for output in tensors_in(result):
        follower.give(output, inputs.dims[:place] + inputs.dims[place + 1 :], weights=inputs.weights)


@rule("slice", "split", "split_with_sizes", "narrow")
def _pieces(follower: Follower, arguments: Arguments, result: Any) -> None:
    """Pieces of the same size are tiles: what is cut of one is cut of all of them."""
    inputs = follower.of(arguments["self"])
    for output in tensors_in(result):
        dims = list(inputs.dims)
        for place, (before, after) in enumerate(zip(inputs.tensor.shape, output.shape, strict=True)):
            if before != after:
                aligned = _is_aligned(inputs.tensor, output, place)
                dims[place] = _tile(follower, dims[place], before, after, aligned=aligned)
        follower.give(output, dims, weights=inputs.weights)


def _is_aligned(inputs: Tensor, output: Tensor, place: int) -> bool:
    """Whether a piece begins where a tile does."""
    stride, after = inputs.stride(place), output.shape[place]
    if output.stride(place) != stride and after > 1:
        return False  # every other position
    start = (output.storage_offset() - inputs.storage_offset()) // stride if stride else 0
    return after > 0 and start % after == 0


def _tile(follower: Follower, dim: Dim, before: int, after: int, *, aligned: bool) -> Dim:
    tiles = regroup([dim], [before // after, after]) if aligned and before % after == 0 else None
    if tiles is None:
        follower.fix(dim)
        return follower.fixed(after)
    follower.fix(tiles[0])
    return tiles[1]


@rule("glu")
def _glu(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    """One half of an axis is multiplied with the other half."""
    dims, place = list(follower.dims(arguments["self"])), arguments["dim"]
    dims[place] = _tile(follower, dims[place], result.shape[place] * 2, result.shape[place], aligned=True)
    follower.give(result, dims)


@rule("cat", "stack")
def _cat(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    tensors = [follower.of(one) for one in arguments["tensors"] if one.numel() or one.dim() == result.dim()]
    place = arguments["dim"] % result.dim()
    stacked = tensors[0].tensor.dim() < result.dim()
    dims = list(tensors[0].dims)
    sizes = {0 if stacked else one.tensor.shape[place] for one in tensors}
    for one in tensors[1:]:
        for other, (mine, its) in enumerate(zip(dims, one.dims, strict=True)):
            if stacked or other != place or len(sizes) == 1:
                follower.join(mine, its)
    if stacked:
        dims.insert(place, follower.fixed(len(tensors)))
    elif len(sizes) == 1:
        dims[place] = (*follower.fixed(len(tensors)), *dims[place])
    else:
        follower.fix(*(one.dims[place] for one in tensors))
        dims[place] = follower.fixed(result.shape[place])
    follower.give(result, dims, weights=all(one.weights for one in tensors))


@rule("index")
def _index(follower: Follower, arguments: Arguments, result: Tensor) -> None:
    """Picks positions of some axes by lists."""
    indices, dims = arguments["indices"], follower.dims(arguments["self"])
    places = [place for place, one in enumerate(indices) if one is not None]
    if places != list(range(places[0], places[-1] + 1)) or indices[places[0]].dtype == torch.bool:
        mix(follower, arguments, result)
        return
    follower.fix(*(dims[place] for place in places))
    count = result.dim() - (len(dims) - len(places))
    picked = [follower.fixed(size) for size in result.shape[places[0] : places[0] + count]]
    follower.give(result, [*dims[: places[0]], *picked, *dims[places[-1] + 1 :]])
