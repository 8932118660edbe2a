"""Federated learning for fleets of unequal devices.

    import fedpmt
    runs = fedpmt.compare(["fedpmt", "fedavg"], rounds=20)

Names are loaded when they are first used, so that `import fedpmt` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedpmt.version import __version__ as __version__

if TYPE_CHECKING:
    from fedpmt.api import compare as compare
    from fedpmt.api import run as run
    from fedpmt.devices.rows import Device as Device
    from fedpmt.methods.averaging import Composed as Composed
    from fedpmt.methods.averaging import PartAveraging as PartAveraging
    from fedpmt.methods.base import Method as Method
    from fedpmt.methods.base import Traits as Traits
    from fedpmt.methods.comet import Comet as Comet
    from fedpmt.methods.depthfl import DepthFL as DepthFL
    from fedpmt.methods.depthfl import InclusiveFL as InclusiveFL
    from fedpmt.methods.family import SALF as SALF
    from fedpmt.methods.family import CoCoFL as CoCoFL
    from fedpmt.methods.family import EmbracingFL as EmbracingFL
    from fedpmt.methods.family import FedOLF as FedOLF
    from fedpmt.methods.family import FedPart as FedPart
    from fedpmt.methods.fedasync import FedAsync as FedAsync
    from fedpmt.methods.fedavg import FedAvg as FedAvg
    from fedpmt.methods.fedbuff import FedBuff as FedBuff
    from fedpmt.methods.feddf import FedDF as FedDF
    from fedpmt.methods.feddrop import FedDrop as FedDrop
    from fedpmt.methods.fedel import FedEL as FedEL
    from fedpmt.methods.fedepth import FeDepth as FeDepth
    from fedpmt.methods.fedgen import FedGen as FedGen
    from fedpmt.methods.fedgkt import FedGKT as FedGKT
    from fedpmt.methods.fedmp import FedMP as FedMP
    from fedpmt.methods.fedpmt import FedPMT as FedPMT
    from fedpmt.methods.fedprox import FedProx as FedProx
    from fedpmt.methods.fedra import FedRA as FedRA
    from fedpmt.methods.fedrolex import FedRolex as FedRolex
    from fedpmt.methods.fiarse import FIARSE as FIARSE
    from fedpmt.methods.fjord import FjORD as FjORD
    from fedpmt.methods.flexlora import FlexLoRA as FlexLoRA
    from fedpmt.methods.heterofl import HeteroFL as HeteroFL
    from fedpmt.methods.ist import IST as IST
    from fedpmt.methods.proximal import Proximal as Proximal
    from fedpmt.methods.prunefl import PruneFL as PruneFL
    from fedpmt.methods.scaffold import Scaffold as Scaffold
    from fedpmt.methods.slimfl import SlimFL as SlimFL
    from fedpmt.methods.timelyfl import TimelyFL as TimelyFL
    from fedpmt.models.lora import lora as lora
    from fedpmt.models.lora import merge_lora as merge_lora
    from fedpmt.models.structure import Axis as Axis
    from fedpmt.prices import cost as cost
    from fedpmt.prices import layers as layers
    from fedpmt.prices import plan as plan
    from fedpmt.records import RoundRecord as RoundRecord
    from fedpmt.records import RunRecord as RunRecord
    from fedpmt.resources import Resources as Resources
    from fedpmt.runs import Run as Run
    from fedpmt.runs import Runs as Runs
    from fedpmt.runs import read_run as read_run
    from fedpmt.simulation.callbacks import MLflow as MLflow
    from fedpmt.simulation.callbacks import RoundEnd as RoundEnd
    from fedpmt.simulation.callbacks import TensorBoard as TensorBoard
    from fedpmt.simulation.callbacks import WandB as WandB
    from fedpmt.training.batches import PerSample as PerSample
    from fedpmt.training.local import LocalWork as LocalWork
    from fedpmt.training.server import SGD as SGD
    from fedpmt.training.server import Adagrad as Adagrad
    from fedpmt.training.server import Adam as Adam
    from fedpmt.training.server import Momentum as Momentum
    from fedpmt.training.server import Yogi as Yogi
    from fedpmt.types import SettingError as SettingError
    from fedpmt.types import Stop as Stop

_HOMES = {
    "fedpmt.api": ("compare", "run"),
    "fedpmt.devices.rows": ("Device",),
    "fedpmt.methods.averaging": ("Composed", "PartAveraging"),
    "fedpmt.methods.base": ("Method", "Traits"),
    "fedpmt.methods.comet": ("Comet",),
    "fedpmt.methods.family": ("CoCoFL", "EmbracingFL", "FedOLF", "FedPart", "SALF"),
    "fedpmt.methods.fedasync": ("FedAsync",),
    "fedpmt.methods.fedavg": ("FedAvg",),
    "fedpmt.methods.fedbuff": ("FedBuff",),
    "fedpmt.methods.feddf": ("FedDF",),
    "fedpmt.methods.feddrop": ("FedDrop",),
    "fedpmt.methods.fedgen": ("FedGen",),
    "fedpmt.methods.fedgkt": ("FedGKT",),
    "fedpmt.methods.fedmp": ("FedMP",),
    "fedpmt.methods.fedpmt": ("FedPMT",),
    "fedpmt.methods.fedprox": ("FedProx",),
    "fedpmt.methods.fedra": ("FedRA",),
    "fedpmt.methods.fedrolex": ("FedRolex",),
    "fedpmt.methods.fjord": ("FjORD",),
    "fedpmt.methods.fiarse": ("FIARSE",),
    "fedpmt.methods.depthfl": ("DepthFL", "InclusiveFL"),
    "fedpmt.methods.fedel": ("FedEL",),
    "fedpmt.methods.fedepth": ("FeDepth",),
    "fedpmt.methods.flexlora": ("FlexLoRA",),
    "fedpmt.methods.heterofl": ("HeteroFL",),
    "fedpmt.methods.ist": ("IST",),
    "fedpmt.methods.proximal": ("Proximal",),
    "fedpmt.methods.prunefl": ("PruneFL",),
    "fedpmt.methods.scaffold": ("Scaffold",),
    "fedpmt.methods.slimfl": ("SlimFL",),
    "fedpmt.methods.timelyfl": ("TimelyFL",),
    "fedpmt.models.lora": ("lora", "merge_lora"),
    "fedpmt.models.structure": ("Axis",),
    "fedpmt.prices": ("cost", "layers", "plan"),
    "fedpmt.records": ("RoundRecord", "RunRecord"),
    "fedpmt.resources": ("Resources",),
    "fedpmt.runs": ("Run", "Runs", "read_run"),
    "fedpmt.simulation.callbacks": ("MLflow", "RoundEnd", "TensorBoard", "WandB"),
    "fedpmt.training.batches": ("PerSample",),
    "fedpmt.training.local": ("LocalWork",),
    "fedpmt.training.server": ("SGD", "Adagrad", "Adam", "Momentum", "Yogi"),
    "fedpmt.types": ("SettingError", "Stop"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "FIARSE",
    "IST",
    "SALF",
    "SGD",
    "Adagrad",
    "Adam",
    "Axis",
    "CoCoFL",
    "Comet",
    "Composed",
    "DepthFL",
    "Device",
    "EmbracingFL",
    "FeDepth",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedDF",
    "FedDrop",
    "FedEL",
    "FedGKT",
    "FedGen",
    "FedMP",
    "FedOLF",
    "FedPMT",
    "FedPart",
    "FedProx",
    "FedRA",
    "FedRolex",
    "FjORD",
    "FlexLoRA",
    "HeteroFL",
    "InclusiveFL",
    "LocalWork",
    "MLflow",
    "Method",
    "Momentum",
    "PartAveraging",
    "PerSample",
    "Proximal",
    "PruneFL",
    "Resources",
    "RoundEnd",
    "RoundRecord",
    "Run",
    "RunRecord",
    "Runs",
    "Scaffold",
    "SettingError",
    "SlimFL",
    "Stop",
    "TensorBoard",
    "TimelyFL",
    "Traits",
    "WandB",
    "Yogi",
    "compare",
    "cost",
    "layers",
    "lora",
    "merge_lora",
    "plan",
    "read_run",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fedpmt' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
