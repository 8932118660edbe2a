"""FedGen: Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", 2021.

The server learns a small generator G of latent features, those that enter the classifier, from the classifiers
("heads") h_k of the devices and the counts n_k^y of their labels; devices train with it beside their samples:

    server:  min_θ Σ_k mean_y α_k^y CE(h_k(G(ε, y)), y) + Div(G),   α_k^y = n_k^y / Σ_j n_j^y
    device:  CE(x, y) + A_t CE(h(G(ε, y~)), y~) + B_t KL(h(G(ε, y)) || p(x)),   y~ uniform, from the second round on

The model itself is FedAvg's. A_t and B_t fall from round to round. With share = head only the classifier is averaged:
each device keeps the layers before it, as wide as it can afford, and what is evaluated are these with the shared head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from fedpmt.methods.averaging import Averaged, MeanFold, Weight
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits, acts, require
from fedpmt.models.structure import FLOAT_BYTES
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, WHOLE, Extra, Part, size
from fedpmt.parts.width import first_channels, hidden_groups, kept_count, narrow, narrow_start
from fedpmt.pricing.matching import rate_within
from fedpmt.training.local import Job, LocalWork, Outcome, Run
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.optimizers import Adam, Moments
from fedpmt.training.server import REPLACE, ServerOptimizer
from fedpmt.types import MODEL, Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.training.local import Reach, Rng, Site
    from fedpmt.types import Arrays, Tensors

GENERATOR, COUNTS = "generator", "label_counts"
HEADS, SHARES = "heads", "shares"
MOMENTUM = 0.1
"""Of the running statistics of the generator's norm."""

STATISTICS = ("norm.mean", "norm.variance")
GENERATIVE, LATENT = "generative", "latent"
LEAST = 1e-4
"""What A_t and B_t do not fall below."""


def new_generator(
    classes: int, latent: int, noise: int, hidden: int, rng: np.random.Generator
) -> dict[str, Tensor]:
    """θ before the first round, drawn as torch draws linear layers."""
    import torch

    def drawn(units: int, inputs: int) -> tuple[Tensor, Tensor]:
        bound = inputs**-0.5
        weight, bias = (rng.uniform(-bound, bound, shape) for shape in ((units, inputs), (units,)))
        return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()

    (first, first_bias), (second, second_bias) = drawn(hidden, noise + classes), drawn(latent, hidden)
    return {
        "first.weight": first,
        "first.bias": first_bias,
        "norm.weight": torch.ones(hidden),
        "norm.bias": torch.zeros(hidden),
        "second.weight": second,
        "second.bias": second_bias,
        "norm.mean": torch.zeros(hidden),
        "norm.variance": torch.ones(hidden),
    }


def generate(generator: Tensors, noise: Tensor, labels: Tensor, *, training: bool = False) -> Tensor:
    """G(ε, y) = W_2 relu(norm(W_1 [ε, onehot(y)])). In training running statistics are moved, in place; else used."""
    import torch
    from torch.nn import functional

    classes = generator["first.weight"].shape[1] - noise.shape[1]
    given = torch.cat([noise, functional.one_hot(labels, classes).to(noise.dtype)], dim=1)
    hidden = functional.linear(given, generator["first.weight"], generator["first.bias"])
    hidden = functional.batch_norm(
        hidden,
        generator["norm.mean"],
        generator["norm.variance"],
        generator["norm.weight"],
        generator["norm.bias"],
        training=training,
        momentum=MOMENTUM,
    )
    return functional.linear(hidden.relu(), generator["second.weight"], generator["second.bias"])


def diversity(features: Tensor, noise: Tensor) -> Tensor:
    """exp(-mean_ij (mean |G_i - G_j| · mean (ε_i - ε_j)²)): 1 where all features coincide, less where noise shows."""
    import torch

    apart = (features[:, None] - features[None]).abs().mean(dim=2)
    drawn = (noise[:, None] - noise[None]).square().mean(dim=2)
    return torch.exp(-(apart * drawn).mean())


def noise_of(rng: np.random.Generator, count: int, size: int, device: torch.device) -> Tensor:
    """ε for `count` samples."""
    import torch

    return torch.from_numpy(rng.random((count, size), dtype=np.float32)).to(device)


