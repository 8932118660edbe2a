"""FedEL: Zhang, Chen, Bian, Wang and Xu, "FedEL: Federated Elastic Learning for Heterogeneous Devices", 2025.

A window of layers slides through the net: FedPMT with another block. With a balance β the window is a layer longer than
a device can afford, and of its tensors the device trains the most important ones, as many as it can:

    I_k[j] <- β I_k[j] + (1 - β) I[j],   I[j] = ||w^{t+1}[j] - w^t[j]||² / η,   I_k[j] = ||w_k[j] - w[j]||² / η

with w_k as device k last sent it. All importances are over the same η, so that no choice depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from fedpmt.methods.averaging import Averaged, MeanFold
from fedpmt.methods.base import Setup, Step, Traits, require
from fedpmt.methods.fedpmt import Block, FedPMT
from fedpmt.parts.depth import LEVEL_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.methods.base import Fold, Round, Server
    from fedpmt.parts.part import Part
    from fedpmt.pricing.meter import Plan
    from fedpmt.training.messages import Client, Reply
    from fedpmt.types import Tensors

Importance = dict[str, float]
"""By tensor."""


@dataclass(frozen=True)
class Weighed(Averaged):
    """The server's state where tensors have importances."""

    shared: Mapping[str, float] = field(
        default_factory=dict
    )  # I, of the last server step that moved a tensor
    own: Mapping[int, Importance] = field(default_factory=dict)  # I_k, of devices that have replied


class WeighingFold(MeanFold):
    """The mean, and how far each tensor was moved: by each device, and by the server's step."""

    def __init__(self, method: FedEL, state: Weighed, momentum: float) -> None:
        super().__init__(
            state, method.rule, method.weight, method.server, method.mean, method.normalise, momentum
        )
        self._before, self._own = state, dict(state.own)

    def add(self, reply: Reply) -> None:
        super().add(reply)
        self._own[reply.device] = {**self._own.get(reply.device, {}), **squares(reply.update)}

    def finish(self, server: Server) -> Step[Averaged]:
        before, step = self._before, super().finish(server)
        # I[j] = ||w^{t+1}[j] - w^t[j]||²
        moved = {
            name: tensor - before.tensors[name]
            for name, tensor in step.state.tensors.items()
            if tensor is not before.tensors[name]
        }
        after = step.state
        shared = {**before.shared, **squares(moved)}
        return Step(Weighed(after.structure, after.tensors, after.moments, shared, self._own))


def squares(changes: Tensors) -> Importance:
    """||Δ||² of each tensor."""
    return {name: float(change.double().square().sum()) for name, change in changes.items()}


@dataclass(frozen=True)
class FedEL(FedPMT):
    """A window of layers slides through the net.

    Paper: Zhang, Chen, Bian, Wang and Xu, "FedEL: Federated Elastic Learning for Heterogeneous Devices", NeurIPS 2025.
    """

    block: Block = "window"
    balance: float | None = None  # β, the share of a device's own importance; None: all tensors of the window

    def __post_init__(self) -> None:
        super().__post_init__()
        chooses = self.balance is not None
        require(
            self,
            balance=(self.balance is None or 0 <= self.balance <= 1, ">= 0 and <= 1"),
            block=(not chooses or self.block == "window", "window with a balance"),
            normalise=(not chooses or self.normalise != "draws", "none or steps with a balance"),
        )

    @property
    def traits(self) -> Traits:
        # What a device's reply says of its tensors is lost in a secure sum.
        return super().traits if self.balance is None else replace(super().traits, sums="none")

    def init(self, setup: Setup) -> Averaged:
        state = super().init(setup)
        return state if self.balance is None else Weighed(state.structure, state.tensors)

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        if isinstance(state, Weighed):
            return WeighingFold(self, state, round.momentum)
        return super().fold(state, round)

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        """The window, or the most important tensors of one that is a layer longer."""
        window = super().part(state, client, round)
        if self.balance is None or client.plan is None or not isinstance(state, Weighed) or not state.shared:
            return window
        beginning = next(some for some in self.blocks(state) if any(one is window for one in some))
        place = next(place for place, one in enumerate(beginning) if one is window)
        longer = beginning[min(place + 1, len(beginning) - 1)]
        return self.choose(state, longer, self.importance(state, client.id), client.plan) or window

    def importance(self, state: Weighed, device: int) -> Importance:
        """I_k of each tensor; of one that a device has not trained yet the server's alone is known."""
        assert self.balance is not None
        own, found = state.own.get(device, {}), {}
        for name in state.structure.parameters:
            shared = state.shared.get(name, 0.0)
            # I_k <- β I_k + (1 - β) I
            found[name] = self.balance * own.get(name, shared) + (1 - self.balance) * shared
        return found

    def choose(self, state: Averaged, window: Part, importance: Importance, plan: Plan) -> Part | None:
        """The most important tensors of a window, each in turn that can still be afforded; None where none can."""
        layers = [
            layer for layer in state.structure.layers if any(name in window.trained for name in layer.tensors)
        ]
        # Nearest to the output first, which cost least: of equally important ones these are preferred.
        names = [name for layer in reversed(layers) for name in layer.parameters]
        chosen = set[str]()
        part = None
        for name in sorted(names, key=lambda one: -importance[one]):
            some = {*chosen, name}
            trained = {
                one: selection
                for layer in layers
                for one in layer.tensors
                for selection in [window.trained[one]]
                # Running statistics go with the parameters of their layer.
                if one in some or (one in layer.buffers and not some.isdisjoint(layer.parameters))
            }
            if len(some) == len(names):
                wider = window
            else:
                label = f"{window.label}, {len(some)} of {len(names)} tensors"
                # A bit for each tensor says which.
                wider = replace(
                    window, trained=trained, label=label, overhead_bytes=LEVEL_ID_BYTES - (-len(names) // 8)
                )
            if plan.affords(wider):
                chosen, part = some, wider
        return part

    def neutral(self) -> Self:
        return replace(self, weight="samples", splitting="server", average="trainers", balance=None)
