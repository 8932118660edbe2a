"""A device's reply as one vector of whole numbers modulo 2³², of which only the sum over devices is ever seen.

Masks can hide whole numbers, and they add up exactly. With R the reach of an entry, n devices, ā the largest weight and
Q = ⌊(2³¹ - 1) / n⌋ steps on each side of zero:

    q_k = round(Q / R · a_k / ā · clip(Δ_k, ±R)),   Σ_C a_k Δ_k / Σ_C a_k ≈ R / Q · Σ_C q_k / (Σ_C a_k / ā)

The sum of n of them fits into 32 bits with a sign, and a device that did not train an entry adds exactly zero.

Group 0 is the cover: for each layer, whether the device trained it (f_k) and with which weight (a_k f_k). Then follows
a group for each layer with the weighted update of its tensors (a_k f_k Δ_k), all zero where the device did not train
it. Σ_k f_k, Σ_k a_k f_k and Σ_k a_k f_k Δ_k of each layer are all that equation 7 of the paper needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fedpmt.methods.averaging import PartAveraging, weight_of
from fedpmt.parts.part import GLOBAL, WHOLE, Part, Whole, mask
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from fedpmt.methods.base import Method
    from fedpmt.models.structure import Structure
    from fedpmt.types import Tensors


Words: TypeAlias = "NDArray[np.uint32]"
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Scale:
    """How numbers become words; the same for all devices of a round."""

    reach: float  # R: larger entries of an update are cut to it
    devices: int  # n: how many are added up, at most
    unit: float  # ā: the largest weight of a device

    @property
    def levels(self) -> int:
        """Q: steps on each side of zero."""
        return LARGEST // self.devices

    def encode(self, update: NDArray[np.floating[Any]], weight: float) -> Words:
        """Encode one device's weighted update.

        >>> Scale(reach=1.0, devices=2, unit=10.0).encode(np.array([0.0, -1.0, 9.0]), weight=10.0)
        array([         0, 3221225473, 1073741823], dtype=uint32)
        """
        cut = np.clip(update.astype(np.float64), -self.reach, self.reach)
        steps = np.rint(cut * (weight / self.unit * self.levels / self.reach))
        return steps.astype(np.int64).astype(np.uint32)

    def mean(self, total: Words, weights: float) -> NDArray[np.float64]:
        """Decode a sum of words into the weighted mean; `weights` is the sum of the devices' weights."""
        return total.view(np.int32).astype(np.float64) * (self.reach / self.levels / (weights / self.unit))

    def error(self, devices: int, weights: float) -> float:
        """The largest error of an entry of the mean that rounding can cause, where no entry was cut.

        Each device rounds by half a step at most: |C| R / (2 Q) / (Σ_C a_k / ā), with equal weights about n R / 2³².
        """
        return devices * self.reach / (2 * self.levels) / (weights / self.unit)


COVER = 0


class Cover(NamedTuple):
    """How many devices trained each layer, and the sum of their weights."""

    counts: np.ndarray
    weights: np.ndarray


def group_sizes(structure: Structure) -> list[int]:
    """How many words each group has."""
    return [2 * len(structure.layers), *(structure.size(layer.tensors) for layer in structure.layers)]


def encode(structure: Structure, part: Part, update: Tensors, weight: int, scale: Scale) -> list[Words]:
    """Encode one device's update as a vector; a layer is trained whole, or not at all."""
    trained = np.array(mask(structure, part), np.uint32)
    groups = [np.concatenate([trained, trained * np.uint32(weight)])]
    for layer, on in zip(structure.layers, trained, strict=True):
        if on and not all(isinstance(part.trained.get(name), Whole) for name in layer.tensors):
            raise SettingError(
                f"secure aggregation is refused: '{part.label}' is a part of layer '{layer.name}'"
            )
        entries = [update[name].detach().cpu().float().reshape(-1).numpy() for name in layer.tensors if on]
        groups.append(
            scale.encode(np.concatenate(entries), weight)
            if entries
            else np.zeros(structure.size(layer.tensors), np.uint32)
        )
    return groups


def weigh(method: Method[Any, Any], samples: int) -> int:
    """a_k, as the method has it."""
    if not isinstance(method, PartAveraging):
        raise TypeError(f"{type(method).__name__} does not say what a device's reply weighs")
    return weight_of(method.weight, samples)


def count_cover(structure: Structure, parts: Iterable[tuple[Part, int]]) -> Cover:
    """Find the cover of these parts, each with its device's weight."""
    counts, weights = np.zeros((2, len(structure.layers)), np.int64)
    for part, weight in parts:
        trained = np.array(mask(structure, part))
        counts += trained
        weights += trained * weight
    return Cover(counts, weights)


def read_cover(words: Words) -> Cover:
    """Decode the cover from its group of the sum."""
    counts, weights = words.astype(np.int64).reshape(2, -1)
    return Cover(counts, weights)


def mean_update(
    structure: Structure, cover: Cover, layers: Sequence[int], sums: Mapping[int, Words], scale: Scale
) -> dict[str, Tensor]:
    """Decode the mean update of these layers, each over the devices that trained it."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        entries = torch.from_numpy(scale.mean(sums[1 + layer], float(cover.weights[layer])))
        names = structure.layers[layer].tensors
        lengths = [structure.size([name]) for name in names]
        for name, piece in zip(names, torch.split(entries, lengths), strict=True):
            found[name] = piece.reshape(structure.shapes[name])
    return found


def sum_part(structure: Structure, layers: Sequence[int]) -> Part:
    """The part of a reply that stands for a sum: these layers, as if one device had trained them."""
    names = [name for layer in layers for name in structure.layers[layer].tensors]
    return Part(GLOBAL, dict.fromkeys(structure.tensors, WHOLE), dict.fromkeys(names, WHOLE), "sum")