@dataclass(frozen=True)
class GeneratorTraining(LocalWork[Moments]):
    """The server's: G learns features that the devices' heads call by their label, and that differ. Heads stay."""

    optimizer: Adam
    agreement: float  # weight of the heads' cross-entropy
    variety: float  # weight of the diversity term

    def start(self, job: Job[Moments]) -> Run[Moments]:
        generator = job.task.tensors[GENERATOR]
        params = {
            name: tensor.clone().requires_grad_()
            for name, tensor in generator.items()
            if name not in STATISTICS
        }
        fixed = {name: generator[name].clone() for name in STATISTICS}
        run = Run(job, job.part, params, fixed, job.data, lambda tensors, inputs: inputs)
        run.memo.update(job.task.tensors[HEADS])
        run.optimizer, run.moments = self.optimizer, job.own
        return run

    def loss(self, run: Run[Moments], batch: Examples) -> Tensor:
        import torch
        from torch.nn import functional

        features = generate(run.tensors, batch.inputs, batch.targets, training=True)
        # One head per device: (devices, batch, classes).
        logits = torch.einsum("bi,kci->kbc", features, run.memo["weight"]) + run.memo["bias"][:, None]
        each = functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.repeat(len(logits)), reduction="none"
        )
        # Σ_k mean_y α_k^y CE(head_k(G(y)), y)
        shares = run.memo[SHARES][:, batch.targets]
        agreement: Tensor = (shares * each.view(len(logits), -1)).mean(dim=1).sum()
        return self.agreement * agreement + self.variety * diversity(features, batch.inputs)


@dataclass(frozen=True)
class Body:
    """What a device keeps where heads alone are shared: the layers before it. Empty before its first round."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Regularised(LocalWork[Any]):
    """A device's: features of G, by its own head, in addition to its samples.

    The task's scalars say how much cross-entropy on features of any label weighs, and the pull of answers towards
    those for features of the same label.
    """

    def loss(self, run: Run[Any], batch: Examples) -> Tensor:
        import torch
        from torch.nn import functional

        from fedpmt.training.objective import logits_of

        outputs = run.forward(run.tensors, batch.inputs)
        loss, outputs = run.site.objective.loss(outputs, batch.targets), logits_of(outputs)
        generative, latent = (float(run.task.scalars[name]) for name in (GENERATIVE, LATENT))
        generator = run.task.tensors.get(GENERATOR)
        if generator is None or not (generative or latent):
            return loss
        # One generator of random numbers for all steps of a round.
        drawn = run.memo.setdefault("drawn", run.job.rng("latent"))
        model = run.job.model
        last, noise = len(model.structure.layers) - 1, generator["first.weight"].shape[1] - outputs.shape[1]
        count = len(batch)
        if generative:
            labels = torch.from_numpy(drawn.integers(outputs.shape[1], size=count)).to(outputs.device)
            features = generate(generator, noise_of(drawn, count, noise, outputs.device), labels)
            said = logits_of(model.suffix(last, run.tensors, features))
            loss = loss + generative * functional.cross_entropy(said, labels)
        if latent:
            features = generate(generator, noise_of(drawn, count, noise, outputs.device), batch.targets)
            with torch.no_grad():
                said = logits_of(model.suffix(last, run.tensors, features))
                target = functional.softmax(said, dim=1)
            log_own = functional.log_softmax(outputs, dim=1)
            loss = loss + latent * functional.kl_div(log_own, target, reduction="batchmean")
        return loss

    def reply(self, run: Run[Any]) -> tuple[Outcome, Any]:
        import torch

        classes = run.params[next(reversed(run.params))].shape[0]
        counts = torch.bincount(run.job.data.targets, minlength=classes).float()
        return Outcome({COUNTS: {COUNTS: counts}}), None

    def bounds(self, task: Task, reach: Reach) -> Mapping[str, float]:
        """Of the counts of labels, which add up to all samples."""
        return {COUNTS: float(reach.samples)}


@dataclass(frozen=True)
class OwnBody(Regularised):
    """The same work of a device that keeps the layers before the head, and sends the head alone."""

    def first(self, device: int, rng: Rng) -> Body:
        return Body()

    def start(self, job: Job[Body]) -> Run[Body]:
        from fedpmt.training.loop import begin

        model, whole = job.model, job.part.resident()
        body = (job.own or Body()).tensors or narrow_start(model.structure, model.initial(), whole)
        return begin(job, part=whole, tensors={**body, **job.task.tensors[MODEL]})

    def reply(self, run: Run[Body]) -> tuple[Outcome, Body]:
        outcome, _ = super().reply(run)
        head = run.job.model.structure.layers[-1].tensors
        body = {name: tensor.detach() for name, tensor in run.tensors.items() if name not in head}
        return outcome, Body(body)

    def predict(self, site: Site, shared: Tensors, own: Body | None, inputs: Arrays) -> Any:
        from fedpmt.training.loop import evaluate_model

        if own is None:
            raise ValueError("only a device that took part has a body")
        return evaluate_model(site.models[GLOBAL], {**own.tensors, **shared}, inputs)


@dataclass(frozen=True)
class Generating:
    """The server's state."""

    model: Averaged  # w, or the head alone
    generator: Mapping[str, Tensor]  # θ
    moments: Moments | None  # of Adam, on θ
    batch: int  # n^x

    @property
    def structure(self) -> Structure:
        """The model's."""
        return self.model.structure

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is shared of the model."""
        return self.model.tensors

    @property
    def head(self) -> tuple[str, str]:
        """The names of the classifier's weight and bias."""
        weight, bias = self.structure.layers[-1].parameters
        return weight, bias


