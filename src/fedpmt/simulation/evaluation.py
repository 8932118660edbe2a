"""Test accuracy of what a method predicts with, in all and by class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedpmt.training.batches import chunks
from fedpmt.training.evaluated import evaluated

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedpmt.methods.base import Predictor
    from fedpmt.models.structure import Structure
    from fedpmt.simulation.executors import Executor
    from fedpmt.training.local import LocalWork, Site
    from fedpmt.types import Examples


@dataclass(frozen=True)
class Evaluation:
    """Means over the test set."""

    accuracy: float
    loss: float | None
    by_class: dict[str, float] | None


def evaluate_global(
    executor: Executor, predictor: Predictor, test: Examples, classes: int | None
) -> Evaluation:
    """The global model on the test set."""

    def scores(site: Site, span: slice) -> tuple[np.ndarray, float]:
        batch = test.take(span)
        with torch.inference_mode():
            outputs = evaluated(site.models[predictor.model], predictor.tensors, batch.inputs)
            loss = float(site.objective.loss(outputs, batch.targets)) * len(batch)
            return site.objective.score(outputs, batch.targets).cpu().numpy(), loss

    results = list(executor.map(scores, chunks(test)))
    each = np.concatenate([score for score, _ in results]).astype(np.float64)
    return Evaluation(
        float(each.mean()), sum(loss for _, loss in results) / len(test), by_class(each, test, classes)
    )


def with_statistics(
    executor: Executor, predictor: Predictor, structure: Structure, shards: Iterable[Examples]
) -> Predictor:
    """The same model with BatchNorm statistics of these samples: the mean over batches, each counting the same."""
    buffers = structure.buffers
    if not buffers:
        return predictor

    def of_batches(site: Site, shard: Examples) -> list[dict[str, torch.Tensor]]:
        model = site.models[predictor.model]
        model.set_training([False] * len(structure.layers))
        norms = [norm for norm in model.module.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        found = []
        try:
            for norm in norms:
                norm.train()
                norm.momentum = 1.0  # what is stored is the last batch's
            for span in chunks(shard):
                batch = shard.take(span)
                if len(batch) > 1:  # one sample has no variance
                    own = {name: predictor.tensors[name].clone() for name in buffers}
                    with torch.no_grad():
                        model.forward({**predictor.tensors, **own}, batch.inputs)
                    found.append(own)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return found

    batches = [own for found in executor.map(of_batches, shards) for own in found]
    if not batches:
        return predictor
    means = {name: torch.stack([own[name] for own in batches]).mean(dim=0) for name in buffers}
    return replace(predictor, tensors={**predictor.tensors, **means})


def by_class(scores: np.ndarray, test: Examples, classes: int | None) -> dict[str, float] | None:
    """Mean score of each class; None for tasks without classes."""
    if classes is None:
        return None
    labels = test.targets.cpu().numpy()
    return {
        str(label): float(scores[labels == label].mean())
        for label in range(classes)
        if (labels == label).any()
    }


def evaluate_personal(
    executor: Executor, work: LocalWork[Any], predictor: Predictor, owners: Iterable[tuple[Any, Examples]]
) -> Evaluation:
    """Each device's own model on the test samples of the classes it holds; the mean over devices."""

    def mean_score(site: Site, owner: tuple[Any, Examples]) -> float:
        own, test = owner
        with torch.inference_mode():
            return float(work.evaluate(site, predictor.tensors, own, test).mean())

    means = list(executor.map(mean_score, owners))
    return Evaluation(float(np.mean(means)) if means else 0.0, None, None)
