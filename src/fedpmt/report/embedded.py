"""The files that pages embed: style sheets, the script and the charting library."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def read_asset(name: str) -> str:
    """Read a file of assets/."""
    return (resources.files("fedpmt.report") / "assets" / name).read_text(encoding="utf-8")
