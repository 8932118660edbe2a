"""What a local round takes of a device, and what a user lets it take. Loads no torch.

A price, a usage and a limit are all `Resources`; a usage fits a limit when `usage <= limit`. Users write limits as
text, in the setting `budget`:

    operations           as much as FedPMT's depth takes on that device
    operations=0.4       that share of what the whole model takes on that device
    time=20s             an amount; bytes, upload and memory have B, kB, MB, GB, KiB, MiB and GiB
    energy=5J            the same in J, kJ and Wh, where the fleet states watts
    memory=0.3,0.5,1     one for each level, slowest first
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from fedpmt.types import SettingError

Resource = Literal["operations", "time", "bytes", "upload", "memory", "energy"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
ROUNDING = 1e-9
"""A usage that exceeds a limit by less than this share fits: the same sum in another order differs that much."""

BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
UNITS: dict[Resource, dict[str, float]] = {
    "operations": {},
    "time": {"s": 1.0, "min": 60.0},
    "bytes": BYTES,
    "upload": BYTES,
    "memory": BYTES,
    "energy": {"J": 1.0, "kJ": 1e3, "Wh": 3600.0},
}


@dataclass(frozen=True)
class Resources:
    """One device's local round in numbers: a price, a usage, or the limit of one.

    >>> usage = Resources(operations=100, seconds=20, traffic=800, upload=300, memory=4_000)
    >>> usage <= Resources.limit(seconds=20), usage <= Resources.limit(upload=200)
    (True, False)
    >>> usage.download, usage.of("time"), UNLIMITED.but("memory", 1_000).memory
    (500, 20, 1000)
    """

    operations: float = 0.0  # multiply-adds
    seconds: float = 0.0  # of training and transfer
    traffic: float = 0.0  # bytes down and up
    upload: float = 0.0  # bytes up
    memory: float = 0.0  # bytes, at the peak
    joules: float = 0.0  # of training and transfer; 0 where the fleet states no watts

    @classmethod
    def limit(cls, **limits: float) -> Resources:
        """Limit some resources and leave the others unlimited."""
        return replace(UNLIMITED, **limits)

    @property
    def download(self) -> float:
        """Bytes down."""
        return self.traffic - self.upload

    def of(self, resource: Resource) -> float:
        """Return the amount of the resource that users call by this name."""
        amount: float = getattr(self, FIELDS[resource])
        return amount

    def but(self, resource: Resource, most: float) -> Resources:
        """Lower the limit of one resource to at most this."""
        return replace(self, **{FIELDS[resource]: min(most, self.of(resource))})

    def __le__(self, limit: Resources) -> bool:
        return all(self.of(resource) <= limit.of(resource) * (1 + ROUNDING) for resource in RESOURCES)


FIELDS: dict[Resource, str] = {
    "operations": "operations",
    "time": "seconds",
    "bytes": "traffic",
    "upload": "upload",
    "memory": "memory",
    "energy": "joules",
}
UNLIMITED = Resources(*[math.inf] * len(FIELDS))


@dataclass(frozen=True)
class BudgetSetting:
    """The setting `budget`, parsed: which resource is limited, and to how much."""

    resource: Resource
    amounts: tuple[
        tuple[float, bool], ...
    ] = ()  # (value, whether absolute); one for all, or one for each level

    @property
    def planned(self) -> bool:
        """Whether a device may spend what FedPMT's depth takes there."""
        return not self.amounts

    def most(self, level: int, whole: Resources) -> float:
        """Return the amount allowed on a level (1 is the slowest) where the whole model takes `whole`."""
        value, absolute = self.amounts[level - 1 if len(self.amounts) > 1 else 0]
        return value if absolute else value * whole.of(self.resource)

    def check_watts(self, text: str, *, stated: bool) -> None:
        """Refuse a budget of energy where the fleet does not state what its devices draw."""
        if self.resource == "energy" and not stated:
            raise SettingError(f"budget = '{text}' needs a fleet that states watts_computing")

    def check_levels(self, text: str, levels: int) -> None:
        """Refuse a list that is not one amount for each level."""
        if len(self.amounts) > 1 and len(self.amounts) != levels:
            raise SettingError(
                f"budget = '{text}' lists {len(self.amounts)} amounts, but there are {levels} levels"
            )


@cache
def parse_budget(text: str) -> BudgetSetting:
    """Parse the setting `budget`.

    >>> parse_budget("upload")
    BudgetSetting(resource='upload', amounts=())
    >>> parse_budget("time=20s").amounts, parse_budget("memory=2/5,1").amounts
    (((20.0, True),), ((0.4, False), (1.0, False)))
    >>> parse_budget("operation")
    Traceback (most recent call last):
    fedpmt.types.SettingError: budget = 'operation' is unknown; did you mean 'operations'? (allowed: ...)
    """
    name, equals, rest = (part.strip() for part in text.partition("="))
    resource = next((known for known in RESOURCES if known == name), None)
    if resource is None:
        raise SettingError.unknown("budget", name, RESOURCES)
    if not equals:
        return BudgetSetting(resource)
    return BudgetSetting(resource, tuple(_amount(text, resource, part.strip()) for part in rest.split(",")))


def _amount(text: str, resource: Resource, part: str) -> tuple[float, bool]:
    units = UNITS[resource]
    # The longest first: MB also ends in B.
    unit = next((name for name in sorted(units, key=len, reverse=True) if part.endswith(name)), "")
    numerator, slash, denominator = part.removesuffix(unit).partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if math.isfinite(value) and value > 0 and (unit or value <= 1):
        return value * units.get(unit, 1.0), bool(unit)
    amounts = f", or an amount in {', '.join(units)}" if units else ""
    raise SettingError(
        f"budget = '{text}': '{part}' must be a share of the whole model, above 0 and at most 1{amounts}"
    )
