"""What is measured: nets, their data, the fleet and how devices train, each the same for ours and all peers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.common import Job
from fedpmt.models.nets import NETS, Net

FIVE_LEVELS, FOUR_LEVELS = "1/5,1/4,1/3,1/2,1", "1/4,1/3,1/2,1"
TOKENS = "tokens"
"""What `data` is where texts are drawn at random."""

CLASS_SUFFIX = "-class"
"""Ends the name of a setting with the net of another one as a user's class."""

SMALL_AIM, LARGE_AIM = 1.3, 1.1
"""How many times as fast as the fastest peer ours is to be on a user's class: small nets, and others."""


@dataclass(frozen=True)
class Setting:
    """A net, its data, the fleet and how devices train."""

    name: str
    task: str  # the paper's net; empty where `module` is none of these
    data: str
    devices: int  # |K|
    cohort: int  # |S|
    samples: int  # |D_k|
    batch: int
    lr: float  # η
    epochs: int = 1  # E
    about: str = ""
    module: str = (
        ""  # a user's class, see `benchmarks.peers.modules`; empty: the paper's net, a chain of layers
    )
    aim: float | None = None  # how many times as fast as the fastest peer ours is to be

    @property
    def net(self) -> Net | None:
        """The facts of the paper's net."""
        return NETS.get(self.task)

    @property
    def steps(self) -> int:
        """SGD steps that a round of full models must take."""
        return self.cohort * self.epochs * -(-self.samples // self.batch)

    @property
    def levels(self) -> str:
        """The fleet of unequal devices; of a paper's net, one level per depth."""
        return FOUR_LEVELS if self.net and self.net.depths[0] == 4 else FIVE_LEVELS

    @property
    def base(self) -> str:
        """The setting whose net this one has as a user's class; else itself."""
        return self.name.removesuffix(CLASS_SUFFIX)

    def ours(self, method: str) -> dict[str, Any]:
        """Settings of our own run beyond those that every peer is given."""
        own: dict[str, Any] = {} if self.module else {"task": self.task, "data": self.data}
        if self.net is not None:
            own |= {"depths": self.net.depths[0], "assign": "level"}
        return {
            "method": method,
            "devices": self.devices,
            "samples": self.samples,
            "levels": self.levels,
            "mode": "exact",
            **own,
        }

    def job(self, options: dict[str, Any], *, rounds: int, warmup: int, seed: int, data: str = "") -> Job:
        """What ours or a peer is asked to compute; `data` is the folder of exported arrays."""
        chain = None if self.module else self.net
        return Job(
            data=data,
            filters=chain.filters if chain else (),
            hidden=chain.hidden if chain else (),
            module=self.module,
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


def as_class(setting: Setting) -> Setting:
    """The same setting with its net as a class of a user's own."""
    return replace(
        setting,
        name=setting.name + CLASS_SUFFIX,
        module=setting.task,
        about=f"the net of {setting.name} as a user's class",
        aim=SMALL_AIM,
    )


def _model(name: str, module: str, data: str, lr: float, about: str) -> Setting:
    """A model that is not one of the paper's."""
    fleet = {"devices": 100, "cohort": 10, "samples": 40, "batch": 20}
    return Setting(name, "", data, **fleet, lr=lr, module=module, about=about, aim=LARGE_AIM)


MODELS = {
    setting.name: setting
    for setting in (
        *map(as_class, SETTINGS.values()),
        _model("resnet-cifar10", "resnet", "cifar10", 0.05, "a ResNet-14 with GroupNorm on CIFAR-10"),
        _model("vit-cifar10", "vit", "cifar10", 0.05, "a small vision transformer on CIFAR-10"),
        _model(
            "bert-tokens",
            "bert",
            TOKENS,
            0.05,
            "a BERT of 4 layers, as transformers publishes it, on random texts",
        ),
    )
}
"""Users' own modules, each with a forward pass of its own."""

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
