"""Settings about data that are written in a small language of their own. Loads no NumPy."""

from __future__ import annotations

import math
from typing import Any

from fedpmt.data.registry import with_samples
from fedpmt.types import SettingError


def public_spellings() -> list[str]:
    """What `public` may be."""
    return ["none", "holdout:SHARE", "generated:N", *(f"{name}:N" for name in with_samples())]


def parse_public(text: str) -> tuple[str, float]:
    """Where public data comes from, and how much: a share for `holdout`, else a number of samples, 0 for all.

    >>> parse_public("holdout:0.1"), parse_public("mnist:2000"), parse_public("mnist")
    (('holdout', 0.1), ('mnist', 2000.0), ('mnist', 0.0))
    """
    name, colon, argument = text.partition(":")
    if name not in ("none", "holdout", "generated", *with_samples()):
        raise SettingError.unknown("public", text, public_spellings())
    try:
        number = float(argument) if colon else 0.0
    except ValueError:
        number = math.nan
    if name == "holdout":
        if not 0 < number < 1:
            raise SettingError(f"public must be holdout:SHARE with 0 < SHARE < 1 (got '{text}')")
        return name, number
    if name == "none" and colon:
        raise SettingError(f"public = 'none' takes no number (got '{text}')")
    if not number.is_integer() or number < (1 if colon or name == "generated" else 0):
        raise SettingError(f"public must be {name}:N with a whole number N >= 1 (got '{text}')")
    return name, number


def held_out(public: str, validation: Any, total: int) -> tuple[int, int]:
    """How many of `total` samples are held out: without labels for everybody, with labels for the server.

    >>> held_out("holdout:0.1", 0.02, 4000)
    (400, 80)
    """
    kind, number = parse_public(public)
    try:
        labelled = float(validation)
    except (TypeError, ValueError):
        labelled = math.nan
    if not 0 <= labelled < 1:
        labelled = 0.0  # refused by the schema, which names it
    shares = (number if kind == "holdout" else 0.0, labelled)
    if sum(shares) >= 1:
        raise SettingError(
            f"public = '{public}' and validation = '{validation}' leave no samples for the devices"
        )
    return round(shares[0] * total), round(shares[1] * total)
