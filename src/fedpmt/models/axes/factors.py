"""Sizes of tensor axes as products of factors, which are joined where an operation needs them to be the same.

An axis of 768 that attention reads as 12 heads of 64 is two factors, and so is an axis of 6272 that was flattened
from 128 channels and 49 positions. What is joined is cut together; a factor that is fixed is never cut.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Factor:
    """A number of channels, heads, positions or samples. It may be joined with others, or split in two, later."""

    __slots__ = ("added", "normed", "output", "parts", "reason", "same", "size")

    def __init__(self, size: int, reason: str | None = None) -> None:
        self.size = size
        self.reason = reason  # why it is fixed; None if it may be cut
        self.output = False  # the model's own outputs run over it
        self.added = False  # two activations are added along it: a residual stream
        self.normed = ""  # the module that normalises over it
        self.parts: tuple[Factor, Factor] | None = None  # the outer and the inner one, once split
        self.same: Factor | None = None  # the factor it was joined with


Dim: TypeAlias = tuple[Factor, ...]
"""The factors of an axis, outermost first; none for an axis of size 1."""


def new_dim(size: int, reason: str | None = None) -> Dim:
    """Return an axis of its own."""
    return (Factor(size, reason),) if size > 1 else ()


def leaves(dim: Iterable[Factor]) -> Dim:
    """The factors of an axis as they stand now, after all joins and splits."""
    found: list[Factor] = []
    for factor in dim:
        root = _root(factor)
        found.extend([root] if root.parts is None else leaves(root.parts))
    return tuple(found)


def size_of(dim: Iterable[Factor]) -> int:
    """The size of an axis."""
    return math.prod(factor.size for factor in dim)


def fix(dim: Iterable[Factor], reason: str) -> None:
    """Say that an axis must stay whole. The first reason stands."""
    for leaf in leaves(dim):
        leaf.reason = leaf.reason or reason


def join(one: Dim, other: Dim, reason: str) -> None:
    """Make two axes of the same size one. Where their factors do not match, both are fixed."""
    first, second = list(leaves(one)), list(leaves(other))
    while first and second:
        a, b = _innermost(first), _innermost(second)
        if a is b:
            continue
        if a.size % b.size == 0:
            first += _split(a, b.size)
            _unite(first.pop(), b)
        elif b.size % a.size == 0:
            second += _split(b, a.size)
            _unite(second.pop(), a)
        else:
            fix((*one, *other), reason)
            return


def regroup(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim] | None:
    """Deal the factors of a tensor out to the axes of another shape; None where that is not possible."""
    left = [leaf for dim in reversed(dims) for leaf in reversed(leaves(dim))]  # the outermost at the end
    found: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        while (wanted := size // size_of(taken)) > 1:
            if not left:
                return None
            leaf = _outermost(left)
            if wanted % leaf.size == 0:
                taken.append(leaf)
            elif leaf.size % wanted == 0:
                outer, inner = _split(leaf, leaf.size // wanted)
                taken.append(outer)
                left.append(inner)
            else:
                return None
        found.append(tuple(taken))
    return found


def _root(factor: Factor) -> Factor:
    while factor.same is not None:
        factor = factor.same
    return factor


def _innermost(stack: list[Factor]) -> Factor:
    """Take the last factor, as it stands now: a split elsewhere may have reached it."""
    *outer, last = leaves([stack.pop()])
    stack += outer
    return last


def _outermost(stack: list[Factor]) -> Factor:
    """Take the last factor of a stack that has the outermost at its end."""
    first, *inner = leaves([stack.pop()])
    stack += reversed(inner)
    return first


def _split(leaf: Factor, inner: int) -> list[Factor]:
    """Split a factor in an outer and an inner one; one that is as large as the inner one stays whole."""
    if leaf.size == inner:
        return [leaf]
    outer = Factor(leaf.size // inner, leaf.reason)
    within = Factor(inner, leaf.reason)
    for part in (outer, within):
        part.output, part.added, part.normed = leaf.output, leaf.added, leaf.normed
    leaf.parts = (outer, within)
    return [outer, within]


def _unite(one: Factor, other: Factor) -> None:
    if one is other:
        return
    one.reason = one.reason or other.reason
    one.output |= other.output
    one.added |= other.added
    one.normed = one.normed or other.normed
    other.same = one
