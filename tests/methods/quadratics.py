"""Devices whose losses are F_i(w) = a_i / 2 (w - b_i)² of one number, for values that can be worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedpmt.methods.base import Prototype, Round, Server, Setup, aggregate
from fedpmt.models.layered import layered
from fedpmt.parts.part import GLOBAL
from fedpmt.seeds import Seeds
from fedpmt.training.local import Job, LocalSettings, Site
from fedpmt.training.loop import train
from fedpmt.training.messages import Client
from fedpmt.training.objective import Objective
from fedpmt.training.optimizers import SGD
from fedpmt.types import Examples
from support import FlatPrice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from fedpmt.methods.base import Method
    from fedpmt.training.messages import Reply

WEIGHT = "0.weight"


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean() / 2


class Quadratics:
    """A method on such devices, round by round, with what each device keeps."""

    def __init__(
        self,
        method: Method[Any, Any],
        curvatures: Sequence[float],  # a_i
        centres: Sequence[float],  # b_i
        *,
        steps: int,
        learning_rate: float = 0.1,
        momentum: float = 0.0,
    ) -> None:
        self.method, self.curvatures, self.centres = method, curvatures, centres
        line = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(line.weight)
        self.model = layered(nn.Sequential(line))
        self.settings = LocalSettings(steps, 1, learning_rate, SGD(momentum))
        self.price = FlatPrice(self.model)
        prototype = Prototype(self.model.structure, self.model.initial())
        self.state = method.init(Setup({GLOBAL: prototype}, len(centres), self.price))
        self.kept: dict[int, Any] = {}
        self.index = 0

    @property
    def weight(self) -> float:
        """w."""
        return float(self.method.predictor(self.state).tensors[WEIGHT])

    @property
    def site(self) -> Site:
        return Site({GLOBAL: self.model}, Objective(half_square), self.settings)

    def data(self, device: int) -> Examples:
        """One sample, x = √a_i and y = √a_i b_i."""
        root = self.curvatures[device] ** 0.5
        inputs, targets = ([[root]], [[root * self.centres[device]]])
        return Examples(
            torch.tensor(inputs, dtype=torch.float64),
            torch.tensor(targets, dtype=torch.float64),
            np.arange(1),
        )

    def ask(self, device: int) -> tuple[Reply, Any]:
        """What a device answers in this round, and what it would keep."""
        seeds, work = Seeds(0, self.index), self.method.local
        client = Client(device, 1, 1.0, 1, self.settings.epochs)
        task = self.method.assign(self.state, client, Round(self.index, self.price, seeds))
        own = self.kept.get(device)
        if own is None:
            own = work.first(device, lambda purpose: Seeds(0)(purpose, device))

        def rng(purpose: str) -> np.random.Generator:
            return seeds(purpose, device)

        data = self.data(device)
        return train(work, Job(self.site, task, task.offer[0], own, data, rng, device, self.index))

    def play(self, asked: Iterable[int], lost: Iterable[int] = ()) -> float:
        """One round; a device whose reply is lost keeps what it had before."""
        answers = {device: self.ask(device) for device in sorted(asked)}
        counted = {device: answer for device, answer in answers.items() if device not in set(lost)}
        round_ = Round(self.index, self.price, Seeds(0, self.index))
        replies = [reply for reply, _ in counted.values()]
        self.state = aggregate(self.method, self.state, replies, round_, Server(self.site)).state
        self.kept.update({device: own for device, (_, own) in counted.items()})
        self.index += 1
        return self.weight
