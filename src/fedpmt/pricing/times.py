"""How long a device takes: T_k = c_k |D_k| E / κ_k, plus what travels over its link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedpmt.devices.fleet import Device
    from fedpmt.pricing.cost import Cost
    from fedpmt.pricing.price import Price


@dataclass(frozen=True)
class Times:
    """Virtual seconds. The unit of speed is a device that trains one epoch of the full model in `full_seconds`."""

    price: Price
    full_seconds: float
    epochs: int  # E

    def training(self, device: Device, cost: Cost, samples: int, share: float = 1.0) -> float:
        """Seconds of local training; `share` is the part of its steps that a device is asked for."""
        return (
            self.full_seconds
            * share
            * self.price.load(cost, samples=samples, epochs=self.epochs)
            / device.speed
        )

    def preparing(self, device: Device, samples: int) -> float:
        """Seconds before a device's first round, in which a base runs whose outputs are kept."""
        return self.full_seconds * self.price.base_load(samples) / device.speed

    @staticmethod
    def transfer(device: Device, bytes_down: float, bytes_up: float) -> float:
        """Seconds on the link, down and up; none where the fleet has no links."""
        return bytes_down / device.downlink + bytes_up / device.uplink
