"""Kept records of an older version, with today's names.

`python -m reproduction migrate` rewrites all archives of a folder with `migrate`. Whoever renames a setting or a field
of a record adds a line here, runs it once and commits the archives. Records that have today's names stay as they are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fedpmt.types import SettingError
from reproduction import archive
from reproduction.library import stored_name
from reproduction.thin import SUFFIX, to_bytes

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = {"widths": "depths"}
"""Settings that were renamed, old name to new."""

LABELS = {"fedpmt": ("width ", "depth ")}
"""Labels of parts that were renamed, by method: how they began, and how they begin now."""


def migrate(kept: dict[str, Any]) -> dict[str, Any]:
    """Give a kept record (the JSON of `reproduction.thin`) today's names.

    >>> devices = {"part": [["width 2", "width 1"]]}
    >>> migrate({"settings": {"method": "fedpmt", "widths": 4}, "devices": devices})
    {'settings': {'method': 'fedpmt', 'depths': 4}, 'devices': {'part': [['depth 2', 'depth 1']]}}
    """
    settings = {SETTINGS.get(key, key): value for key, value in kept["settings"].items()}
    devices = dict(kept["devices"])
    old, new = LABELS.get(settings["method"], ("", ""))
    devices["part"] = [
        [new + label.removeprefix(old) if label.startswith(old) else label for label in labels]
        for labels in devices["part"]
    ]
    return {**kept, "settings": settings, "devices": devices}


def migrate_archives(folder: Path) -> list[Path]:
    """Rewrite the archives of a folder; those that changed."""
    changed = []
    for path in sorted(folder.glob(f"*{archive.SUFFIX}")):
        before = archive.read(path)
        after: dict[str, bytes] = {}
        for name, data in before.items():
            kept = migrate(json.loads(data))
            member = f"{stored_name(kept['settings'])}{SUFFIX}"
            if member in after:
                raise SettingError(
                    f"{path} holds two runs that would both be called {member}, one of them {name}"
                )
            after[member] = to_bytes(kept)
        if after != before:
            archive.write(path, after)
            changed.append(path)
    return changed
