"""COMET: Cho, Wang, Chirvolu and Joshi, "Communication-Efficient and Model-Heterogeneous Personalized Federated
Learning via Clustered Knowledge Transfer", 2023.

Every device keeps a net of its own, as large as it can afford, and tells the server only what that net says to public
samples. The server clusters these answers; a device learns from its samples and from the centroid nearest to itself:

    min_w F_k(w) + λ mean_{u in U_t} ||f_k(u; w) - s_c(k)(u)||²,   c(k) = argmin_c ||f_k(U_t) - s_c||

There is no global model: what is evaluated is the mean of the devices' own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.methods.base import (
    Fold,
    Gather,
    Method,
    Predictor,
    Round,
    Server,
    Setup,
    Step,
    Traits,
    acts,
    require,
)
from fedpmt.methods.slicing import fitted, rate_for
from fedpmt.models.structure import FLOAT_BYTES
from fedpmt.parts.part import GLOBAL, Extra, Part, size
from fedpmt.parts.width import narrow_start
from fedpmt.training.distillation import answers
from fedpmt.training.local import LocalWork, Outcome
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL, DivergedError, SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.training.local import Job, Rng, Run, Site
    from fedpmt.types import Arrays, Examples, Tensors

CENTROIDS, ANSWERS = "centroids", "answers"
ASKED, TOLD, COUNT = "asked", "told", "count"
"""Scalars of a task: the seeds by which public samples are drawn, this round's and that of the centroids."""

SEED_BYTES = 8
ITERATIONS = 20
"""Of one run of k-means."""


@dataclass(frozen=True)
class Personal:
    """What a device keeps: its net. Empty before its first round."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CoDistillation(LocalWork[Personal]):
    """F_k(w) + λ mean_u ||f_k(u; w) - s_c(u)||² on soft predictions f, with c the centroid nearest to its own."""

    pull: float  # λ

    def first(self, device: int, rng: Rng) -> Personal:
        return Personal()

    def start(self, job: Job[Personal]) -> Run[Personal]:
        from torch.nn import functional

        from fedpmt.training.loop import begin

        part, model, task = job.part.resident(), job.model, job.task
        tensors = (job.own or Personal()).tensors or narrow_start(model.structure, model.initial(), part)
        run = begin(job, part=part, tensors=tensors)
        centroids = task.tensors.get(CENTROIDS, {}).get(CENTROIDS)
        if centroids is not None and self.pull:
            public = drawn(_public(job.site), int(task.scalars[COUNT]), int(task.scalars[TOLD]))
            # With the net as it is now, on the very samples that the centroids are of.
            mine = functional.softmax(answers(model, tensors, public), dim=1)
            run.memo["public"], run.memo["centroid"] = public, centroids[nearest(mine, centroids)]
            run.memo["order"] = job.rng("public").permutation(len(public))
            model.set_training([True] * len(model.structure.layers))
        return run

    def loss(self, run: Run[Personal], batch: Examples) -> Tensor:
        import torch
        from torch.nn import functional

        from fedpmt.training.objective import logits_of

        loss = run.site.objective.loss(run.forward(run.tensors, batch.inputs), batch.targets)
        if "centroid" not in run.memo:
            return loss
        order = run.memo["order"]
        size = min(run.site.settings.batch, len(order))
        # Round and round through U_t, a batch at every step.
        chosen = order[(run.steps * size + np.arange(size)) % len(order)]
        outputs = run.forward(run.tensors, run.memo["public"].take(chosen).inputs)
        apart: Tensor = (
            functional.softmax(logits_of(outputs), dim=1) - run.memo["centroid"][torch.from_numpy(chosen)]
        )
        return loss + self.pull * apart.square().sum(dim=1).mean()

    def reply(self, run: Run[Personal]) -> tuple[Outcome, Personal]:
        from torch.nn import functional

        tensors = {name: tensor.detach() for name, tensor in run.tensors.items()}
        public = drawn(_public(run.site), int(run.task.scalars[COUNT]), int(run.task.scalars[ASKED]))
        said = functional.softmax(answers(run.job.model, tensors, public), dim=1)
        return Outcome({ANSWERS: {ANSWERS: said}}), Personal(tensors)

    def predict(self, site: Site, shared: Tensors, own: Personal | None, inputs: Arrays) -> Any:
        from fedpmt.training.loop import evaluate_model

        if own is None:
            raise ValueError("only a device that took part has a net")
        return evaluate_model(site.models[GLOBAL], own.tensors, inputs)


def drawn(public: Examples, count: int, seed: int) -> Examples:
    """U_t: `count` public samples, the same for all who know the seed; all of them, where there are no more."""
    if count >= len(public):
        return public
    return public.take(np.sort(np.random.default_rng(seed).permutation(len(public))[:count]))


def nearest(own: Tensor, centroids: Tensor) -> int:
    """c(k) = argmin_c ||f_k(U) - s_c||²."""
    return int((centroids - own).square().flatten(1).sum(dim=1).argmin())


def _public(site: Site) -> Examples:
    if site.public is None:
        raise SettingError("comet needs public data (public = 'none')")
    return site.public


@dataclass(frozen=True)
class Clusters:
    """The server's state: no model, only what clusters of devices say."""

    structure: Structure
    public: int  # |U|
    classes: int
    batch: int  # n^x
    tensors: Mapping[str, Tensor]  # the centroids s_c; empty before the first round
    seed: int = 0  # by which the samples they are of were drawn


