"""The score of what a method predicts with on the test set: in all, by class and by level."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedpmt.models.trees import tensors_in
from fedpmt.records import ClientScores, step_word
from fedpmt.seeds import Seeds
from fedpmt.training.batches import CHUNK, chunks
from fedpmt.training.loop import evaluate_model
from fedpmt.training.objective import Mean, judge, pool
from fedpmt.types import DivergedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedpmt.data.base import FederatedData, OwnTest
    from fedpmt.devices.fleet import Fleet
    from fedpmt.methods.base import Predictor
    from fedpmt.models.structure import Structure
    from fedpmt.records import Evaluated
    from fedpmt.simulation.executors import Executor
    from fedpmt.simulation.loop import Federation, Progress
    from fedpmt.training.local import LocalWork, Site
    from fedpmt.training.objective import Measured, Objective
    from fedpmt.types import Examples


PERSONAL_DEVICES = 100
"""Personal models are evaluated on at most this many of the devices that took part."""

STATISTICS_DEVICES = 100
"""BatchNorm statistics that are found anew are of at most this many devices' data."""

CHUNK_OUTPUTS = 2**25
"""Outputs that are held at a time in an evaluation: a language model has too many for all samples of a chunk."""

LEVEL_DEVICES = 50
"""A level's mix of classes is taken from at most this many of its devices."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the test set."""

    score: float | None  # None where there is no model to evaluate yet
    loss: float | None
    by_class: dict[str, float] | None
    metrics: dict[str, float]  # other than the score
    by_client: dict[int, float] | None = None  # the score on each device's own samples
    kind: Evaluated = "global"  # what the score is of


def evaluate(federation: Federation, progress: Progress) -> dict[str, Any]:
    """Score and loss on the test set, as fields of a round's record."""
    objective, found = federation.problem.objective, evaluation(federation, progress)
    told = {"score": found.score, "loss": found.loss}
    finite = {name: value for name, value in told.items() if value is not None and np.isfinite(value)}
    return {
        "score": finite.get("score"),
        "score_name": objective.score_name,
        "maximize": objective.maximize,
        "loss": finite.get("loss"),
        "scores": {name: value for name, value in found.metrics.items() if np.isfinite(value)},
        "score_by_class": found.by_class,
        "score_by_level": by_level(federation, found),
        "clients": summarise(found.by_client, maximize=objective.maximize) if found.by_client else None,
        "evaluates": found.kind,
    }


def evaluate_clients(federation: Federation, progress: Progress) -> dict[str, Any]:
    """The scores of clients' own test samples, as fields of a run's result; none where they have none."""
    if federation.data.own_test is None:
        return {}
    found, names = evaluation(federation, progress), federation.problem.data.names
    by_client = found.by_client or {}
    return {
        "clients": summarise(by_client, maximize=federation.problem.objective.maximize)
        if by_client
        else None,
        "score_by_client": {
            names[device] if names else str(device): score for device, score in by_client.items()
        },
        "score_by_level": by_level(federation, found),
    }


def evaluation(federation: Federation, progress: Progress) -> Evaluation:
    """What there is to evaluate after a round, on the test set and on clients' own samples."""
    predictor, objective = federation.predictor(progress), federation.problem.objective
    for name, tensor in predictor.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            word = step_word(federation.settings.clock)
            raise DivergedError(
                f"training diverged: '{name}' is not finite after {word} {progress.rounds}; a smaller --lr may help"
            )
    if predictor.kind == "global":
        classes = federation.problem.data.classes
        data = federation.data
        found = evaluate_global(federation.executor, objective, predictor, data.test, classes, data.own_test)
    else:
        accepted = progress.accepted or {}
        members = sorted(accepted)[:PERSONAL_DEVICES]
        if federation.data.own_test is not None:
            # Those without samples to test on have no score.
            tested = set(federation.data.own_test.owners.tolist())
            members = [device for device in sorted(accepted) if device in tested][:PERSONAL_DEVICES]
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
        if federation.data.own_test is not None and found.by_client is not None:
            found = replace(found, by_client=dict(zip(members, found.by_client.values(), strict=True)))
        else:
            found = replace(found, by_client=None)
    return replace(found, kind=predictor.kind)


