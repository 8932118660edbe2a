"""COMET: Cho, Wang, Chirvolu and Joshi, "Communication-Efficient and Model-Heterogeneous Personalized Federated
Learning via Clustered Knowledge Transfer", 2023.

Every device keeps a net of its own, as large as it can afford, and tells the server only what that net says to public
samples. The server clusters these answers; a device learns from its samples and from the centroid nearest to itself:

    min_w F_k(w) + λ mean_{u in U_t} ||f_k(u; w) - s_c(k)(u)||²,   c(k) = argmin_c ||f_k(U_t) - s_c||

There is no global model: what is evaluated is the mean of the devices' own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fedpmt.methods.base import FROM_0, FROM_1, Method, Predictor, Round, Setup, Step
from fedpmt.methods.fitted import fitted, rate_for
from fedpmt.parts.part import GLOBAL, Beside, Part
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL, DivergedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from torch import Tensor

    from fedpmt.methods.base import Action
    from fedpmt.models.structure import Structure
    from fedpmt.resources import Resource
    from fedpmt.training.codistillation import Personal
    from fedpmt.training.local import LocalWork

SEED_BYTES = 8
ITERATIONS = 20
"""Of one run of k-means."""


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
class Comet(Method[Clusters, "Personal"]):
    """Clustered co-distillation of personal nets."""

    needs_speeds: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    server_work = "clusters"
    sends_more: ClassVar[bool] = True

    clusters: int = 3  # C
    pull: float = 1.0  # λ
    asked: int = 100  # |U_t|, or all public samples where there are fewer
    restarts: int = 10  # of k-means

    def __post_init__(self) -> None:
        self.require(
            clusters=(self.clusters >= 1, FROM_1),
            pull=(self.pull >= 0, FROM_0),
            asked=(self.asked >= 1, FROM_1),
            restarts=(self.restarts >= 1, FROM_1),
        )

    @property
    def keeps(self) -> str:
        return "a net"

    @property
    def keeps_net(self) -> bool:
        return True

    @property
    def fitted_net(self) -> bool:
        return True

    @property
    def discloses(self) -> str:
        return "answers to public samples"

    def kept_bytes(self, structures: Mapping[str, Structure]) -> int:
        return FLOAT_BYTES * structures[GLOBAL].size(structures[GLOBAL].tensors)

    def init(self, setup: Setup) -> Clusters:
        structure = setup.prototypes[GLOBAL].structure
        public = 0 if setup.public is None else len(setup.public)
        classes = structure.shapes[structure.layers[-1].parameters[0]][0]
        return Clusters(structure, public, classes, setup.batch, {})

    def assign(self, state: Clusters, client: Client, round: Round) -> Task:
        from fedpmt.training.codistillation import ASKED, CENTROIDS, COUNT, TOLD

        fits = self.fits(client, state.structure, round.price)
        # The net must do for all rounds, those with centroids to learn from among them.
        rate = rate_for(
            state.structure,
            lambda net: fits(self.part(state, net, client.samples, round, self.clusters)),
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
        from fedpmt.training.codistillation import ANSWERS

        cost, asked = round.price(net), min(self.asked, state.public)
        learns = self.pull > 0 and centroids > 0
        # A step has as many public samples as own ones, or all that were asked about.
        public = learns * min(state.batch, asked) / state.batch
        shape = (asked, state.classes)
        told = FLOAT_BYTES * centroids * math.prod(shape) * learns
        beside = Beside(
            # Every step has public samples too, but one update.
            step=(cost.operations - cost.update) * public,
            # To tell the server, and before that to find the nearest centroid.
            once=cost.inference * asked / samples * (1 + learns),
            # The graph of a step has the public batch in it too; what all clusters say stays until the end.
            memory_bytes=int(cost.memory.activations * public) + told,
            task_bytes=told,
            answers={ANSWERS: {ANSWERS: shape}},
        )
        return Part(GLOBAL, {}, {}, net.label, 2 * SEED_BYTES, kept=net.trained, beside=beside)

    @property
    def combines(self) -> str:
        return "clusters of answers, for distillation"

    def action(self, resource: Resource) -> Action:
        return "none" if resource in ("bytes", "upload") else "device"

    def seed(self, round: Round) -> int:
        """By which everybody draws U_t."""
        return int(round.rng("public").integers(2**31))

    def local(self) -> LocalWork[Personal]:
        from fedpmt.training.codistillation import PersonalWork

        return PersonalWork(self.pull)

    def aggregate(self, state: Clusters, replies: Iterable[Reply], round: Round) -> Step[Clusters]:
        import torch

        from fedpmt.training.codistillation import ANSWERS, CENTROIDS

        arrived = sorted(replies, key=lambda reply: reply.device)
        if not arrived:
            return Step(state)
        said = torch.stack([reply.tensors[ANSWERS][ANSWERS] for reply in arrived])
        # Distances to every centroid, in every iteration of every start.
        each = float(ITERATIONS * min(self.clusters, len(arrived)) * said.numel())
        starts = round.server.affordable(lambda starts: starts * each, self.restarts)
        metrics = {"server_steps": float(starts), "server_steps_default": float(self.restarts)}
        if not starts:  # the cap pays for no clusters: those that there are stay
            return Step(state, metrics)
        points = said.flatten(1).double().cpu().numpy()
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
    import numpy as np
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
