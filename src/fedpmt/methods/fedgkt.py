"""FedGKT: He, Annavaram and Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", 2020.

A device trains a small net of its own, a stem and a head; the server trains the large rest of the net on the features
that the stems make of the devices' samples. Knowledge goes both ways as logits, and no weights travel at all:

    device:  CE(z_c, y) + α KD(z_c <- z_s)        then features, z_c and y of every sample go up
    server:  KD(z_s <- z_c) + α CE(z_s, y)        then z_s of every sample goes down, at the device's next turn

with KD = T² KL(softmax(z_teacher / T) || softmax(z_student / T)). What predicts is a stem and the server's net
together.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedpmt.methods.base import Fold, Gather, Method, Predictor, Round, Server, Setup, Step, Traits, require
from fedpmt.models.structure import FLOAT_BYTES
from fedpmt.parts.depth import full, suffix
from fedpmt.parts.part import GLOBAL, Extra, Part
from fedpmt.training.distillation import answers
from fedpmt.training.local import Job, LocalWork, Outcome
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.optimizers import Adam, Moments
from fedpmt.types import MODEL, Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.training.local import Rng, Run, Site
    from fedpmt.types import Arrays, Tensors

EDGE = "edge"
"""The name of the devices' net: the global net's first layer, then a linear head."""

HEAD = "head"
STEM = 1
"""Layers before the tap: what the edge net shares the shape of, and the server's net does not have."""

FEATURES, LOGITS, LABELS = "features", "logits", "labels"
TRANSFER, TEACHER = "transfer", "teacher"
FLOOR = 1e-7
"""Added to a teacher's probabilities."""


