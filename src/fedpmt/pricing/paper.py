"""The complexity table as the paper prints it (section IV-A and Table I). Loads no torch.

Sizes may be fractions: the table thins a layer of 128 neurons at keep 0.1 to 12.8 and cuts the sum
to an integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from fedpmt.models.nets import KERNEL, POOL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.models.nets import Net


@dataclass(frozen=True)
class Departures:
    """Where a column of the printed table does not follow the formulas of its section."""

    activation: bool = True  # whether a fully connected layer's activation, n_l · n^x, is in its forward pass
    first_error_units: int | None = None  # stands for n_1 in Fc1's term n_1 · n^x
    second_filters: Fraction = Fraction(1)  # share of conv2's filters that is counted
    first_next_units: int | None = None  # stands for n_2 in Fc1's error signal n_1 · n_2 · n^x
    second_error_batch: int | None = None  # stands for n^x in Fc2's term n_2 · n^x


AS_WRITTEN = Departures()
"""The formulas of the section themselves."""

PRINTED = {
    # The 784 inputs were taken for Fc1's 400 neurons. FedDrop's column has the same term, not thinned.
    "fcnn-mnist": Departures(first_error_units=784),
    # Fully connected layers are said to be "the same as FCNN", but both CNN columns leave the activation out.
    "cnn-mnist": Departures(activation=False),
    # conv2 is 16 · 25 · 20 · 100: 20, perhaps the batch size, stands where the 32 filters belong. Fc1 takes
    # the 10 classes for Fc2's 300 neurons, and Fc2 takes them for the batch of 20.
    "cnn-cifar10": Departures(
        activation=False, second_filters=Fraction(20, 32), first_next_units=10, second_error_batch=10
    ),
}


@dataclass(frozen=True)
class Operations:
    """One layer and one batch."""

    forward: Fraction
    error: Fraction
    gradient: Fraction
    update: Fraction

    @property
    def backward(self) -> Fraction:
        """What training this layer adds to the forward pass."""
        return self.error + self.gradient + self.update


def layer_operations(
    net: Net,
    batch: int,
    *,
    filters: Sequence[int | Fraction],
    hidden: Sequence[int | Fraction],
    departures: Departures,
) -> tuple[Operations, ...]:
    """The formulas, for a net with these numbers of filters and neurons, first layer first."""
    layers = []
    channels, side = Fraction(net.input_shape[0]), net.input_shape[1]  # n_0, s_x
    for number, count in enumerate(filters, start=1):
        side = side - KERNEL + 1  # m_l
        counted = count * (departures.second_filters if number == 2 else 1)
        # FP: n_{l-1} · s_l² · n_l · m_l². There is no n^x in it: one sample, where all else is one batch.
        forward = channels * KERNEL**2 * counted * side**2
        # BP: "roughly twice that of the FP"; half of it is the error signal, half the gradient.
        layers.append(Operations(forward, forward, forward, Fraction(0)))
        channels, side = Fraction(count), side // POOL
    units = [channels * side**2, *map(Fraction, hidden), Fraction(net.classes)]  # n_0 to n_o
    for number in range(1, len(units)):
        before, here, last = units[number - 1], units[number], number == len(units) - 1
        # FP: n_l · n_{l-1} · n^x + n_l · n^x
        forward = here * before * batch + (here * batch if departures.activation else 0)
        if last:
            # e_o: n_o · n^x + n_o · n^x
            error = 2 * here * batch
        else:
            # e_l: n_l · n^x + n_l · n_{l+1} · n^x
            own, following, samples = here, units[number + 1], batch
            if number == 1:
                own = Fraction(departures.first_error_units or own)
                following = Fraction(departures.first_next_units or following)
            elif number == 2:
                samples = departures.second_error_batch or samples
            error = own * samples + here * following * batch
        # D: n_l · n^x · n_{l-1}, update: n_l · n_{l-1}; the table knows no biases
        layers.append(Operations(forward, error, here * batch * before, here * before))
    return tuple(layers)


def suffix_operations(net: Net, frozen: int, batch: int, departures: Departures | None = None) -> int:
    """FedPMT's column: the whole forward pass and the backward pass of all but the first `frozen` layers."""
    layers = layer_operations(
        net, batch, filters=net.filters, hidden=net.hidden, departures=departures or PRINTED[net.name]
    )
    return int(sum(layer.forward for layer in layers) + sum(layer.backward for layer in layers[frozen:]))


def dropped_operations(net: Net, keep: float, batch: int, departures: Departures | None = None) -> int:
    """FedDrop's column: hidden fully connected layers keep this share of their neurons, filters all stay."""
    rate = Fraction(round(keep * 100), 100)
    layers = layer_operations(
        net,
        batch,
        filters=net.filters,
        hidden=[rate * units for units in net.hidden],
        departures=departures or PRINTED[net.name],
    )
    return int(sum(layer.forward + layer.backward for layer in layers))
