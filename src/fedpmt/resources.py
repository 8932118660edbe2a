"""What a user lets a device spend in a round, as text. Loads no torch.

operations           as much as FedPMT's depth takes on that device
operations=0.4       that share of what the whole model takes on that device
time=20s             an amount; bytes, upload and memory have B, kB, MB, GB, KiB, MiB and GiB
memory=0.3,0.5,1     one for each level, slowest first
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fedpmt.types import SettingError

Resource = Literal["operations", "time", "bytes", "upload", "memory"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
ROUNDING = 1e-9
"""What is dearer by less than this share is within a limit: the same sum in another order."""

BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
UNITS: dict[Resource, dict[str, float]] = {
    "operations": {},
    "time": {"s": 1.0, "min": 60.0},
    "bytes": BYTES,
    "upload": BYTES,
    "memory": BYTES,
}


@dataclass(frozen=True)
class Amount:
    """A share of what the whole model takes, or an amount of the resource itself."""

    value: float
    absolute: bool = False

    def limit(self, whole: float) -> float:
        """In the resource's own unit, where the whole model takes this much of it."""
        return self.value if self.absolute else self.value * whole


@dataclass(frozen=True)
class Allowance:
    """The resource that is limited, and to how much."""

    resource: Resource
    amounts: tuple[Amount, ...] = ()  # none: what FedPMT's depth takes; one for all, or one for each level

    def at(self, level: int) -> Amount | None:
        """What is allowed on a level, 1 the slowest; None: what FedPMT's depth takes there."""
        return self.amounts[level - 1 if len(self.amounts) > 1 else 0] if self.amounts else None

    def check_levels(self, text: str, levels: int) -> None:
        """Refuse a list that is not one amount for each level."""
        if len(self.amounts) > 1 and len(self.amounts) != levels:
            raise SettingError(
                f"budget = '{text}' is refused: it lists {len(self.amounts)} amounts for {levels} levels"
            )


def parse_budget(text: str) -> Allowance:
    """Read a budget.

    >>> parse_budget("upload")
    Allowance(resource='upload', amounts=())
    >>> parse_budget("time=20s").amounts, parse_budget("memory=2/5,1").amounts
    ((Amount(value=20.0, absolute=True),), (Amount(value=0.4, absolute=False), Amount(value=1.0, absolute=False)))
    >>> parse_budget("operation")
    Traceback (most recent call last):
    fedpmt.types.SettingError: budget = 'operation' is unknown; did you mean 'operations'? (allowed: ...)
    """
    name, equals, rest = (part.strip() for part in text.partition("="))
    resource = next((known for known in RESOURCES if known == name), None)
    if resource is None:
        raise SettingError.unknown("budget", name, RESOURCES)
    if not equals:
        return Allowance(resource)
    return Allowance(resource, tuple(_amount(text, resource, part.strip()) for part in rest.split(",")))


def _amount(text: str, resource: Resource, part: str) -> Amount:
    units = UNITS[resource]
    # The longest first: MB also ends in B.
    unit = next((name for name in sorted(units, key=len, reverse=True) if part.endswith(name)), "")
    numerator, slash, denominator = part.removesuffix(unit).partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if math.isfinite(value) and value > 0 and (unit or value <= 1):
        return Amount(value * units.get(unit, 1.0), absolute=bool(unit))
    amounts = f", or an amount in {', '.join(units)}" if units else ""
    raise SettingError(
        f"budget = '{text}' is refused: '{part}' must be a share of the whole model, above 0 and up to 1{amounts}"
    )
