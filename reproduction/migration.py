"""Kept records of an older version, with today's names.

`python -m reproduction migrate` rewrites all archives of a folder with `migrate`. Whoever renames a setting or a field
of a record adds a line here, runs it once and commits the archives. Records that have today's names stay as they are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fedpmt import records
from fedpmt.types import SettingError
from reproduction import archive
from reproduction.archive import RUN_SUFFIX, to_bytes
from reproduction.library import stored_name

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = {"widths": "depths"}
"""Settings that were renamed, old name to new."""

OPTIONS = {
    "fedgkt": {"epochs": "server_epochs", "weight_decay": "adam_decay", "optimizer": "device_optimizer"},
    "fedgen": {"weight_decay": "adam_decay"},
    "feddf": {"optimizer": "student_optimizer"},
}
"""Options that were renamed, by method, old name to new."""

FORMER: dict[str, dict[str, Any]] = {"fedgkt": {"rate": 0.001}}
"""Defaults that have changed, by method: a record that does not name them was made with these."""

SCORED = ("result", "rounds", "last")
"""The parts of a kept record in which a score stands."""

LABELS = {"fedpmt": ("width ", "depth ")}
"""Labels of parts that were renamed, by method: how they began, and how they begin now."""


def migrate(kept: dict[str, Any]) -> dict[str, Any]:
    """Give a kept record (the JSON of `reproduction.archive`) today's names.

    >>> devices = {"part": [["width 2", "width 1"]]}
    >>> migrate({"settings": {"method": "fedpmt", "widths": 4}, "devices": devices})
    {'settings': {'method': 'fedpmt', 'depths': 4}, 'devices': {'part': [['depth 2', 'depth 1']]}}
    """
    kept = {key: records.migrate(value) if key in SCORED else value for key, value in kept.items()}
    settings = {SETTINGS.get(key, key): value for key, value in kept["settings"].items()}
    if "options" in settings:
        renamed = OPTIONS.get(settings["method"], {})
        given = {renamed.get(key, key): value for key, value in settings["options"].items()}
        settings["options"] = {**FORMER.get(settings["method"], {}), **given}
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
            member = f"{stored_name(kept['settings'])}{RUN_SUFFIX}"
            if member in after:
                raise SettingError(
                    f"{path} holds two runs that would both be called {member}, one of them {name}"
                )
            after[member] = to_bytes(kept)
        if after != before:
            archive.write(path, after)
            changed.append(path)
    return changed