WORST = 0.1
"""The share of clients whose mean score is recorded as that of the worst."""


def summarise(by_client: dict[int, float], *, maximize: bool) -> ClientScores:
    """The mean over clients, how far they are spread, and the mean of the worst tenth of them."""
    scores = np.sort(np.array(list(by_client.values())))
    ranked = scores if maximize else scores[::-1]
    worst = ranked[: max(1, round(WORST * len(scores)))]
    return ClientScores(
        count=len(scores),
        mean=float(scores.mean()),
        spread=float(scores.std()),
        worst_tenth=float(worst.mean()),
    )


def own_test(federation: Federation, device: int, of_its_classes: bool) -> Examples:
    """What a device's own model is tested on, the same in every round: its own samples where it keeps some."""
    own = federation.data.own_test
    if own is not None:
        return own.examples.view(np.flatnonzero(own.owners == device))
    test, limit = federation.data.test, federation.settings.personal_test
    counts = federation.problem.data.label_counts(device) if of_its_classes else None
    if counts is None:
        held = np.arange(len(test))
    else:
        labels = test.targets.cpu().numpy()
        held = np.flatnonzero((labels >= 0) & (counts[labels.clip(0)] > 0))
    if limit is not None and limit < len(held):
        drawn = Seeds(federation.settings.seed)("personal test", device)
        held = np.sort(drawn.choice(held, limit, replace=False))
    return test if len(held) == len(test) else test.take(held)


def by_level(federation: Federation, found: Evaluation) -> dict[str, float] | None:
    """The mean score of each level's clients; else the score with classes weighted as its devices hold them."""
    if found.by_client is not None:
        scores = {level: list[float]() for level in range(1, len(federation.fleet.level_speeds) + 1)}
        for device, score in found.by_client.items():
            scores[int(federation.fleet.levels[device])].append(score)
        return {str(level): float(np.mean(some)) for level, some in scores.items() if some}
    by_class = found.by_class
    if by_class is None or not federation.held_by_level:
        return None
    labels = [int(label) for label in by_class]
    each = np.array(list(by_class.values()))
    # Classes that the test set does not have say nothing of a level.
    held = {level: counts[labels] for level, counts in federation.held_by_level.items()}
    return {level: float(counts @ each / counts.sum()) for level, counts in held.items() if counts.any()}


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
    executor: Executor,
    objective: Objective,
    predictor: Predictor,
    test: Examples,
    classes: int | None,
    own: OwnTest | None = None,
) -> Evaluation:
    """The global model on the test set, and on the samples that devices keep for their own."""

    def measure(site: Site, span: slice) -> Measured:
        batch = test.take(span)
        with torch.inference_mode():
            outputs = evaluate_model(site.models[predictor.model], predictor.tensors, batch.inputs)
            return site.objective.measure(outputs, batch)

    simple = getattr(test.take(slice(0, 1)).targets, "ndim", 0) == 1
    spans = chunks(test, CHUNK if simple else chunk_size(executor, predictor, test))
    each: list[Any] | None = None if classes is None and own is None else []
    found = pool(objective, executor.map(measure, spans), each)
    by_client = None
    if own is not None and own.examples is test:
        by_client = score_clients(objective, each or [], spans, own.owners)
        if by_client is None:
            by_client = judge_clients(executor, predictor, own)
    elif own is not None:
        apart = evaluate_global(executor, objective, predictor, own.examples, None, own)
        by_client = apart.by_client
    return Evaluation(found.score, found.loss, by_class(each, test, classes), found.metrics, by_client)


