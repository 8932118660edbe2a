"""Data sets, their split over devices, and how to get them. Nothing here loads torch.

Names are loaded when they are first used: the descriptions of data sets are needed without NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpmt.data.datasets import LoadedDataset as LoadedDataset
    from fedpmt.data.datasets import from_arrays as from_arrays
    from fedpmt.data.datasets import load as load
    from fedpmt.data.description import Dataset as Dataset
    from fedpmt.data.federated import FederatedData as FederatedData
    from fedpmt.data.federated import federate as federate
    from fedpmt.data.federated import federate_dataset as federate_dataset
    from fedpmt.data.folders import data_folder as data_folder
    from fedpmt.data.partition import Partition as Partition
    from fedpmt.data.registry import DATASETS as DATASETS
    from fedpmt.data.sources import get as get
    from fedpmt.data.sources import status as status

_HOMES = {
    "DATASETS": "registry",
    "Dataset": "description",
    "FederatedData": "federated",
    "LoadedDataset": "datasets",
    "Partition": "partition",
    "data_folder": "folders",
    "federate": "federated",
    "federate_dataset": "federated",
    "from_arrays": "datasets",
    "get": "sources",
    "load": "datasets",
    "status": "sources",
}

__all__ = [
    "DATASETS",
    "Dataset",
    "FederatedData",
    "LoadedDataset",
    "Partition",
    "data_folder",
    "federate",
    "federate_dataset",
    "from_arrays",
    "get",
    "load",
    "status",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpmt.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fedpmt.data.{_HOMES[name]}"), name)
