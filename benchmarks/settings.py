"""What is measured: the paper's three settings and pfl's own, each the same for all peers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.common import Job
from fedpmt.models.nets import NETS, Net

FIVE_LEVELS, FOUR_LEVELS = "1/5,1/4,1/3,1/2,1", "1/4,1/3,1/2,1"


@dataclass(frozen=True)
class Setting:
    """A net, its data, the fleet and how devices train."""

    name: str
    task: str  # the net
    data: str
    devices: int  # |K|
    cohort: int  # |S|
    samples: int  # |D_k|
    batch: int
    lr: float  # η
    epochs: int = 1  # E
    about: str = ""

    @property
    def net(self) -> Net:
        """The net's facts."""
        return NETS[self.task]

    @property
    def steps(self) -> int:
        """SGD steps that a round of full models must take."""
        return self.cohort * self.epochs * -(-self.samples // self.batch)

    @property
    def levels(self) -> str:
        """The fleet of unequal devices: one level per depth of the paper's."""
        return FIVE_LEVELS if self.net.depths[0] == 5 else FOUR_LEVELS

    def ours(self, method: str) -> dict[str, Any]:
        """Settings of our own run beyond those that every peer is given."""
        return {
            "method": method,
            "task": self.task,
            "data": self.data,
            "devices": self.devices,
            "samples": self.samples,
            "levels": self.levels,
            "assign": "level",
            "mode": "exact",
        }

    def job(self, options: dict[str, Any], *, rounds: int, warmup: int, seed: int, data: str = "") -> Job:
        """What ours or a peer is asked to compute; `data`, the folder of exported arrays, is for peers."""
        return Job(
            data=data,
            filters=self.net.filters,
            hidden=self.net.hidden,
            classes=self.net.classes,
            cohort=self.cohort,
            batch=self.batch,
            epochs=self.epochs,
            lr=self.lr,
            rounds=rounds,
            warmup=warmup,
            seed=seed,
            options=options,
        )


def _on_mnist(name: str, about: str) -> Setting:
    """The fleet of the paper's MNIST experiments."""
    return Setting(name, name, "mnist", devices=100, cohort=8, samples=300, batch=12, lr=0.01, about=about)


SETTINGS = {
    setting.name: setting
    for setting in (
        _on_mnist("fcnn-mnist", "the paper's fully connected net on MNIST"),
        _on_mnist("cnn-mnist", "the paper's convolutional net on MNIST"),
        Setting(
            "cnn-cifar10",
            "cnn-cifar10",
            "cifar10",
            devices=100,
            cohort=10,
            samples=500,
            batch=20,
            lr=0.05,
            about="the paper's convolutional net on CIFAR-10",
        ),
        Setting(
            "pfl-cifar10",
            "cnn-cifar10",
            "cifar10",
            devices=1000,
            cohort=50,
            samples=50,
            batch=10,
            lr=0.1,
            about="pfl's own benchmark: many small users, with the net above",
        ),
    )
}

SMOKE = Setting(
    "smoke",
    "fcnn-mnist",
    "embedded",
    devices=10,
    cohort=4,
    samples=40,
    batch=10,
    lr=0.05,
    about="a few seconds, to see that the benchmark runs",
)


@dataclass(frozen=True)
class Variant:
    """A method and a number of local epochs; peers only have the first, which all are compared by."""

    method: str = "fedavg"
    epochs: int = 1

    @property
    def name(self) -> str:
        """What stands in the results."""
        return f"{self.method} E={self.epochs}"

    def of(self, setting: Setting) -> Setting:
        """The setting with this many epochs."""
        return replace(setting, epochs=self.epochs)


FEDAVG = Variant()
VARIANTS = (FEDAVG, Variant("fedpmt"), Variant("fedavg", 5), Variant("fedpmt", 5))
