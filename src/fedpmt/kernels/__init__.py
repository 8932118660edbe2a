"""Compiled code behind one seam: what is exported here is all that the rest of the package uses of it.

    train           a device's whole local round
    forward         a model's outputs, for evaluation
    differentiable  a model's forward pass as one node of autograd's graph
    fold, add_at    the server's sums of replies
    available       whether there is compiled code on this machine
    knows           whether it can run and train a model
    StepRule        what a step of local training does

Nobody needs to know what compiled code can do: a function answers None (or False) where it cannot do what is asked, and
the caller goes on with torch. Names are loaded when they are first used, so that `StepRule` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedpmt.kernels.rule import StepRule

if TYPE_CHECKING:
    from fedpmt.kernels.calls import add_at as add_at
    from fedpmt.kernels.calls import available as available
    from fedpmt.kernels.calls import fold as fold
    from fedpmt.kernels.calls import forward as forward
    from fedpmt.kernels.calls import knows as knows
    from fedpmt.kernels.calls import train as train
    from fedpmt.kernels.graph import differentiable as differentiable

_HOMES = {
    "add_at": "calls",
    "available": "calls",
    "differentiable": "graph",
    "fold": "calls",
    "forward": "calls",
    "knows": "calls",
    "train": "calls",
}

__all__ = [
    "StepRule",
    "add_at",
    "available",
    "differentiable",
    "fold",
    "forward",
    "knows",
    "train",
]


if not TYPE_CHECKING:  # else mypy would believe in any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'fedpmt.kernels' has no attribute '{name}'")
        found = getattr(importlib.import_module(f"fedpmt.kernels.{_HOMES[name]}"), name)
        globals()[name] = found  # asked for once
        return found
