"""Synthetic(α, β) of Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020.

Device k has a linear model of its own and inputs around a centre of its own:

    u_k ~ N(0, α)    W_k, b_k ~ N(u_k, 1)    y = argmax(W_k x + b_k)
    B_k ~ N(0, β)    v_k ~ N(B_k, 1)         x ~ N(v_k, Σ),  Σ_jj = j^-1.2

α says how much the devices' models differ, β how much their inputs do; both are variances.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from fedpmt.data.base import FederatedData, count_labels
from fedpmt.data.description import Dataset, Defaults
from fedpmt.types import Examples, SettingError

if TYPE_CHECKING:
    import numpy as np

CLASSES: Final = 10
INPUT_SHAPE: Final = (60,)
_TEST_SAMPLES: Final = 1_000
_TEST_DEVICES: Final = 100
_HELD_OUT: Final = 10_000


def parse(argument: str) -> tuple[float, float]:
    """Read α and β.

    >>> parse("0,0.5")
    (0.0, 0.5)
    """
    try:
        numbers = [float(part) for part in argument.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 2 or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise SettingError(
            f"data must be synthetic:ALPHA,BETA with two finite numbers >= 0 (got 'synthetic:{argument}')"
        )
    return numbers[0], numbers[1]


class SyntheticData(FederatedData):
    """A fleet of any size: each shard is drawn from its device's own generators when it is asked for."""

    classes = CLASSES

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        seed: int,
        devices: int,
        samples: int,
        input_shape: tuple[int, ...] | None = None,
        public: str = "none",
        validation: float = 0.0,
    ) -> None:
        from fedpmt.data.public import noise, unlabelled
        from fedpmt.data.spec import held_out, parse_public

        self.name = f"synthetic:{alpha:g},{beta:g}"
        self.devices = devices
        self._alpha, self._beta, self._seed, self._samples = alpha, beta, seed, samples
        self._shape = INPUT_SHAPE if input_shape is None else tuple(input_shape)
        self.test = self._fresh(_TEST_SAMPLES, "synthetic/test")
        kind, number = parse_public(public)
        # Nothing is taken from the devices: fresh samples, as many as that share of all would be, up to a limit.
        counts = [min(_HELD_OUT, count) for count in held_out(public, validation, devices * samples)]
        if kind == "holdout" and counts[0]:
            self.public = unlabelled(self._fresh(counts[0], "synthetic/public"))
        elif kind == "generated":
            self.public = noise(int(number), self.test.inputs, seed)
        elif kind != "none":
            raise SettingError(
                f"public must be none, holdout:SHARE or generated:N with data = '{self.name}' (got '{public}')"
            )
        if counts[1]:
            self.validation = self._fresh(counts[1], "synthetic/validation")

    def samples(self, device: int) -> int:
        """How many samples the device holds, |D_k|."""
        self._check(device)
        return self._samples

    @property
    def sizes(self) -> int:
        """|D_k|, the same for every device."""
        return self._samples

    def shard(self, device: int) -> Examples:
        """The device's samples, numbered through the fleet."""
        import numpy as np

        self._check(device)
        inputs, targets = self._draw(device, self._samples, "synthetic/train")
        return Examples(inputs, targets, device * self._samples + np.arange(self._samples))

    def label_counts(self, device: int) -> np.ndarray | None:
        """How many of the device's samples each class has."""
        return count_labels(self.shard(device).targets, self.classes)

    def _check(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise IndexError(f"device {device} is not one of the {self.devices} devices")

    def _fresh(self, count: int, purpose: str) -> Examples:
        """Fresh samples of devices spread evenly over the fleet, as many of each."""
        import numpy as np

        asked = min(self.devices, _TEST_DEVICES)
        each, extra = divmod(count, asked)
        draws = [
            self._draw(position * self.devices // asked, each + (position < extra), purpose)
            for position in range(asked)
        ]
        inputs, targets = (np.concatenate(parts) for parts in zip(*draws, strict=True))
        return Examples(inputs, targets, np.arange(count))

    def _draw(self, device: int, count: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        from fedpmt.seeds import generator

        size = math.prod(self._shape)
        own = generator(self._seed, "synthetic/device", None, device)
        model_mean = own.normal(0.0, math.sqrt(self._alpha))  # u_k ~ N(0, α)
        input_mean = own.normal(0.0, math.sqrt(self._beta))  # B_k ~ N(0, β)
        weights = own.normal(model_mean, 1.0, (CLASSES, size))  # W_k ~ N(u_k, 1)
        bias = own.normal(model_mean, 1.0, CLASSES)  # b_k ~ N(u_k, 1)
        centre = own.normal(input_mean, 1.0, size)  # v_k ~ N(B_k, 1)
        # Σ_jj = j^-1.2
        deviation = np.arange(1, size + 1) ** -0.6
        inputs = generator(self._seed, purpose, None, device).normal(centre, deviation, (count, size))
        # y = argmax(W_k x + b_k)
        targets = (inputs @ weights.T + bias).argmax(axis=1)
        return inputs.astype(np.float32).reshape(count, *self._shape), targets.astype(np.int64)


def draw(
    argument: str,
    *,
    seed: int,
    devices: int,
    samples: int,
    input_shape: tuple[int, ...] | None,
    public: str,
    validation: float,
) -> SyntheticData:
    """Draw the data of a fleet; without an argument α = β = 1."""
    alpha, beta = parse(argument) if argument else (1.0, 1.0)
    return SyntheticData(
        alpha=alpha,
        beta=beta,
        seed=seed,
        devices=devices,
        samples=samples,
        input_shape=input_shape,
        public=public,
        validation=validation,
    )


DATASET = Dataset(
    name="synthetic",
    shape=INPUT_SHAPE,
    classes=CLASSES,
    defaults=Defaults(devices=100, samples=100, cohort=10, batch=10, lr=0.01, rounds=100),
    draw=draw,
    built_in="it is drawn when it is used",
    argument="ALPHA,BETA",
    check=parse,
)
