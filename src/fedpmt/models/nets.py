"""The paper's three nets as plain facts (section IV, footnotes 4 and 5), and ready tasks under one name each.

A task is a module, its data set and settings that train it well. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.types import Scalar


KERNEL = 5  # s_l
POOL = 2


@dataclass(frozen=True)
class Net:
    """5x5 convolutions without padding, each with a 2x2 max-pool, then fully connected layers.

    ReLU follows every layer but the last: the logits are not mapped.
    """

    name: str
    input_shape: tuple[int, int, int]
    filters: tuple[int, ...]
    hidden: tuple[int, ...]
    classes: int
    data: str  # the data set that the paper trains it on
    batch: int  # the batch size of the paper's complexity table
    depths: tuple[int, ...]  # the paper's |I|, larger first

    @property
    def layers(self) -> int:
        """|L|."""
        return len(self.filters) + len(self.hidden) + 1


NETS = {
    net.name: net
    for net in (
        Net("fcnn-mnist", (1, 28, 28), (), (400, 300, 200, 100), 10, "mnist", batch=12, depths=(4, 2)),
        Net("cnn-mnist", (1, 28, 28), (8, 16), (128,), 10, "mnist", batch=12, depths=(4, 2)),
        Net("cnn-cifar10", (3, 32, 32), (16, 32), (500, 300), 10, "cifar10", batch=20, depths=(5, 2)),
    )
}


def net(name: str) -> Net:
    """Look a net up by its task name."""
    if name not in NETS:
        raise SettingError.unknown("task", name, NETS)
    return NETS[name]


PRETRAINED, RANDOM = "pretrained", "random"
WHOLE, HEAD, LORA = "all", "head", "lora"


@dataclass(frozen=True)
class Task:
    """The description of a ready task: all that the rest of the library knows about it."""

    name: str
    about: str
    module: str  # the function that makes it, as package.module:function
    data: str  # the data set
    arguments: Mapping[str, Scalar] = field(default_factory=dict)  # of that function
    weights: str = ""  # pretrained ones; the function then takes their tensors first, or None
    settings: Mapping[str, Scalar] = field(default_factory=dict)  # where the user gives none
    tune: Mapping[str, float] = field(default_factory=dict)  # what can be trained of it, with a rate for it

    def defaults(self, tune: str) -> dict[str, Scalar]:
        """The task's settings, which come before the data set's; the rate is that of what is trained."""
        return {**self.settings, **({"lr": self.tune[tune]} if tune in self.tune else {})}


_FINE_TUNING: Mapping[str, Scalar] = {
    "devices": 100,
    "cohort": 5,
    "epochs": 5,
    "optimizer": "adam",
    "eval_every": 5,
}
_MINILM: Mapping[str, Scalar] = {
    **_FINE_TUNING,
    "samples": 40,
    "batch": 10,
    "rounds": 20,
}
_MINILM_RATES = {WHOLE: 1e-4, HEAD: 5e-3, LORA: 1e-3}

TASKS = {
    task.name: task
    for task in (
        Task(
            "cnn-hapt",
            "six activities of 30 people from their phones' motion, by a convolutional net",
            "fedpmt.models.small_nets:motion_cnn",
            "hapt",
        ),
        Task(
            "lstm-shakespeare",
            "the next character of a role's speech, by two LSTMs",
            "fedpmt.models.small_nets:CharacterLSTM",
            "shakespeare",
            arguments={"alphabet": 66},
        ),
        Task(
            "transformer-shakespeare",
            "the same by a small transformer, which can also be cut by width",
            "fedpmt.models.small_nets:CharacterTransformer",
            "shakespeare",
            arguments={"alphabet": 66},
            settings={"optimizer": "adam", "lr": 2e-3},
        ),
        Task(
            "resnet-cifar10",
            "ten kinds of things in images, by ResNet-8 with GroupNorm",
            "fedpmt.models.small_nets:ResNet",
            "cifar10",
        ),
        Task(
            "mobilenetv2-cifar10",
            "the same, by a MobileNetV2 that has learned ImageNet",
            "fedpmt.models.mobilenetv2:build",
            "cifar10",
            arguments={"classes": 10, "size": 64},
            weights="mobilenetv2",
            settings={**_FINE_TUNING, "samples": 50, "batch": 25, "rounds": 40},
            tune={WHOLE: 1e-4, HEAD: 2e-3, LORA: 1e-3},
        ),
        Task(
            "minilm-imdb",
            "whether a review of a film is good, by a MiniLM that has learned sentences",
            "fedpmt.models.minilm:build",
            "imdb",
            arguments={"classes": 2, "length": 64},
            weights="minilm",
            settings=_MINILM,
            tune=_MINILM_RATES,
        ),
        Task(
            "minilm-reuters",
            "the subject of a news item, by the same MiniLM",
            "fedpmt.models.minilm:build",
            "reuters",
            arguments={"classes": 10, "length": 32},
            weights="minilm",
            settings=_MINILM,
            tune=_MINILM_RATES,
        ),
    )
}
"""Every ready task, by name."""
