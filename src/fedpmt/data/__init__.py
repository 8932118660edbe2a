"""Data sets, their split over devices, and how to get them. NumPy only: torch is not loaded here."""

from __future__ import annotations

from fedpmt.data.datasets import Dataset, data_folder, from_arrays, load
from fedpmt.data.federated import FederatedData, federate, federate_dataset
from fedpmt.data.partition import Partition
from fedpmt.data.sources import get, status

__all__ = [
    "Dataset",
    "FederatedData",
    "Partition",
    "data_folder",
    "federate",
    "federate_dataset",
    "from_arrays",
    "get",
    "load",
    "status",
]
