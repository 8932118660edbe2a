"""FedGen: Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", 2021.

The server learns a small generator G of latent features, those that enter the classifier, from the classifiers
("heads") h_k of the devices and the counts n_k^y of their labels; devices train with it beside their samples:

    server:  min_θ Σ_k mean_y α_k^y CE(h_k(G(ε, y)), y) + Div(G),   α_k^y = n_k^y / Σ_j n_j^y
    device:  CE(x, y) + A_t CE(h(G(ε, y~)), y~) + B_t KL(h(G(ε, y)) || p(x)),   y~ uniform, from the second round on

The model itself is FedAvg's. A_t and B_t fall from round to round. With share = head only the classifier is averaged:
each device keeps the layers before it, as wide as it can afford, and what is evaluated are these with the shared head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from fedpmt.methods.base import ABOVE_0, FROM_0, FROM_1, SHARE, Method, Predictor, Round, Setup, Step
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, WHOLE, Beside, Part
from fedpmt.parts.width import first_channels, hidden_groups, kept_count, narrow
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.pricing.matching import rate_within
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL, Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np
    from torch import Tensor

    from fedpmt.methods.base import Action
    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.resources import Resource
    from fedpmt.training.adam import Moments
    from fedpmt.training.latent import Body
    from fedpmt.training.local import LocalWork
    from fedpmt.types import Arrays

GENERATIVE, LATENT = "generative", "latent"
LEAST = 1e-4
"""What A_t and B_t do not fall below."""


@dataclass(frozen=True)
class Generating:
    """The server's state."""

    structure: Structure
    tensors: Mapping[str, Tensor]  # w, or the head alone
    generator: Mapping[str, Tensor]  # θ
    moments: Moments | None  # of Adam, on θ
    batch: int  # n^x

    @property
    def head(self) -> tuple[str, str]:
        """The names of the classifier's weight and bias."""
        weight, bias = self.structure.layers[-1].parameters
        return weight, bias


