"""The paper's three nets as plain facts (section IV, footnotes 4 and 5). Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fedpmt.types import SettingError

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
