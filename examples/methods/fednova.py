"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020.

Devices take different numbers of steps τ_k: a weak one as many as it can afford, and one with few samples has few.
In a plain mean those with many steps count for more. FedNova averages the change per step, then takes τ_eff steps:

    w <- w + τ_eff Σ_k p_k (w_k - w) / τ_k,   p_k = |D_k| / Σ_j |D_j|,   τ_eff = Σ_k p_k τ_k

With momentum, τ_k is how often the device's gradients stand in w_k - w all together (‖a_k‖_1 in the paper).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from fedpmt.methods import (
    UPDATE,
    Averaged,
    Client,
    Fold,
    Gather,
    LocalWork,
    MeanFold,
    Outcome,
    Part,
    PartAveraging,
    Reply,
    Round,
    Run,
    Server,
    Step,
    Task,
    Traits,
    acts,
    full,
    weight_of,
)


class CountedSteps(LocalWork[None]):
    """Trains as always, and says how many steps it took."""

    def reply(self, run: Run[None]) -> tuple[Outcome, None]:
        m = getattr(run.site.settings.optimizer, "momentum", 0.0)
        # ‖a‖_1 = Σ_{j=1..τ} (1 + m + .. + m^{j-1}), which is τ without momentum
        tau = sum((1 - m**step) / (1 - m) for step in range(1, run.steps + 1))
        return Outcome(scalars={"tau": tau}), None


@dataclass(frozen=True)
class FedNova(PartAveraging):
    """Every device trains the whole model in as many steps as it can afford; the server evens them out."""

    normalise: Literal["none", "steps", "draws"] = "steps"  # none: the plain mean of FedAvg

    @property
    def traits(self) -> Traits:
        # Fewer steps take fewer operations and less time, but as many bytes and as much memory.
        budget = acts("work", "bytes", "upload", "memory")
        return Traits(sends_more=True, combines="normalised mean", optimizers=("sgd",), budget=budget)

    @property
    def local(self) -> LocalWork[None]:
        return CountedSteps()

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return full(state.structure)

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        task = super().assign(state, client, round)
        fitting = [steps for steps in range(1, client.steps + 1) if client.fits(task.offer[0], steps)]
        return replace(task, steps=max(fitting, default=1))

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Gather(partial(self.average, state))

    def average(self, state: Averaged, replies: list[Reply], server: Server) -> Step[Averaged]:
        """Scale each update by τ_eff / τ_k, and average as always; running statistics of norms stay as they are."""
        mean = MeanFold(state, "overlap", self.weight, self.server)
        parameters = set(state.structure.parameters)
        taus = [float(reply.scalars["tau"]) if self.normalise != "none" else 1.0 for reply in replies]
        weights = [weight_of(self.weight, reply.samples) for reply in replies]
        # τ_eff = Σ_k p_k τ_k
        effective = sum(a * tau for a, tau in zip(weights, taus, strict=True)) / (sum(weights) or 1)
        for reply, tau in zip(replies, taus, strict=True):
            update = {n: d * (effective / tau) if n in parameters else d for n, d in reply.update.items()}
            mean.add(replace(reply, tensors={UPDATE: update}))
        return mean.finish(server)

    def neutral(self) -> "FedNova":
        return replace(self, normalise="none")
