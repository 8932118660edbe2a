"""Methods, and all that an author of one needs, in one place.

    from fedpmt.methods import Averaged, Client, Part, PartAveraging, Round, full

Names are loaded when they are first used; none of them loads torch.
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
    from fedpmt.methods.base import Action as Action
    from fedpmt.methods.base import Fold as Fold
    from fedpmt.methods.base import Gather as Gather
    from fedpmt.methods.base import Method as Method
    from fedpmt.methods.base import Predictor as Predictor
    from fedpmt.methods.base import Prototype as Prototype
    from fedpmt.methods.base import Round as Round
    from fedpmt.methods.base import Server as Server
    from fedpmt.methods.base import Setup as Setup
    from fedpmt.methods.base import Step as Step
    from fedpmt.methods.base import Traits as Traits
    from fedpmt.methods.base import acts as acts
    from fedpmt.methods.base import aggregate as aggregate
    from fedpmt.methods.base import require as require
    from fedpmt.methods.comet import Comet as Comet
    from fedpmt.methods.fedavg import FedAvg as FedAvg
    from fedpmt.methods.feddf import FedDF as FedDF
    from fedpmt.methods.feddrop import FedDrop as FedDrop
    from fedpmt.methods.fedgen import FedGen as FedGen
    from fedpmt.methods.fedgkt import FedGKT as FedGKT
    from fedpmt.methods.fedmp import FedMP as FedMP
    from fedpmt.methods.fedpmt import FedPMT as FedPMT
    from fedpmt.methods.fedprox import FedProx as FedProx
    from fedpmt.methods.fedrolex import FedRolex as FedRolex
    from fedpmt.methods.fjord import FjORD as FjORD
    from fedpmt.methods.heterofl import HeteroFL as HeteroFL
    from fedpmt.methods.ist import IST as IST
    from fedpmt.methods.prunefl import PruneFL as PruneFL
    from fedpmt.methods.scaffold import Scaffold as Scaffold
    from fedpmt.methods.slimfl import SlimFL as SlimFL
    from fedpmt.parts.depth import block as block
    from fedpmt.parts.depth import full as full
    from fedpmt.parts.depth import suffix as suffix
    from fedpmt.parts.part import GLOBAL as GLOBAL
    from fedpmt.parts.part import Extra as Extra
    from fedpmt.parts.part import Indices as Indices
    from fedpmt.parts.part import Mask as Mask
    from fedpmt.parts.part import Part as Part
    from fedpmt.parts.part import Whole as Whole
    from fedpmt.training.local import Job as Job
    from fedpmt.training.local import LocalWork as LocalWork
    from fedpmt.training.local import Outcome as Outcome
    from fedpmt.training.local import Run as Run
    from fedpmt.training.messages import UPDATE as UPDATE
    from fedpmt.training.messages import Client as Client
    from fedpmt.training.messages import Reply as Reply
    from fedpmt.training.messages import Task as Task

_HOMES = {
    "Averaged": "fedpmt.methods.averaging",
    "Composed": "fedpmt.methods.averaging",
    "MeanFold": "fedpmt.methods.averaging",
    "PartAveraging": "fedpmt.methods.averaging",
    "send": "fedpmt.methods.averaging",
    "weight_of": "fedpmt.methods.averaging",
    "Action": "fedpmt.methods.base",
    "Fold": "fedpmt.methods.base",
    "Gather": "fedpmt.methods.base",
    "Method": "fedpmt.methods.base",
    "Predictor": "fedpmt.methods.base",
    "Prototype": "fedpmt.methods.base",
    "Round": "fedpmt.methods.base",
    "Server": "fedpmt.methods.base",
    "Setup": "fedpmt.methods.base",
    "Step": "fedpmt.methods.base",
    "Traits": "fedpmt.methods.base",
    "acts": "fedpmt.methods.base",
    "aggregate": "fedpmt.methods.base",
    "require": "fedpmt.methods.base",
    "Comet": "fedpmt.methods.comet",
    "FedAvg": "fedpmt.methods.fedavg",
    "FedDF": "fedpmt.methods.feddf",
    "FedDrop": "fedpmt.methods.feddrop",
    "FedGen": "fedpmt.methods.fedgen",
    "FedGKT": "fedpmt.methods.fedgkt",
    "FedMP": "fedpmt.methods.fedmp",
    "FedPMT": "fedpmt.methods.fedpmt",
    "FedProx": "fedpmt.methods.fedprox",
    "FedRolex": "fedpmt.methods.fedrolex",
    "FjORD": "fedpmt.methods.fjord",
    "HeteroFL": "fedpmt.methods.heterofl",
    "IST": "fedpmt.methods.ist",
    "PruneFL": "fedpmt.methods.prunefl",
    "Scaffold": "fedpmt.methods.scaffold",
    "SlimFL": "fedpmt.methods.slimfl",
    "block": "fedpmt.parts.depth",
    "full": "fedpmt.parts.depth",
    "suffix": "fedpmt.parts.depth",
    "Extra": "fedpmt.parts.part",
    "GLOBAL": "fedpmt.parts.part",
    "Indices": "fedpmt.parts.part",
    "Mask": "fedpmt.parts.part",
    "Part": "fedpmt.parts.part",
    "Whole": "fedpmt.parts.part",
    "Job": "fedpmt.training.local",
    "LocalWork": "fedpmt.training.local",
    "Outcome": "fedpmt.training.local",
    "Run": "fedpmt.training.local",
    "Client": "fedpmt.training.messages",
    "Reply": "fedpmt.training.messages",
    "Task": "fedpmt.training.messages",
    "UPDATE": "fedpmt.training.messages",
}

__all__ = [
    "GLOBAL",
    "IST",
    "UPDATE",
    "Action",
    "Averaged",
    "Client",
    "Comet",
    "Composed",
    "Extra",
    "FedAvg",
    "FedDF",
    "FedDrop",
    "FedGKT",
    "FedGen",
    "FedMP",
    "FedPMT",
    "FedProx",
    "FedRolex",
    "FjORD",
    "Fold",
    "Gather",
    "HeteroFL",
    "Indices",
    "Job",
    "LocalWork",
    "Mask",
    "MeanFold",
    "Method",
    "Outcome",
    "Part",
    "PartAveraging",
    "Predictor",
    "Prototype",
    "PruneFL",
    "Reply",
    "Round",
    "Run",
    "Scaffold",
    "Server",
    "Setup",
    "SlimFL",
    "Step",
    "Task",
    "Traits",
    "Whole",
    "acts",
    "aggregate",
    "block",
    "full",
    "require",
    "send",
    "suffix",
    "weight_of",
]


if not TYPE_CHECKING:  # else mypy would believe in any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'fedpmt.methods' has no attribute '{name}'")
        return getattr(importlib.import_module(_HOMES[name]), name)
