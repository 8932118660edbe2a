"""The methods, one file each, and what the author of a method needs.

Names are loaded when they are first used: none of them loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpmt.methods.averaging import Averaged as Averaged
    from fedpmt.methods.averaging import Composed as Composed
    from fedpmt.methods.averaging import MeanFold as MeanFold
    from fedpmt.methods.averaging import PartAveraging as PartAveraging
    from fedpmt.methods.averaging import send as send
    from fedpmt.methods.averaging import weight_of as weight_of
    from fedpmt.methods.base import Fold as Fold
    from fedpmt.methods.base import Gather as Gather
    from fedpmt.methods.base import Method as Method
    from fedpmt.methods.base import Predictor as Predictor
    from fedpmt.methods.base import Round as Round
    from fedpmt.methods.base import Server as Server
    from fedpmt.methods.base import Setup as Setup
    from fedpmt.methods.base import Step as Step
    from fedpmt.methods.base import Traits as Traits
    from fedpmt.methods.base import acts as acts
    from fedpmt.methods.base import require as require
    from fedpmt.parts.depth import block as block
    from fedpmt.parts.depth import full as full
    from fedpmt.parts.depth import suffixes as suffixes
    from fedpmt.parts.part import GLOBAL as GLOBAL
    from fedpmt.parts.part import Extra as Extra
    from fedpmt.parts.part import Part as Part
    from fedpmt.training.local import Job as Job
    from fedpmt.training.local import LocalWork as LocalWork
    from fedpmt.training.local import Outcome as Outcome
    from fedpmt.training.local import Run as Run
    from fedpmt.training.messages import UPDATE as UPDATE
    from fedpmt.training.messages import Chance as Chance
    from fedpmt.training.messages import Client as Client
    from fedpmt.training.messages import Reply as Reply
    from fedpmt.training.messages import Task as Task

_HOMES = {
    "fedpmt.methods.averaging": (
        "Averaged",
        "Composed",
        "MeanFold",
        "PartAveraging",
        "send",
        "weight_of",
    ),
    "fedpmt.methods.base": (
        "Fold",
        "Gather",
        "Method",
        "Predictor",
        "Round",
        "Server",
        "Setup",
        "Step",
        "Traits",
        "acts",
        "require",
    ),
    "fedpmt.parts.depth": ("block", "full", "suffixes"),
    "fedpmt.parts.part": ("GLOBAL", "Extra", "Part"),
    "fedpmt.training.local": ("Job", "LocalWork", "Outcome", "Run"),
    "fedpmt.training.messages": ("UPDATE", "Chance", "Client", "Reply", "Task"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fedpmt.methods' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
