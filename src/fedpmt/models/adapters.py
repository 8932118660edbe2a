"""The LoRA adapters of a model, whoever made them: `fedpmt.lora` or peft. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fedpmt.models.structure import Structure

DOWN, UP = "lora_A", "lora_B"


class Adapter(NamedTuple):
    """The product B A that is added to a weight."""

    down: str  # A: rank x inputs
    up: str  # B: outputs x rank
    rank: int
    layer: int


def find_adapters(structure: Structure) -> tuple[Adapter, ...]:
    """The trained adapters of a model, first layer first."""
    key = "adapters"
    if key not in structure.memo:
        structure.memo[key] = tuple(
            Adapter(name, _up(name), structure.shapes[name][0], place)
            for place, layer in enumerate(structure.layers)
            for name in layer.parameters
            if DOWN in name.split(".") and _up(name) in layer.parameters
        )
    found: tuple[Adapter, ...] = structure.memo[key]
    return found


def find_factors(structure: Structure) -> frozenset[str]:
    """The names of their tensors."""
    key = "factors"
    if key not in structure.memo:
        found = find_adapters(structure)
        structure.memo[key] = frozenset(name for one in found for name in (one.down, one.up))
    names: frozenset[str] = structure.memo[key]
    return names


def _up(down: str) -> str:
    return ".".join(UP if one == DOWN else one for one in down.split("."))
