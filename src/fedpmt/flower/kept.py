"""What a deployment was begun with and a resume holds to: one small file beside the records. Loads no torch."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from fedpmt.records import write_atomically
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.flower.deployment import Deployment

FILE = "deployment.json"
HELD = ("secagg", "min_devices", "secagg_range", "transport_seconds", "sample_limit")
"""Settings of the deployment that the weights depend on, or what devices were promised; the others may change."""


class Kept(BaseModel):
    """The facts of one run, over all of its starts."""

    model_config = ConfigDict(frozen=True)

    run: str  # what it is called on every node, unlike any other
    held: dict[str, bool | int | float]  # the settings above
    starts: int = 0  # of the server; each but the first may play a round again that devices have answered
    devices: tuple[int, ...] | None = None  # that were there when it first began; None: it never has
    deadline: float | None = None  # what depths are fitted to; None: nothing


def read(folder: Path, deployment: Deployment) -> Kept | None:
    """What is kept in this folder, if anything is; settings that are not those of the run are refused."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        kept = Kept.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise SettingError(f"{path} cannot be read: {error.errors()[0]['msg'].lower()}") from error
    for key, before in kept.held.items():
        now = getattr(deployment, key, before)
        if now != before:
            name = key.replace("_", "-")
            raise SettingError(
                f"{name} = {_shown(now)} is refused: this run was begun with {name} = {_shown(before)}"
            )
    return kept


def begin(folder: Path, deployment: Deployment) -> Kept:
    """One more start of the run in this folder, or its first."""
    kept = read(folder, deployment)
    if kept is None:
        # It becomes a folder's name on nodes, which take nothing but plain ones.
        stem = re.sub(r"[^A-Za-z0-9]+", "-", folder.name).strip("-")[:60] or "run"
        held = {key: getattr(deployment, key) for key in HELD}
        kept = Kept(run=f"{stem}-{uuid.uuid4().hex[:12]}", held=held)
    return keep(folder, kept.model_copy(update={"starts": kept.starts + 1}))


def keep(folder: Path, kept: Kept) -> Kept:
    """Write it down."""
    write_atomically(folder / FILE, kept.model_dump_json().encode())
    return kept


def _shown(value: bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
