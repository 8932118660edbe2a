"""What becomes of the folded difference on the server: the server's optimizer. Values; they load no torch until used.

Reddi et al., "Adaptive Federated Optimization", 2021, with Δ the mean difference of a round as the gradient:

    sgd       w <- w + η Δ
    momentum  m <- β m + Δ,                          w <- w + η m;   Nesterov: w <- w + η (Δ + β m)
    adagrad   m <- β_1 m + (1 - β_1) Δ,  v <- v + Δ²
    adam      the same m,                v <- β_2 v + (1 - β_2) Δ²
    yogi      the same m,                v <- v - (1 - β_2) Δ² sign(v - Δ²)
              all three:  w <- w + η m / (√v + τ),   v = τ² at first

Each steps only the entries that some device trained: an entry that nobody trained keeps its bits, and its moments
theirs. Running statistics of norms are no gradients, and always take the mean itself.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from fedpmt.aggregation import CoverageMean
    from fedpmt.types import Tensors

Moments: TypeAlias = "Mapping[str, Mapping[str, Tensor]]"
"""By name of the moment, then of the tensor; a tensor that was never stepped has none."""


@dataclass(frozen=True)
class ServerOptimizer:
    """Takes the mean as it is: w <- w + Δ. The base of all others."""

    moments: ClassVar[tuple[str, ...]] = ()

    def apply(
        self, mean: CoverageMean, parameters: Collection[str], moments: Moments
    ) -> tuple[dict[str, Tensor], Moments]:
        """The new weights and moments, from the folded differences; buffers are those that are no parameters."""
        return mean.result(), moments


@dataclass(frozen=True)
class _Stepping(ServerOptimizer):
    """What all that really step share."""

    def apply(
        self, mean: CoverageMean, parameters: Collection[str], moments: Moments
    ) -> tuple[dict[str, Tensor], Moments]:
        import torch

        new = dict(mean.weights)
        kept = {moment: dict(moments.get(moment, {})) for moment in self.moments}
        for name, (change, covered) in mean.changes().items():
            if name not in parameters:
                new[name] = (mean.weights[name] + change).to(mean.weights[name].dtype)
                continue
            before = {
                moment: kept[moment].get(name, torch.full_like(change, self._first(moment)))
                for moment in self.moments
            }
            step, after = self._step(change, before)
            if covered is not None:
                # Where nobody trained, neither the entry nor its moments move.
                step = step.masked_fill(~covered, 0)
                after = {moment: torch.where(covered, after[moment], before[moment]) for moment in after}
            new[name] = (mean.weights[name] + step).to(mean.weights[name].dtype)
            for moment, tensor in after.items():
                kept[moment][name] = tensor
        return new, kept

    def _first(self, moment: str) -> float:
        return 0.0

    def _step(self, change: Tensor, before: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(_Stepping):
    """w <- w + η Δ."""

    lr: float = 1.0  # η

    def __post_init__(self) -> None:
        _check(lr=self.lr)

    def _step(self, change: Tensor, before: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        return self.lr * change, {}


@dataclass(frozen=True)
class Momentum(_Stepping):
    """FedAvgM: m <- β m + Δ,  w <- w + η m.

    A difference that stays the same moves the model η / (1 - β) times as far as the mean alone would: with the defaults
    three times, which no task here diverges at; at η = 1 it is ten times.

    >>> Momentum(0.9, lr=0.3)
    Momentum(beta=0.9, lr=0.3, nesterov=False)
    """

    moments = ("mean",)

    beta: float = 0.9  # β
    lr: float = 0.3  # η
    nesterov: bool = False  # w <- w + η (Δ + β m)

    def __post_init__(self) -> None:
        _check(lr=self.lr, momentum=self.beta)

    def _step(self, change: Tensor, before: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        # m <- β m + Δ
        mean = self.beta * before["mean"] + change
        return self.lr * (change + self.beta * mean if self.nesterov else mean), {"mean": mean}


@dataclass(frozen=True)
class _Adaptive(_Stepping):
    """m / (√v + τ), with v renewed by each in its own way."""

    moments = ("mean", "square")

    lr: float = 0.01  # η
    beta1: float = 0.9  # β_1
    beta2: float = 0.99  # β_2
    tau: float = 1e-3  # τ: how adaptive it is, the less the more

    def __post_init__(self) -> None:
        _check(lr=self.lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau)

    def _first(self, moment: str) -> float:
        return self.tau**2 if moment == "square" else 0.0

    def _step(self, change: Tensor, before: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        # m <- β_1 m + (1 - β_1) Δ
        mean = self.beta1 * before["mean"] + (1 - self.beta1) * change
        square = self._renew(before["square"], change * change)
        # w <- w + η m / (√v + τ)
        return self.lr * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square}

    def _renew(self, square: Tensor, new: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(_Adaptive):
    """FedAdam: v <- β_2 v + (1 - β_2) Δ²."""

    def _renew(self, square: Tensor, new: Tensor) -> Tensor:
        return self.beta2 * square + (1 - self.beta2) * new


@dataclass(frozen=True)
class Yogi(_Adaptive):
    """FedYogi: v <- v - (1 - β_2) Δ² sign(v - Δ²)."""

    def _renew(self, square: Tensor, new: Tensor) -> Tensor:
        return square - (1 - self.beta2) * new * (square - new).sign()


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad: v <- v + Δ², and no β_1 in the paper's experiments."""

    beta1: float = 0.0

    def _renew(self, square: Tensor, new: Tensor) -> Tensor:
        return square + new


