"""The score of what a method predicts with on the test set: in all, by class and by level."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedpmt.seeds import Seeds
from fedpmt.training.batches import chunks
from fedpmt.training.loop import evaluate_model
from fedpmt.types import DivergedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedpmt.data.base import FederatedData
    from fedpmt.devices.fleet import Fleet
    from fedpmt.methods.base import Predictor
    from fedpmt.models.structure import Structure
    from fedpmt.simulation.executors import Executor
    from fedpmt.simulation.loop import Federation, Progress
    from fedpmt.training.local import LocalWork, Site
    from fedpmt.types import Examples


PERSONAL_DEVICES = 100
"""Personal models are evaluated on at most this many of the devices that took part."""

STATISTICS_DEVICES = 100
"""BatchNorm statistics that are found anew are of at most this many devices' data."""

LEVEL_DEVICES = 50
"""A level's mix of classes is taken from at most this many of its devices."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the test set."""

    score: float | None  # None where there is no model to evaluate yet
    loss: float | None
    by_class: dict[str, float] | None


def evaluate(federation: Federation, progress: Progress) -> dict[str, Any]:
    """Score and loss on the test set, as fields of a round's record."""
    predictor = federation.predictor(progress)
    for name, tensor in predictor.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DivergedError(
                f"training diverged: '{name}' is not finite after round {progress.rounds}; a smaller --lr may help"
            )
    if predictor.kind == "global":
        classes = federation.problem.data.classes
        found = evaluate_global(federation.executor, predictor, federation.data.test, classes)
    else:
        accepted = progress.accepted or {}
        members = sorted(accepted)[:PERSONAL_DEVICES]
        # A model that is half the server's knows all classes; a device's own answers for what the device has.
        of_its_classes = predictor.kind == "personal"
        owners = (
            (
                federation.store.read(device, accepted[device]),
                own_test(federation, device, of_its_classes),
            )
            for device in members
        )
        found = evaluate_personal(federation.executor, federation.method.local, predictor, owners)
    finite_loss = found.loss if found.loss is not None and np.isfinite(found.loss) else None
    return {
        "score": found.score,
        "score_name": federation.problem.objective.score_name,
        "maximize": federation.problem.objective.maximize,
        "loss": finite_loss,
        "score_by_class": found.by_class,
        "score_by_level": by_level(federation, found.by_class),
        "evaluates": predictor.kind,
    }


def own_test(federation: Federation, device: int, of_its_classes: bool) -> Examples:
    """What a device's own model is tested on, the same in every round."""
    test, limit = federation.data.test, federation.settings.personal_test
    counts = federation.problem.data.label_counts(device) if of_its_classes else None
    held = np.arange(len(test)) if counts is None else np.flatnonzero(counts[test.targets.cpu().numpy()] > 0)
    if limit is not None and limit < len(held):
        drawn = Seeds(federation.settings.seed)("personal test", device)
        held = np.sort(drawn.choice(held, limit, replace=False))
    return test if len(held) == len(test) else test.take(held)


def by_level(federation: Federation, by_class: dict[str, float] | None) -> dict[str, float] | None:
    """The score with classes weighted as the devices of each level hold them."""
    if by_class is None or not federation.held_by_level:
        return None
    labels = [int(label) for label in by_class]
    scores = np.array(list(by_class.values()))
    # Classes that the test set does not have say nothing of a level.
    held = {level: counts[labels] for level, counts in federation.held_by_level.items()}
    return {level: float(counts @ scores / counts.sum()) for level, counts in held.items() if counts.any()}


def classes_by_level(data: FederatedData, fleet: Fleet) -> dict[str, np.ndarray]:
    """How many samples of each class the devices of a level hold, from the first few of them."""
    mixes = {}
    for level, members in enumerate(fleet.members, start=1):
        counts = [data.label_counts(int(device)) for device in members[:LEVEL_DEVICES]]
        known = [count for count in counts if count is not None]
        if known:
            mixes[str(level)] = np.sum(known, axis=0)
    return mixes


def find_statistics(federation: Federation, predictor: Predictor) -> Predictor:
    """The predictor with BatchNorm statistics of devices' data."""
    count = min(len(federation.fleet), STATISTICS_DEVICES)
    shards = (federation.data.shard(device) for device in range(count))
    return with_statistics(federation.executor, predictor, federation.problem.model.structure, shards)


def evaluate_global(
    executor: Executor, predictor: Predictor, test: Examples, classes: int | None
) -> Evaluation:
    """The global model on the test set."""

    def scores(site: Site, span: slice) -> tuple[np.ndarray, float]:
        batch = test.take(span)
        with torch.inference_mode():
            outputs = evaluate_model(site.models[predictor.model], predictor.tensors, batch.inputs)
            loss = float(site.objective.loss(outputs, batch.targets)) * len(batch)
            return site.objective.score(outputs, batch.targets).cpu().numpy(), loss

    results = list(executor.map(scores, chunks(test)))
    each = np.concatenate([score for score, _ in results]).astype(np.float64)
    return Evaluation(
        float(each.mean()), sum(loss for _, loss in results) / len(test), by_class(each, test, classes)
    )


def score_by_width(federation: Federation, state: Any) -> dict[str, float] | None:
    """The score of each narrow net that the method is for; None where it is not for narrow nets."""
    scores: dict[str, float] = {}
    for width, predictor in federation.method.predictors_by_width(state).items():
        shown = predictor if predictor.statistics == "stored" else find_statistics(federation, predictor)
        found = evaluate_global(federation.executor, shown, federation.data.test, None)
        if found.score is not None and np.isfinite(found.score):
            scores[width] = found.score
    return scores or None


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
    return Evaluation(float(np.mean(means)) if means else None, None, None)
