"""Federated learning for fleets of unequal devices.

    import fedpmt
    runs = fedpmt.compare(["fedpmt", "fedavg"], rounds=20)

Names are loaded when they are first used, so that `import fedpmt` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedpmt.api import compare as compare
    from fedpmt.api import run as run
    from fedpmt.methods.fedavg import FedAvg as FedAvg
    from fedpmt.methods.feddrop import FedDrop as FedDrop
    from fedpmt.methods.fedpmt import FedPMT as FedPMT
    from fedpmt.records import RoundRecord as RoundRecord
    from fedpmt.records import RunRecord as RunRecord
    from fedpmt.records import read_run as read_run
    from fedpmt.types import SettingError as SettingError

_HOMES = {
    "run": "fedpmt.api",
    "compare": "fedpmt.api",
    "FedAvg": "fedpmt.methods.fedavg",
    "FedPMT": "fedpmt.methods.fedpmt",
    "FedDrop": "fedpmt.methods.feddrop",
    "RoundRecord": "fedpmt.records",
    "RunRecord": "fedpmt.records",
    "read_run": "fedpmt.records",
    "SettingError": "fedpmt.types",
}

__all__ = [
    "FedAvg",
    "FedDrop",
    "FedPMT",
    "RoundRecord",
    "RunRecord",
    "SettingError",
    "compare",
    "read_run",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpmt' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