REPLACE = ServerOptimizer()
SERVER_OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    "none": ServerOptimizer,
    "sgd": SGD,
    "momentum": Momentum,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
}


def make_server(
    kind: str,
    lr: float | None = None,
    momentum: float = 0.9,
    nesterov: bool = False,
    beta2: float = 0.99,
    tau: float = 1e-3,
) -> ServerOptimizer:
    """The server's optimizer that settings name.

    >>> make_server("momentum", lr=0.3), make_server("adam", momentum=0.8).beta1
    (Momentum(beta=0.9, lr=0.3, nesterov=False), 0.8)
    """
    rate = {} if lr is None else {"lr": lr}
    if kind == "none":
        return REPLACE
    if kind == "sgd":
        return SGD(**rate)
    if kind == "momentum":
        return Momentum(momentum, nesterov=nesterov, **rate)
    if kind == "adagrad":
        return Adagrad(tau=tau, **rate)
    adaptive = Adam if kind == "adam" else Yogi
    return adaptive(beta1=momentum, beta2=beta2, tau=tau, **rate)


def server_settings(server: ServerOptimizer) -> dict[str, Any]:
    """The settings that make this optimizer, so that a run's record says what ran.

    >>> server_settings(Momentum(0.9, lr=0.3))
    {'server_optimizer': 'momentum', 'server_momentum': 0.9, 'server_lr': 0.3, 'server_nesterov': False}
    """
    kind = next((name for name, one in SERVER_OPTIMIZERS.items() if type(server) is one), None)
    if kind is None:
        raise SettingError(
            f"server = {type(server).__name__} is unknown (allowed: {', '.join(SERVER_OPTIMIZERS)})"
        )
    fields = {field.name: getattr(server, field.name) for field in dataclasses.fields(server)}
    # What a kind does not use is not said: Adagrad has no β_2, and its β_1 is not a setting.
    names = {"beta": "momentum", "beta1": "momentum"}
    unused = ("beta1", "beta2") if kind == "adagrad" else ()
    said = {f"server_{names.get(name, name)}": value for name, value in fields.items() if name not in unused}
    return {"server_optimizer": kind, **said}


def _check(**values: float) -> None:
    for key, value in values.items():
        if not math.isfinite(value) or value < 0 or (key in ("momentum", "beta1", "beta2") and value >= 1):
            upper = " and < 1" if key in ("momentum", "beta1", "beta2") else ""
            raise SettingError(f"server-{key} must be >= 0{upper} (got {value:g})")
    if values.get("tau") == 0 or values.get("lr") == 0:
        key = "tau" if values.get("tau") == 0 else "lr"
        raise SettingError(f"server-{key} must be > 0 (got 0)")