def knowledge(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KD = T² KL(softmax(z_t / T) + 1e-7 || softmax(z_s / T)), the mean over a batch."""
    from torch.nn import functional

    target = functional.softmax(teacher.detach() / temperature, dim=-1) + FLOOR
    log_own = functional.log_softmax(student / temperature, dim=-1)
    return temperature**2 * functional.kl_div(log_own, target, reduction="batchmean")


@dataclass(frozen=True)
class Edge:
    """What a device keeps: its net, Adam's moments, and the samples that it told the server of, in that order."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # empty before its first round
    moments: Moments = field(default_factory=Moments)
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class EdgeTraining(LocalWork[Edge]):
    """CE(z_c, y) + α KD(z_c <- z_s), then features, logits and labels of all samples for the server."""

    optimizer: Adam | None  # None: the run's own
    rate: float  # η of Adam
    alpha: float
    temperature: float  # T

    def first(self, device: int, rng: Rng) -> Edge:
        return Edge()

    def start(self, job: Job[Edge]) -> Run[Edge]:
        import torch

        from fedpmt.training.loop import begin

        own = job.own or Edge()
        run = begin(job, part=job.part.resident(), tensors=own.tensors or job.model.initial())
        if self.optimizer is not None:
            run.optimizer, run.moments, run.rate = self.optimizer, own.moments, lambda step: self.rate
        if TEACHER in job.task.tensors and self.alpha:
            # By the sample's identity: batches come in another order every round.
            order, teacher = np.argsort(own.ids), job.task.tensors[TEACHER][LOGITS]
            run.memo[TEACHER] = lambda ids: teacher[
                torch.from_numpy(order[np.searchsorted(own.ids, ids, sorter=order)])
            ]
        return run

    def loss(self, run: Run[Edge], batch: Examples) -> Tensor:
        from fedpmt.training.objective import logits_of

        outputs = run.forward(run.tensors, batch.inputs)
        loss = run.site.objective.loss(outputs, batch.targets)
        if TEACHER in run.memo:
            teacher = run.memo[TEACHER](batch.ids)
            loss = loss + self.alpha * knowledge(logits_of(outputs), teacher, self.temperature)
        return loss

    def reply(self, run: Run[Edge]) -> tuple[Outcome, Edge]:
        import torch

        tensors = {name: tensor.detach() for name, tensor in run.tensors.items()}
        model, data = run.job.model, run.job.data
        features = features_of(model, tensors, data)
        sent = {
            FEATURES: features.flatten(1).float(),
            LOGITS: answers(model, tensors, Examples(features, data.targets, data.ids), STEM),
            LABELS: data.targets.to(torch.int32),
        }
        adam = self.optimizer is not None and run.stepper is not None
        moments = run.stepper.moments() if adam and run.stepper else Moments()
        return Outcome({TRANSFER: sent}), Edge(tensors, moments, data.ids)

    def predict(self, site: Site, shared: Tensors, own: Edge | None, inputs: Arrays) -> Any:
        if own is None:
            raise ValueError("only a device that took part has a net")
        edge, whole = site.models[EDGE], site.models[GLOBAL]
        for model in (edge, whole):
            model.set_training([False] * len(model.structure.layers))
        return whole.suffix(STEM, shared, edge.prefix(STEM, own.tensors, inputs))


def features_of(model: LayeredModel, tensors: Tensors, data: Examples) -> Tensor:
    """What an edge net's stem makes of all samples, in evaluation mode."""
    import torch

    from fedpmt.training.batches import chunks

    model.set_training([False] * len(model.structure.layers))
    return torch.cat([model.prefix(STEM, tensors, data.take(span).inputs) for span in chunks(data)])


@dataclass(frozen=True)
class ServerHalf(LocalWork[Moments]):
    """KD(z_s <- z_c) + α CE(z_s, y) on features that devices sent; targets are their logits and labels."""

    optimizer: Adam
    alpha: float
    temperature: float  # T
    distil: bool

    def start(self, job: Job[Moments]) -> Run[Moments]:
        """Features enter behind the tap."""
        from fedpmt.training.loop import begin

        run = begin(job, first=STEM)
        run.optimizer, run.moments = self.optimizer, job.own
        return run

    def loss(self, run: Run[Moments], batch: Examples) -> Tensor:
        from fedpmt.training.objective import logits_of

        outputs = run.forward(run.tensors, batch.inputs)
        loss = self.alpha * run.site.objective.loss(outputs, batch.targets[LABELS])
        if self.distil:
            loss = loss + knowledge(logits_of(outputs), batch.targets[LOGITS], self.temperature)
        return loss


@dataclass(frozen=True)
class Group:
    """The server's state."""

    structure: Structure  # of the whole net
    edge: Structure  # of the devices' net
    tensors: Mapping[str, Tensor]  # the server's net: all layers behind the tap
    moments: Moments | None  # of Adam, on them
    logits: Mapping[int, Tensor]  # z_s of the samples of each device that took part, in the order they came


@dataclass(frozen=True)
class FedGKT(Method[Group, Edge]):
    """Features and logits instead of weights. One edge net for all devices: a budget does not act on it."""

    alpha: float = 1.0  # α on the device: of the server's knowledge
    server_alpha: float = 1.0  # α on the server: of the labels
    temperature: float = 3.0  # T
    server_epochs: int = 20  # E_s: of the server over what came in, at most; what its cap allows may be less
    rate: float = 3e-6  # η of Adam, on both sides; with the code's 1e-3 first layers drift apart
    adam_decay: float = 1e-4  # weight decay of Adam
    distil: bool = True  # whether the server learns from the devices' logits too, or from labels alone
    device_optimizer: Literal["adam", "run"] = "adam"  # on devices: Adam as above, or the run's own

    def __post_init__(self) -> None:
        require(
            self,
            alpha=(self.alpha >= 0, ">= 0"),
            server_alpha=(self.server_alpha >= 0, ">= 0"),
            temperature=(self.temperature > 0, "> 0"),
            server_epochs=(self.server_epochs >= 0, ">= 0"),
            rate=(self.rate > 0, "> 0"),
            adam_decay=(self.adam_decay >= 0, ">= 0"),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_classes=True,
            sends_more=True,
            combines="distillation on both sides",
            server_work="trains",
            keeps="a net and its optimizer",
            keeps_net=True,
            discloses="features and labels of all samples",
            optimizers=("sgd",) if self.device_optimizer == "adam" else None,
        )

    @property
    def adam(self) -> Adam:
        """AMSGrad, as in the official code."""
        return Adam(self.adam_decay, amsgrad=True)

    @property
    def local(self) -> LocalWork[Edge]:
        adam = self.adam if self.device_optimizer == "adam" else None
        return EdgeTraining(adam, self.rate, self.alpha, self.temperature)

    def models(
        self, model: LayeredModel, example: Arrays, rng: Callable[[str], np.random.Generator]
    ) -> Mapping[str, LayeredModel]:
        """The edge net: the first layer, with what follows it, and a linear head on its features."""
        from torch import nn

        from fedpmt.models.build import FlatLinear, initialise
        from fedpmt.models.layered import layered
        from fedpmt.models.unwrap import copy_module

        layers = len(model.structure.layers)
        if not model.composable or layers < 2:
            raise SettingError("fedgkt needs a model that is a chain of its layers, two or more")
        trial = model.clone()
        trial.set_training([False] * layers)
        features = trial.prefix(STEM, trial.initial(), example)
        classes = trial.suffix(STEM, trial.initial(), features).shape[-1]
        head = FlatLinear(features.shape[1:], classes)
        initialise(head, rng("edge"))
        head.to(features.dtype)
        trial.release()
        stem = [copy_module(module) for _, module in trial.modules_of(0, STEM)]
        named = OrderedDict[str, nn.Module]((f"stem{place}", module) for place, module in enumerate(stem))
        return {EDGE: layered(nn.Sequential(named | {HEAD: head}))}

    def moments_bytes(self, edge: Structure) -> int:
        """AMSGrad keeps three numbers of each parameter, SGD none."""
        return 3 * edge.nbytes(edge.parameters) if self.device_optimizer == "adam" else 0

    def init(self, setup: Setup) -> Group:
        whole, edge = setup.prototypes[GLOBAL], setup.prototypes[EDGE].structure
        names = [name for layer in whole.structure.layers[STEM:] for name in layer.tensors]
        return Group(whole.structure, edge, {name: whole.tensors[name] for name in names}, None, {})

    def assign(self, state: Group, client: Client, round: Round) -> Task:
        net = full(state.edge, EDGE)
        cost = round.price(net)
        # The head's columns are the features, its rows the classes.
        classes, features = state.edge.shapes[state.edge.layers[-1].parameters[0]]
        extra = Extra(
            once=cost.inference,  # one more pass over all samples, to tell of them
            # Adam's moments; features and logits of all samples until they are sent, and what the server said of them.
            memory_bytes=self.moments_bytes(state.edge)
            + FLOAT_BYTES * client.samples * (features + classes * (1 + (client.id in state.logits))),
            task_bytes=FLOAT_BYTES * client.samples * classes * (client.id in state.logits),
            answers={
                TRANSFER: {
                    FEATURES: (client.samples, features),
                    LOGITS: (client.samples, classes),
                    LABELS: (client.samples,),
                }
            },
            # The edge net, and the moments of its parameters.
            kept_bytes=state.edge.nbytes(state.edge.tensors) + self.moments_bytes(state.edge),
        )
        part = Part(EDGE, {}, {}, "edge net", kept=net.trained, extra=extra)
        known = {TEACHER: {LOGITS: state.logits[client.id]}} if client.id in state.logits else {}
        return Task((part,), {MODEL: {}, **known})

    def fold(self, state: Group, round: Round) -> Fold[Group]:
        return Gather(lambda replies, server: self.teach(state, replies, round, server))

    def teach(self, state: Group, arrived: list[Reply], round: Round, server: Server) -> Step[Group]:
        """Train the server's net on what devices sent, and answer each of their samples."""
        import torch

        if not arrived:
            return Step(state)
        data = gathered(arrived, server.site)
        work = ServerWork.of(round, server, state.structure, len(data))
        wanted = self.server_epochs * work.batches
        if work.total(0) > server.budget:  # not even the pass that would tell devices anything
            return Step(state, {"server_steps": 0.0, "server_steps_default": float(wanted)})
        steps = server.affordable(work.total, wanted)
        metrics = {}
        if steps:
            state, metrics["server_loss"] = self.taught(state, data, steps, round, server)
        metrics |= {"server_steps": float(steps), "server_steps_default": float(wanted)}
        known = answers(server.site.models[GLOBAL], state.tensors, data, STEM)
        parts = torch.split(known, [reply.samples for reply in arrived])
        fresh = {reply.device: own.clone() for reply, own in zip(arrived, parts, strict=True)}
        return Step(replace(state, logits={**state.logits, **fresh}), metrics, work.total(steps))

    def taught(
        self, state: Group, data: Examples, steps: int, round: Round, server: Server
    ) -> tuple[Group, float]:
        """The server's net after so many steps on what devices told, and its mean loss."""
        from fedpmt.training.loop import train_on_server

        part = suffix(state.structure, STEM, "behind the tap")
        part = replace(part, sent=part.trained)
        work = ServerHalf(self.adam, self.server_alpha, self.temperature, self.distil)
        job = Job(
            server.site,
            Task((part,), {MODEL: state.tensors}),
            part,
            state.moments,
            data,
            lambda purpose: round.rng(f"server/{purpose}"),
        )
        run, loss = train_on_server(work, job, steps=steps, rate=self.rate)
        tensors = {name: tensor.detach() for name, tensor in run.tensors.items()}
        moments = run.stepper.moments() if run.stepper else None
        return replace(state, tensors=tensors, moments=moments), loss

    def predictor(self, state: Group) -> Predictor:
        return Predictor("split", GLOBAL, state.tensors)


@dataclass(frozen=True)
class ServerWork:
    """What the server's work of a round costs, in operations."""

    step: float  # a step on one batch; the stem is the devices' to run
    answer: float  # z_s of one batch
    batches: int  # of all samples that came

    @classmethod
    def of(cls, round: Round, server: Server, structure: Structure, samples: int) -> ServerWork:
        """For so many samples."""
        cost = round.price(suffix(structure, STEM, ""))
        batches = -(-samples // server.site.settings.batch)
        return cls(cost.operations - cost.prefix, cost.forward, batches)

    def total(self, steps: int) -> float:
        """So many steps, and all z_s once, when the net is done."""
        return steps * self.step + self.batches * self.answer


def gathered(arrived: list[Reply], site: Site) -> Examples:
    """What devices told, as the server's samples: features behind the tap, with logits and labels as targets."""
    import torch

    told = [reply.tensors[TRANSFER] for reply in arrived]
    features, logits, labels = (torch.cat([one[key] for one in told]) for key in (FEATURES, LOGITS, LABELS))
    features = behind_the_tap(site.models[EDGE], features)
    return Examples(features, {LOGITS: logits, LABELS: labels.long()}, np.arange(len(features)))


def behind_the_tap(edge: LayeredModel, features: Tensor) -> Tensor:
    """Features as the layer after the tap takes them; they travel flat."""
    from fedpmt.models.build import FlatLinear

    head = edge.module.get_submodule(HEAD)
    assert isinstance(head, FlatLinear)
    return features.reshape(len(features), *head.shape)
