"""Work with a generator of latent features, which are what enters the classifier (FedGen).

G(ε, y) = W_2 relu(norm(W_1 [ε, onehot(y)])),   ε uniform on [0, 1)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpmt.parts.part import GLOBAL
from fedpmt.parts.width import narrow_start
from fedpmt.training.adam import AdamWork, Moments
from fedpmt.training.distillation import answers
from fedpmt.training.local import LocalWork, Outcome, Reach, Rng, Run, Site
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples, Tensors

GENERATOR, COUNTS = "generator", "label_counts"
HEADS, SHARES = "heads", "shares"
MOMENTUM = 0.1
"""Of the running statistics of the generator's norm."""


def new_generator(
    classes: int, latent: int, noise: int, hidden: int, rng: np.random.Generator
) -> dict[str, Tensor]:
    """θ before the first round, drawn as torch draws linear layers."""

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


STATISTICS = ("norm.mean", "norm.variance")


def generate(generator: Tensors, noise: Tensor, labels: Tensor, *, training: bool = False) -> Tensor:
    """G(ε, y). In training the running statistics are moved, in place; else they are used."""
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
    apart = (features[:, None] - features[None]).abs().mean(dim=2)
    drawn = (noise[:, None] - noise[None]).square().mean(dim=2)
    return torch.exp(-(apart * drawn).mean())


def noise_of(rng: np.random.Generator, count: int, size: int, device: torch.device) -> Tensor:
    """ε for so many samples."""
    return torch.from_numpy(rng.random((count, size), dtype=np.float32)).to(device)


@dataclass(frozen=True)
class GeneratorWork(AdamWork):
    """The server's: G learns features that the devices' heads call by their label, and that differ. Heads stay."""

    agreement: float  # weight of the heads' cross-entropy
    variety: float  # weight of the diversity term

    def start(self, site: Site, task: Task, part: Part, own: Moments | None, data: Examples, rng: Rng) -> Run:
        generator = task.tensors[GENERATOR]
        params = {
            name: tensor.clone().requires_grad_()
            for name, tensor in generator.items()
            if name not in STATISTICS
        }
        fixed = {name: generator[name].clone() for name in STATISTICS}
        memo = {**task.tensors[HEADS]}
        run = Run(site, task, part, params, fixed, data, lambda tensors, inputs: inputs, memo=memo)
        return self.ready(run, own or Moments())

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
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

    def reply(self, run: Run, own: Moments | None, data: Examples) -> tuple[Outcome, Moments]:
        trained = {name: tensor.detach() for name, tensor in run.tensors.items()}
        return Outcome({GENERATOR: trained}), self.moments(run)


@dataclass(frozen=True)
class Body:
    """What a device keeps where heads alone are shared: the layers before it. Empty before its first round."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RegularisedWork(LocalWork[Body | None]):
    """A device's: features of G, by its own head, beside its samples."""

    generative: str  # the scalar of a task that weighs cross-entropy on features of any label
    latent: str  # the scalar that weighs the pull of answers towards those for features of the same label

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        outputs = run.forward(run.tensors, batch.inputs)
        loss = run.site.objective.loss(outputs, batch.targets)
        generative, latent = (float(run.task.scalars[name]) for name in (self.generative, self.latent))
        generator = run.task.tensors.get(GENERATOR)
        if generator is None or not (generative or latent):
            return loss
        # One generator for all steps of a round.
        drawn = run.memo.setdefault("drawn", rng("latent"))
        model = run.site.models[run.part.model]
        last, size = len(model.structure.layers) - 1, generator["first.weight"].shape[1] - outputs.shape[1]
        count = len(batch)
        if generative:
            labels = torch.from_numpy(drawn.integers(outputs.shape[1], size=count)).to(outputs.device)
            features = generate(generator, noise_of(drawn, count, size, outputs.device), labels)
            loss = loss + generative * functional.cross_entropy(
                model.suffix(last, run.tensors, features), labels
            )
        if latent:
            features = generate(generator, noise_of(drawn, count, size, outputs.device), batch.targets)
            with torch.no_grad():
                target = functional.softmax(model.suffix(last, run.tensors, features), dim=1)
            log_own = functional.log_softmax(outputs, dim=1)
            loss = loss + latent * functional.kl_div(log_own, target, reduction="batchmean")
        return loss

    def reply(self, run: Run, own: Body | None, data: Examples) -> tuple[Outcome, Body | None]:
        outcome, _ = super().reply(run, own, data)
        classes = run.params[next(reversed(run.params))].shape[0]
        counts = torch.bincount(data.targets, minlength=classes).float()
        return replace(outcome, tensors={**outcome.tensors, COUNTS: {COUNTS: counts}}), None

    def bounds(self, task: Task, reach: Reach) -> Mapping[str, float]:
        """Of the counts of labels, which add up to all samples."""
        return {COUNTS: float(reach.samples)}


@dataclass(frozen=True)
class BodyWork(LocalWork[Body | None]):
    """The same work of a device that keeps the layers before the head, and sends the head alone."""

    inner: RegularisedWork

    def first(self, device: int, rng: Rng) -> Body:
        return Body()

    def start(self, site: Site, task: Task, part: Part, own: Body | None, data: Examples, rng: Rng) -> Run:
        model, whole = site.models[GLOBAL], part.resident()
        body = (own or Body()).tensors or narrow_start(model.structure, model.initial(), whole)
        tensors = {**body, **task.tensors[MODEL]}
        return self.inner.start(
            site, replace(task, tensors={**task.tensors, MODEL: tensors}), whole, own, data, rng
        )

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        return self.inner.loss(run, batch, rng)

    def reply(self, run: Run, own: Body | None, data: Examples) -> tuple[Outcome, Body]:
        outcome, _ = self.inner.reply(run, own, data)
        trained = outcome.tensors[MODEL]
        last = run.site.models[GLOBAL].structure.layers[-1].tensors
        head = {name: trained[name] for name in last}
        body = {name: tensor.detach() for name, tensor in run.tensors.items() if name not in head}
        return replace(outcome, tensors={**outcome.tensors, MODEL: head}), Body(body)

    def evaluate(self, site: Site, shared: Tensors, own: Body | None, data: Examples) -> Tensor:
        if own is None:
            raise ValueError("only a device that took part has a body")
        said = answers(site.models[GLOBAL], {**own.tensors, **shared}, data)
        return site.objective.score(said, data.targets)