@dataclass(frozen=True)
class Comet(Method[Clusters, Personal]):
    """Clustered co-distillation of personal nets."""

    clusters: int = 3  # C
    pull: float = 1.0  # λ
    asked: int = 100  # |U_t|, or all public samples where there are fewer
    restarts: int = 10  # of k-means

    def __post_init__(self) -> None:
        require(
            self,
            clusters=(self.clusters >= 1, ">= 1"),
            pull=(self.pull >= 0, ">= 0"),
            asked=(self.asked >= 1, ">= 1"),
            restarts=(self.restarts >= 1, ">= 1"),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            needs_public=True,
            needs_classes=True,
            sends_more=True,
            combines="clusters of answers, for distillation",
            server_work="clusters",
            keeps="a net",
            keeps_net=True,
            fitted_net=True,
            discloses="answers to public samples",
            budget=acts("device", "bytes", "upload"),
        )

    @property
    def local(self) -> LocalWork[Personal]:
        return CoDistillation(self.pull)

    def init(self, setup: Setup) -> Clusters:
        structure = setup.prototypes[GLOBAL].structure
        public = 0 if setup.public is None else len(setup.public)
        classes = structure.shapes[structure.layers[-1].parameters[0]][0]
        return Clusters(structure, public, classes, setup.batch, {})

    def assign(self, state: Clusters, client: Client, round: Round) -> Task:
        # The net must do for all rounds, those with centroids to learn from among them.
        rate = rate_for(
            state.structure,
            lambda net: client.fits(self.part(state, net, client.samples, round, self.clusters)),
            "comet",
        )
        learns = self.pull > 0 and bool(state.tensors)
        net = fitted(state.structure, rate, "comet")
        part = self.part(state, net, client.samples, round, len(state.tensors[CENTROIDS]) if learns else 0)
        scalars = {ASKED: self.seed(round), TOLD: state.seed, COUNT: self.asked}
        shared = {CENTROIDS: state.tensors} if learns else {}
        return Task((part,), {MODEL: {}, **shared}, scalars)

    def part(self, state: Clusters, net: Part, samples: int, round: Round, centroids: int) -> Part:
        """A net that stays, with all that its device does beside training it on its own samples."""
        cost, asked = round.price(net), min(self.asked, state.public)
        learns = self.pull > 0 and centroids > 0
        # A step has as many public samples as own ones, or all that were asked about.
        public = learns * min(state.batch, asked) / state.batch
        shape = (asked, state.classes)
        told = FLOAT_BYTES * centroids * math.prod(shape) * learns
        extra = Extra(
            # Every step has public samples too, but one update.
            step=(cost.operations - cost.update) * public,
            # To tell the server, and before that to find the nearest centroid.
            once=cost.inference * asked / samples * (1 + learns),
            # The graph of a step has the public batch in it too; what all clusters say stays until the end.
            memory_bytes=int(cost.memory.activations * public) + told,
            task_bytes=told,
            answers={ANSWERS: {ANSWERS: shape}},
            kept_bytes=sum(
                state.structure.bytes_each(name) * size(kept, state.structure.shapes[name])
                for name, kept in net.trained.items()
            ),
        )
        return Part(GLOBAL, {}, {}, net.label, 2 * SEED_BYTES, kept=net.trained, extra=extra)

    def seed(self, round: Round) -> int:
        """By which everybody draws U_t."""
        return int(round.rng("public").integers(2**31))

    def fold(self, state: Clusters, round: Round) -> Fold[Clusters]:
        return Gather(lambda replies, server: self.cluster(state, replies, round, server))

    def cluster(self, state: Clusters, arrived: list[Reply], round: Round, server: Server) -> Step[Clusters]:
        """Cluster what devices answered; the centroids are what they learn from next."""
        import torch

        if not arrived:
            return Step(state)
        said = torch.stack([reply.tensors[ANSWERS][ANSWERS] for reply in arrived])
        # Distances to every centroid, in every iteration of every start.
        each = float(ITERATIONS * min(self.clusters, len(arrived)) * said.numel())
        starts = server.affordable(lambda starts: starts * each, self.restarts)
        metrics = {"server_steps": float(starts), "server_steps_default": float(self.restarts)}
        if not starts:  # the cap pays for no clusters: those that there are stay
            return Step(state, metrics)
        points = said.flatten(1).cpu().double().numpy()
        members = clustered(points, self.clusters, starts, round.rng("clusters"))
        # s_c = the mean of its members; those of the first device come first.
        names = list(dict.fromkeys(members.tolist()))
        centroids = torch.stack([said[torch.from_numpy(members == name)].mean(dim=0) for name in names])
        after = replace(state, tensors={CENTROIDS: centroids}, seed=self.seed(round))
        return Step(after, {**metrics, "clusters": float(len(names))}, starts * each)

    def predictor(self, state: Clusters) -> Predictor:
        return Predictor("personal", GLOBAL, state.tensors)


def clustered(points: np.ndarray, count: int, restarts: int, rng: np.random.Generator) -> np.ndarray:
    """The cluster of each point: k-means, the best of several starts; fewer clusters where points are few or alike."""
    from scipy.cluster.vq import ClusterError, kmeans2

    if not np.isfinite(points).all():
        raise DivergedError("training diverged: a device's answers are not finite; a smaller --lr may help")
    count = min(count, len(np.unique(points, axis=0)))
    best, least = np.zeros(len(points), dtype=np.int64), np.inf
    for _ in range(restarts):
        try:
            seed = int(rng.integers(2**32))
            means, members = kmeans2(points, count, ITERATIONS, minit="++", missing="raise", seed=seed)
        except ClusterError:
            continue  # a cluster ran empty
        spread = float(((points - means[members]) ** 2).sum())
        if spread < least:
            best, least = members, spread
    return best