class GeneratorFold(Fold[Generating]):
    """The mean of the model; then the generator learns from the heads that came."""

    def __init__(self, method: FedGen, state: Generating, round: Round) -> None:
        self._method, self._state, self._round = method, state, round
        self._mean = MeanFold(state.model, "overlap", method.weight, method.server)
        self._heads: dict[int, tuple[Tensor, Tensor]] = {}  # by device; of all that came only these are held
        self._counts: dict[int, Tensor] = {}

    def add(self, reply: Reply) -> None:
        self._mean.add(reply)
        weight, bias = (self._state.tensors[name] + reply.update[name] for name in self._state.head)
        self._heads[reply.device] = weight, bias
        # Whoever says that it holds less than nothing is not believed.
        self._counts[reply.device] = reply.tensors[COUNTS][COUNTS].clamp(min=0)

    def finish(self, server: Server) -> Step[Generating]:
        import torch

        method, devices = self._method, sorted(self._heads)
        after = replace(self._state, model=self._mean.finish(server).state)
        known = bool(sum(int(count.sum()) for count in self._counts.values()))
        wanted = method.steps if known and (method.generative or method.latent) else 0
        each = method.step_operations(self._state, len(devices))
        steps = server.affordable(lambda steps: steps * each, wanted)
        metrics = {"server_steps": float(steps), "server_steps_default": float(method.steps)}
        if steps:
            heads = [
                torch.stack([self._heads[device][place] for device in devices]).float() for place in (0, 1)
            ]
            counts = torch.stack([self._counts[device] for device in devices])
            after, metrics["generator_loss"] = method.teach(
                after, (heads[0], heads[1]), counts, steps, self._round, server.site
            )
        return Step(after, metrics, steps * each)


