"""The same methods on Flower: Ray for a simulation over a cluster, SuperLink and SuperNodes for real devices.

This is the only package that imports flwr (`pip install 'fedpmt[flower]'`). A method knows nothing of it: the strategy
calls its `assign` and `fold`, the ClientApp runs its local work, both through the simulator's own federation.

    from fedpmt.flower import apps
    both = apps(problem)
    server = both.server  # Flower looks for these names
    client = both.client

`problem(settings)` returns the model, the data and the objective; it is called on the server and on every node. Names
are loaded when they are first used, since starting processes needs neither flwr nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpmt.flower.factory import Apps as Apps
    from fedpmt.flower.factory import apps as apps
    from fedpmt.flower.factory import paper_apps as paper_apps
    from fedpmt.flower.node_data import NodeData as NodeData
    from fedpmt.flower.node_data import node_problem as node_problem
    from fedpmt.flower.replaying import replay as replay

_HOMES = {
    "Apps": "fedpmt.flower.factory",
    "NodeData": "fedpmt.flower.node_data",
    "apps": "fedpmt.flower.factory",
    "node_problem": "fedpmt.flower.node_data",
    "paper_apps": "fedpmt.flower.factory",
    "replay": "fedpmt.flower.replaying",
}

__all__ = ["Apps", "NodeData", "apps", "node_problem", "paper_apps", "replay"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpmt.flower' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
