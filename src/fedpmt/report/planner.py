"""The planner page: a plan that its reader can change, in one file, computed in the browser from the same prices."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt.report.tables import write_file
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_page(path: Path) -> None:
    """Refuse a path that no page can be written to."""
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise SettingError(f"out must be a file name that ends in .html (got '{path}')")


def write_planner(path: Path, prices: Mapping[str, Any], choice: Mapping[str, Any], text: str) -> None:
    """Write the page.

    Args:
        path: Where it goes.
        prices: Those of all depths and devices, as `plan_prices` collects them.
        choice: The deadline, budget, precision and plan that the page begins with.
        text: The plan as text, for readers without scripts.

    Raises:
        SettingError: The file cannot be written.
    """
    check_page(path)
    write_file(path, planner_page(prices, choice, text))


def planner_page(prices: Mapping[str, Any], choice: Mapping[str, Any], text: str) -> str:
    """Fill in the page."""
    kinds = prices["kinds"]
    devices = sum(kind["devices"] for kind in kinds)
    fills = {
        "title": escape(f"Planner: {prices['task']}"),
        "lead": f"What each of {devices:,} devices, of {len(kinds):,} {'kind' if len(kinds) == 1 else 'kinds'}, can "
        "train of this model in a round. Move a control, and the plan is computed again.",
        "scale": f"Speed 1 trains one epoch of the full model on {prices['samples']:,} samples in "
        f"{prices['full_seconds']:g} s.",
        "text": escape(text),
        "version": escape(prices["version"]),
        "style": _read("planner.css"),
        "script": _read("planner.js"),
        # A name must not be able to close the element that it stands in.
        "prices": json.dumps({"prices": prices, "choice": choice}).replace("<", "\\u003c"),
    }
    before, *pieces = _read("planner.html").split("{{")
    filled = [before]
    for piece in pieces:
        name, _, after = piece.partition("}}")
        filled += [fills[name], after]
    return "".join(filled)


def _read(name: str) -> str:
    return (Path(__file__).with_name("assets") / name).read_text(encoding="utf-8")