@dataclass(frozen=True)
class FedGen(Method[Generating, Any]):
    """FedAvg with a generator of latent features. A budget acts on it only where bodies stay on their devices."""

    weight: Weight = "samples"
    share: Literal["model", "head"] = "model"  # what is averaged: all of it, or the classifier alone
    generative: float = 10.0  # A_0
    latent: float = 1.0  # B_0, as the authors' code has for EMNIST; their 10 for MNIST diverges at our rates
    decay: float = 0.98  # of A, B and the generator's rate, per round
    steps: int = 50  # of the generator, per round
    rate: float = 3e-4  # of the generator's Adam
    adam_decay: float = 1e-2  # weight decay of the generator's Adam
    agreement: float = 1.0  # weight of the heads' cross-entropy
    variety: float = 1.0  # weight of Div
    noise: int = 32  # size of ε
    hidden: int = 256  # units of the generator
    server: ServerOptimizer = REPLACE

    def __post_init__(self) -> None:
        require(
            self,
            generative=(self.generative >= 0, ">= 0"),
            latent=(self.latent >= 0, ">= 0"),
            decay=(0 < self.decay <= 1, "> 0 and <= 1"),
            steps=(self.steps >= 0, ">= 0"),
            rate=(self.rate > 0, "> 0"),
            adam_decay=(self.adam_decay >= 0, ">= 0"),
            agreement=(self.agreement >= 0, ">= 0"),
            variety=(self.variety >= 0, ">= 0"),
            noise=(self.noise >= 1, ">= 1"),
            hidden=(self.hidden >= 1, ">= 1"),
        )

    @property
    def traits(self) -> Traits:
        own = self.share == "head"
        return Traits(
            needs_classes=True,
            sends_more=True,
            combines="mean, distillation from a generator",
            needs_round="its server trains a generator on the classifiers of a round's devices",
            server_work="trains",
            keeps="a net without its head" if own else "",
            keeps_net=own,
            fitted_net=own,
            discloses="label counts",
            budget=acts("device", "bytes", "upload") if own else {},
        )

    @property
    def local(self) -> LocalWork[Any]:
        return OwnBody() if self.share == "head" else Regularised()

    def models(
        self, model: LayeredModel, example: Arrays, rng: Callable[[str], np.random.Generator]
    ) -> Mapping[str, LayeredModel]:
        """None; but only a chain that ends in a linear layer has features that enter a classifier."""
        last = model.structure.layers[-1]
        shapes = [len(model.structure.shapes[name]) for name in last.parameters]
        if not model.composable or shapes != [2, 1]:
            raise SettingError("fedgen needs a model that is a chain of its layers and ends in a linear one")
        return {}

    def init(self, setup: Setup) -> Generating:
        prototype = setup.prototypes[GLOBAL]
        structure = prototype.structure
        classes, latent = structure.shapes[structure.layers[-1].parameters[0]]
        drawn = new_generator(classes, latent, self.noise, self.hidden, setup.rng("generator"))
        device = prototype.tensors[structure.parameters[0]].device
        drawn = {name: tensor.to(device) for name, tensor in drawn.items()}
        state = Generating(Averaged(structure, prototype.tensors), drawn, None, setup.batch)
        if self.share == "model":
            return state
        return replace(
            state, model=Averaged(structure, {name: prototype.tensors[name] for name in state.head})
        )

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
        generative, latent = self.weights(round.index)
        scalars = {GENERATIVE: generative, LATENT: latent}
        part = self.part(state, client, round)
        part = replace(part, extra=self.extra(state, part, generative, latent))
        shared = {GENERATOR: state.generator} if generative or latent else {}
        return Task((part,), {MODEL: state.tensors, **shared}, scalars)

    def part(self, state: Generating, client: Client, round: Round) -> Part:
        """All of the model; or the head, behind a body that stays and is as wide as the device can afford."""
        if self.share == "model":
            return full(state.structure)

        def fits(rate: float) -> bool:
            # The body must do for all rounds, those with a generator among them.
            part = self.add_body(state, rate)
            return client.fits(replace(part, extra=self.extra(state, part, self.generative, self.latent)))

        return self.add_body(state, rate_within(fits))

    def add_body(self, state: Generating, rate: float) -> Part:
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

    def extra(self, state: Generating, part: Part, generative: float, latent: float) -> Extra:
        """What the generator takes on a device: its own forward pass, and the head's on what it makes."""
        classes = state.structure.shapes[state.head[0]][0]
        structure = state.structure
        kept = sum(
            structure.bytes_each(name) * size(selection, structure.shapes[name])
            for name, selection in part.kept.items()
        )
        counts = Extra(answers={COUNTS: {COUNTS: (classes,)}}, kept_bytes=kept)
        if not (generative or latent):
            return counts
        made, head = products(state)
        # The head learns from y~, and only answers for y.
        step = (made + 2 * head) * (generative > 0) + (made + head) * (latent > 0)
        memory = FLOAT_BYTES * sum(tensor.numel() for tensor in state.generator.values())
        return replace(counts, step=state.batch * step, memory_bytes=memory, task_bytes=memory)

    def fold(self, state: Generating, round: Round) -> Fold[Generating]:
        return GeneratorFold(self, state, round)

    def teach(
        self,
        state: Generating,
        heads: tuple[Tensor, Tensor],
        counts: Tensor,
        steps: int,
        round: Round,
        site: Site,
    ) -> tuple[Generating, float]:
        """The generator after so many steps with these heads."""
        import torch

        from fedpmt.training.loop import train_on_server

        held = counts.sum(dim=0)
        # α_k^y = n_k^y / Σ_j n_j^y
        shares = counts / held.clamp(min=1)
        rng = round.rng("generator")
        # A norm needs two samples; y comes from the labels that somebody has.
        batch = max(2, state.batch)
        count = steps * batch
        labels = torch.from_numpy(rng.choice(np.flatnonzero(held.cpu().numpy()), size=count)).to(held.device)
        data = Examples(noise_of(rng, count, self.noise, held.device), labels, np.arange(count))
        given = {"weight": heads[0], "bias": heads[1], SHARES: shares}
        job = Job(
            site,
            Task((), {GENERATOR: state.generator, HEADS: given}),
            full(state.structure),
            state.moments,
            data,
            lambda purpose: round.rng(f"generator/{purpose}"),
        )
        work = GeneratorTraining(Adam(self.adam_decay), self.agreement, self.variety)
        rate = self.rate * self.decay**round.index
        run, loss = train_on_server(work, job, steps=steps, rate=rate, batch=batch)
        generator = {name: tensor.detach() for name, tensor in run.tensors.items()}
        moments = run.stepper.moments() if run.stepper else None
        return replace(state, generator=generator, moments=moments), loss

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