def score_clients(
    objective: Objective, each: list[Any], spans: list[slice], owners: np.ndarray
) -> dict[int, float] | None:
    """The score of each client's samples, from values of single samples or tokens; None where a metric gives none."""
    meter = objective.score.start()
    if not isinstance(meter, Mean):
        return None
    count = int(owners.max()) + 1
    totals, weights = np.zeros(count), np.zeros(count)
    for measured, span in zip(each, spans, strict=True):
        own = owners[span]
        values, counted = measured if isinstance(measured, tuple) else (measured, torch.ones_like(measured))
        if values.numel() % len(own):
            return None
        values, counted = (one.cpu().double().reshape(len(own), -1) for one in (values, counted))
        summed = (values * counted).where(counted != 0, 0).sum(dim=1).numpy()
        totals += np.bincount(own, summed, minlength=count)
        weights += np.bincount(own, counted.sum(dim=1).numpy(), minlength=count)
    scores = {}
    for device in np.flatnonzero(weights).tolist():
        own_meter = replace(meter, total=float(totals[device]), weight=float(weights[device]))
        scores[device] = own_meter.compute()
    return {device: score for device, score in scores.items() if np.isfinite(score)}


def judge_clients(executor: Executor, predictor: Predictor, own: OwnTest) -> dict[int, float]:
    """The score of each client's samples, one client after another."""

    def score(site: Site, device: int) -> float:
        examples = own.examples.view(np.flatnonzero(own.owners == device))
        forward = partial(evaluate_model, site.models[predictor.model], predictor.tensors)
        with torch.inference_mode():
            return judge(site.objective, forward, examples).score

    devices = np.unique(own.owners).tolist()
    scores = zip(devices, executor.map(score, devices), strict=True)
    return {device: score for device, score in scores if np.isfinite(score)}


def chunk_size(executor: Executor, predictor: Predictor, test: Examples) -> int:
    """How many samples to take at a time: fewer where one sample has many outputs, as tokens and pixels have."""

    def outputs_of_one(site: Site, span: slice) -> int:
        with torch.inference_mode():
            model = site.models[predictor.model]
            outputs = evaluate_model(model, predictor.tensors, test.take(span).inputs)
            return sum(tensor.numel() for tensor in tensors_in(outputs))

    [count] = executor.map(outputs_of_one, [slice(0, 1)])
    return max(1, min(CHUNK, CHUNK_OUTPUTS // max(1, count)))


def by_class(each: list[Any] | None, test: Examples, classes: int | None) -> dict[str, float] | None:
    """Mean score of each class, from what was measured of all chunks; None without classes or values per sample."""
    if not each or classes is None:
        return None
    values = [chunk[0] if isinstance(chunk, tuple) else chunk for chunk in each]
    if not all(isinstance(one, torch.Tensor) and one.ndim == 1 for one in values):
        return None
    scores, labels = torch.cat(values).cpu().double().numpy(), test.targets.cpu().numpy()
    if len(scores) != len(labels):
        return None
    return {
        str(label): float(scores[labels == label].mean())
        for label in range(classes)
        if (labels == label).any()
    }


def score_by_width(federation: Federation, state: Any) -> dict[str, float] | None:
    """The score of each narrow net that the method is for; None where it is not for narrow nets."""
    scores: dict[str, float] = {}
    for width, predictor in federation.method.predictors_by_width(state).items():
        shown = predictor if predictor.statistics == "stored" else find_statistics(federation, predictor)
        found = evaluate_global(
            federation.executor, federation.problem.objective, shown, federation.data.test, None
        )
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


def evaluate_personal(
    executor: Executor, work: LocalWork[Any], predictor: Predictor, owners: Iterable[tuple[Any, Examples]]
) -> Evaluation:
    """Each device's own model on the test samples of the classes it holds; means over devices."""

    def score(site: Site, owner: tuple[Any, Examples]) -> tuple[float, dict[str, float]]:
        own, test = owner
        with torch.inference_mode():
            found = judge(site.objective, partial(work.predict, site, predictor.tensors, own), test)
        return found.score, found.metrics

    each = list(executor.map(score, owners))
    if not each:
        return Evaluation(None, None, None, {})
    scores, others = zip(*each, strict=True)
    means = {name: float(np.mean([one[name] for one in others])) for name in others[0]}
    return Evaluation(float(np.mean(scores)), None, None, means, dict(enumerate(scores)))
