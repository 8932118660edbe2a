"""Fashion-MNIST: 70,000 grey images of clothes, in the files and sizes of MNIST (Xiao et al., 2017)."""

from __future__ import annotations

from fedpmt.data.description import Dataset, Defaults, Scale, idx_files, load_idx
from fedpmt.data.fetching import DebianPackage, PackedFiles

DATASET = Dataset(
    name="fashion-mnist",
    shape=(1, 28, 28),
    classes=10,
    train=60_000,
    scale=Scale((0.2860,), (0.3530,)),
    # The paper has no settings for this set: those of MNIST.
    defaults=Defaults(devices=100, samples=300, cohort=8, batch=12, lr=0.01, rounds=500),
    load=load_idx,
    files=idx_files(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    places=(
        "fashion-mnist",
        "fashion-mnist/raw",
        "fashion-mnist/FashionMNIST/raw",
        "FashionMNIST/raw",
        ".",
    ),
    sources=(
        PackedFiles(
            "the authors' repository",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        ),
        # This server speaks no https; the checksums make that harmless.
        PackedFiles("the authors' server", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"),
        DebianPackage("dataset-fashion-mnist"),
    ),
)