@dataclass(frozen=True)
class FedGen(Method[Generating, "Body | None"]):
    """FedAvg with a generator of latent features. A budget acts on it only where bodies stay on their devices."""

    needs_classes: ClassVar[bool] = True
    server_work = "trains"
    sends_more: ClassVar[bool] = True

    weight: Literal["samples", "uniform"] = "samples"
    share: Literal["model", "head"] = "model"  # what is averaged: all of it, or the classifier alone
    generative: float = 10.0  # A_0
    latent: float = 1.0  # B_0, as the authors' code has for EMNIST; their 10 for MNIST diverges at our rates
    decay: float = 0.98  # of A, B and the generator's rate, per round
    steps: int = 50  # of the generator, per round
    rate: float = 3e-4  # of the generator's Adam
    weight_decay: float = 1e-2  # of the generator's Adam
    agreement: float = 1.0  # weight of the heads' cross-entropy
    variety: float = 1.0  # weight of Div
    noise: int = 32  # size of ε
    hidden: int = 256  # units of the generator

    def __post_init__(self) -> None:
        self.require(
            generative=(self.generative >= 0, FROM_0),
            latent=(self.latent >= 0, FROM_0),
            decay=(0 < self.decay <= 1, SHARE),
            steps=(self.steps >= 0, FROM_0),
            rate=(self.rate > 0, ABOVE_0),
            weight_decay=(self.weight_decay >= 0, FROM_0),
            agreement=(self.agreement >= 0, FROM_0),
            variety=(self.variety >= 0, FROM_0),
            noise=(self.noise >= 1, FROM_1),
            hidden=(self.hidden >= 1, FROM_1),
        )

    @property
    def keeps(self) -> str:
        return "a net without its head" if self.keeps_net else ""

    @property
    def keeps_net(self) -> bool:
        return self.share == "head"

    @property
    def fitted_net(self) -> bool:
        return self.keeps_net

    def kept_bytes(self, structures: Mapping[str, Structure]) -> int:
        return FLOAT_BYTES * structures[GLOBAL].size(structures[GLOBAL].tensors) if self.keeps_net else 0

    def action(self, resource: Resource) -> Action:
        return "device" if self.keeps_net and resource not in ("bytes", "upload") else "none"

    @property
    def discloses(self) -> str:
        return "label counts"

    def prototypes(
        self, model: LayeredModel, example: Arrays, rng: Callable[[str], np.random.Generator]
    ) -> Mapping[str, LayeredModel]:
        """None; but only a chain that ends in a linear layer has features that enter a classifier."""
        last = model.structure.layers[-1]
        shapes = [len(model.structure.shapes[name]) for name in last.parameters]
        if not model.composable or shapes != [2, 1]:
            raise SettingError(
                "method = 'fedgen' is refused: it needs a model that is a chain of its layers and ends in a linear one"
            )
        return {}

    def init(self, setup: Setup) -> Generating:
        from fedpmt.training.latent import new_generator

        prototype = setup.prototypes[GLOBAL]
        structure = prototype.structure
        classes, latent = structure.shapes[structure.layers[-1].parameters[0]]
        drawn = new_generator(classes, latent, self.noise, self.hidden, setup.rng("generator"))
        state = Generating(structure, prototype.tensors, drawn, None, setup.batch)
        if self.share == "model":
            return state
        return replace(state, tensors={name: prototype.tensors[name] for name in state.head})

    def weights(self, index: int) -> tuple[float, float]:
        """A_t and B_t; none before a generator has learned anything."""
        if index == 0:
            return 0.0, 0.0
        found = [
            max(LEAST, start * self.decay**index) if start else 0.0
            for start in (self.generative, self.latent)
        ]
        return found[0], found[1]

    def assign(self, state: Generating, client: Client, round: Round) -> Task:
        from fedpmt.training.latent import GENERATOR

        generative, latent = self.weights(round.index)
        scalars = {GENERATIVE: generative, LATENT: latent}
        part = replace(self.part(state, client, round), beside=self.beside(state, generative, latent))
        shared = {GENERATOR: state.generator} if generative or latent else {}
        return Task((part,), {MODEL: state.tensors, **shared}, scalars)

    def part(self, state: Generating, client: Client, round: Round) -> Part:
        """All of the model; or the head, behind a body that stays and is as wide as the device can afford."""
        if self.share == "model":
            return full(state.structure)
        fits = self.fits(client, state.structure, round.price)
        # The body must do for all rounds, those with a generator among them.
        dearest = self.beside(state, self.generative, self.latent)
        rate = rate_within(lambda rate: fits(replace(self.bodied(state, rate), beside=dearest)))
        return self.bodied(state, rate)

    def bodied(self, state: Generating, rate: float) -> Part:
        """The head with a body of this share of channels; what enters the head is whole, for all heads are alike."""
        axes = state.structure.require_axes("fedgen")
        entering = {axis.group for axis in axes.tensors[state.head[0]]}
        kept = {
            group.name: first_channels(group.size, kept_count(group.size, rate))
            for group in hidden_groups(axes)
            if group.name not in entering
        }
        net = narrow(state.structure, axes, kept, f"body {rate:.2f}", derivable=True)
        head = dict.fromkeys(state.head, WHOLE)
        body = {name: selection for name, selection in net.trained.items() if name not in head}
        return Part(GLOBAL, head, head, net.label, kept=body)

    def beside(self, state: Generating, generative: float, latent: float) -> Beside:
        """What the generator takes on a device: its own forward pass, and the head's on what it makes."""
        from fedpmt.training.latent import COUNTS

        classes = state.structure.shapes[state.head[0]][0]
        counts = Beside(answers={COUNTS: {COUNTS: (classes,)}})
        if not (generative or latent):
            return counts
        made, head = products(state)
        # The head learns from y~, and only answers for y.
        step = (made + 2 * head) * (generative > 0) + (made + head) * (latent > 0)
        memory = FLOAT_BYTES * sum(tensor.numel() for tensor in state.generator.values())
        return replace(counts, step=state.batch * step, memory_bytes=memory, task_bytes=memory)

    @property
    def combines(self) -> str:
        return "mean, distillation from a generator"

    def local(self) -> LocalWork[Body | None]:
        from fedpmt.training.latent import BodyWork, RegularisedWork

        work = RegularisedWork(GENERATIVE, LATENT)
        return BodyWork(work) if self.share == "head" else work

    def aggregate(self, state: Generating, replies: Iterable[Reply], round: Round) -> Step[Generating]:
        import torch

        from fedpmt.aggregation import CoverageMean
        from fedpmt.training.latent import COUNTS

        mean, heads, counts = CoverageMean(state.tensors), [], []
        for reply in sorted(replies, key=lambda reply: reply.device):
            mean.add(reply.part, reply.tensors[MODEL], reply.samples if self.weight == "samples" else 1)
            # Of all that came only the heads are held.
            heads.append([reply.tensors[MODEL][name] for name in state.head])
            # Whoever says that it holds less than nothing is not believed.
            counts.append(reply.tensors[COUNTS][COUNTS].clamp(min=0))
        after = replace(state, tensors=mean.result())
        known = bool(sum(int(count.sum()) for count in counts))
        wanted = self.steps if known and (self.generative or self.latent) else 0
        each = self.step_operations(state, len(heads))
        steps = round.server.affordable(lambda steps: steps * each, wanted)
        metrics = {"server_steps": float(steps), "server_steps_default": float(self.steps)}
        if steps:
            weight, bias = (torch.stack(tensors) for tensors in zip(*heads, strict=True))
            after, loss = self.taught(after, weight, bias, torch.stack(counts), steps, round)
            metrics["generator_loss"] = loss
        return Step(after, metrics, steps * each)

    def taught(
        self, state: Generating, weight: Tensor, bias: Tensor, counts: Tensor, steps: int, round: Round
    ) -> tuple[Generating, float]:
        """The generator after so many steps with these heads."""
        import numpy as np
        import torch

        from fedpmt.training.adam import Adam
        from fedpmt.training.distillation import on_server
        from fedpmt.training.latent import GENERATOR, HEADS, SHARES, GeneratorWork, noise_of

        held = counts.sum(dim=0)
        # α_k^y = n_k^y / Σ_j n_j^y
        shares = counts / held.clamp(min=1)
        rng = round.rng("generator")
        # A norm needs two samples; y comes from the labels that somebody has.
        batch = max(2, state.batch)
        count = steps * batch
        labels = torch.from_numpy(rng.choice(np.flatnonzero(held.cpu().numpy()), size=count)).to(held.device)
        data = Examples(noise_of(rng, count, self.noise, held.device), labels, np.arange(count))
        heads = {"weight": weight, "bias": bias, SHARES: shares}
        rate = self.rate * self.decay**round.index
        tensors, moments, loss = on_server(
            GeneratorWork(Adam(rate, self.weight_decay), self.agreement, self.variety),
            round.server.site,
            Task((), {GENERATOR: state.generator, HEADS: heads}),
            full(state.structure),
            state.moments,
            data,
            lambda purpose: round.rng(f"generator/{purpose}"),
            steps=steps,
            rate=rate,
            batch=batch,
            round_index=round.index,
        )
        return replace(state, generator=tensors, moments=moments), loss

    def step_operations(self, state: Generating, heads: int) -> float:
        """One step of the generator: forward, weight gradients, error signals; all heads forward and back to G."""
        made, head = products(state)
        entry = (
            self.hidden * state.generator["first.weight"].shape[1]
        )  # nothing is sent back to what enters G
        return state.batch * (3 * made - entry + 2 * heads * head) + sum(
            tensor.numel() for tensor in state.generator.values()
        )

    def predictor(self, state: Generating) -> Predictor:
        return Predictor("split" if self.share == "head" else "global", GLOBAL, state.tensors)

    def neutral(self) -> Self:
        return replace(self, generative=0.0, latent=0.0, weight="samples", share="model")


def products(state: Generating) -> tuple[int, int]:
    """Multiply-adds per sample of the generator's forward pass, and of the head's."""
    made = sum(state.generator[name].numel() for name in ("first.weight", "second.weight"))
    classes, latent = state.structure.shapes[state.head[0]]
    return made, classes * latent
