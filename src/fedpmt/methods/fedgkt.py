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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from fedpmt.methods.base import ABOVE_0, FROM_0, Method, Predictor, Round, Setup, Step
from fedpmt.parts.depth import full, suffix
from fedpmt.parts.part import GLOBAL, Beside, Part
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL, Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np
    from torch import Tensor

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.training.adam import Adam, Moments
    from fedpmt.training.local import LocalWork, Site
    from fedpmt.training.transfer import Edge
    from fedpmt.types import Arrays


@dataclass(frozen=True)
class Group:
    """The server's state."""

    structure: Structure  # of the whole net
    edge: Structure  # of the devices' net
    tensors: Mapping[str, Tensor]  # the server's net: all layers behind the tap
    moments: Moments | None  # of Adam, on them
    logits: Mapping[int, Tensor]  # z_s of the samples of each device that took part, in the order they came


@dataclass(frozen=True)
class FedGKT(Method[Group, "Edge"]):
    """Features and logits instead of weights. One edge net for all devices: a budget does not act on it."""

    needs_classes: ClassVar[bool] = True
    server_work = "trains"
    sends_more: ClassVar[bool] = True

    alpha: float = 1.0  # α on the device: of the server's knowledge
    server_alpha: float = 1.0  # α on the server: of the labels
    temperature: float = 3.0  # T
    epochs: int = 20  # E_s: of the server over what came in, at most; what its cap allows may be less
    rate: float = 1e-5  # η of Adam, on both sides; with the code's 1e-3 first layers drift apart
    weight_decay: float = 1e-4  # of Adam
    distil: bool = True  # whether the server learns from the devices' logits too, or from labels alone
    optimizer: Literal["adam", "sgd"] = "adam"  # of devices; sgd takes the run's settings

    def __post_init__(self) -> None:
        self.require(
            alpha=(self.alpha >= 0, FROM_0),
            server_alpha=(self.server_alpha >= 0, FROM_0),
            temperature=(self.temperature > 0, ABOVE_0),
            epochs=(self.epochs >= 0, FROM_0),
            rate=(self.rate > 0, ABOVE_0),
            weight_decay=(self.weight_decay >= 0, FROM_0),
        )

    def adam(self) -> Adam:
        """AMSGrad, as in the official code."""
        from fedpmt.training.adam import Adam

        return Adam(self.rate, self.weight_decay, amsgrad=True)

    def prototypes(
        self, model: LayeredModel, example: Arrays, rng: Callable[[str], np.random.Generator]
    ) -> Mapping[str, LayeredModel]:
        """The edge net: the first layer, with what follows it, and a linear head on its features."""
        import copy

        from torch import nn

        from fedpmt.models.build import FlatLinear, initialise
        from fedpmt.models.layered import layered
        from fedpmt.training.transfer import EDGE, HEAD, STEM

        layers = len(model.structure.layers)
        if not model.composable or layers < 2:
            raise SettingError(
                "method = 'fedgkt' is refused: it needs a model that is a chain of its layers, two or more"
            )
        trial = model.clone()
        trial.set_training([False] * layers)
        features = trial.prefix(STEM, trial.initial(), example)
        classes = trial.suffix(STEM, trial.initial(), features).shape[-1]
        head = FlatLinear(features.shape[1:], classes)
        initialise(head, rng("edge"))
        stem = [copy.deepcopy(module) for _, module in trial.modules_of(0, STEM)]
        named = OrderedDict[str, nn.Module]((f"stem{place}", module) for place, module in enumerate(stem))
        return {EDGE: layered(nn.Sequential(named | {HEAD: head}))}

    @property
    def keeps(self) -> str:
        return "a net and its optimizer"

    @property
    def keeps_net(self) -> bool:
        return True

    @property
    def discloses(self) -> str:
        return "features and labels of all samples"

    def kept_bytes(self, structures: Mapping[str, Structure]) -> int:
        """The edge net, and the moments of its parameters."""
        from fedpmt.training.transfer import EDGE

        edge = structures[EDGE]
        return FLOAT_BYTES * edge.size(edge.tensors) + self.moments_bytes(edge)

    def moments_bytes(self, edge: Structure) -> int:
        """AMSGrad keeps three numbers of each parameter, SGD none."""
        return 3 * FLOAT_BYTES * edge.size(edge.parameters) if self.optimizer == "adam" else 0

    def init(self, setup: Setup) -> Group:
        from fedpmt.training.transfer import EDGE, STEM

        whole, edge = setup.prototypes[GLOBAL], setup.prototypes[EDGE].structure
        names = [name for layer in whole.structure.layers[STEM:] for name in layer.tensors]
        return Group(whole.structure, edge, {name: whole.tensors[name] for name in names}, None, {})

    def assign(self, state: Group, client: Client, round: Round) -> Task:
        from fedpmt.training.transfer import EDGE, FEATURES, LABELS, LOGITS, TEACHER, TRANSFER

        net = full(state.edge, EDGE)
        cost = round.price(net)
        # The head's columns are the features, its rows the classes.
        classes, features = state.edge.shapes[state.edge.layers[-1].parameters[0]]
        beside = Beside(
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
        )
        part = Part(EDGE, {}, {}, "edge net", kept=net.trained, beside=beside)
        known = {TEACHER: {LOGITS: state.logits[client.id]}} if client.id in state.logits else {}
        return Task((part,), {MODEL: {}, **known})

    @property
    def combines(self) -> str:
        return "distillation on both sides"

    def local(self) -> LocalWork[Edge]:
        from fedpmt.training.transfer import EdgeWork

        return EdgeWork(self.adam() if self.optimizer == "adam" else None, self.alpha, self.temperature)

    def aggregate(self, state: Group, replies: Iterable[Reply], round: Round) -> Step[Group]:
        import torch

        from fedpmt.training.distillation import answers
        from fedpmt.training.transfer import STEM

        arrived = sorted(replies, key=lambda reply: reply.device)
        if not arrived:
            return Step(state)
        server = round.server
        data = gathered(arrived, server.site)
        bill = Bill.of(round, state.structure, len(data))
        wanted = self.epochs * bill.batches
        if bill.total(0) > server.budget:  # not even the pass that would tell devices anything
            return Step(state, {"server_steps": 0.0, "server_steps_default": float(wanted)})
        steps = server.affordable(bill.total, wanted)
        metrics = {}
        if steps:
            state, metrics["server_loss"] = self.taught(state, data, steps, round)
        metrics |= {"server_steps": float(steps), "server_steps_default": float(wanted)}
        known = answers(server.site.models[GLOBAL], state.tensors, data, STEM)
        parts = torch.split(known, [reply.samples for reply in arrived])
        fresh = {reply.device: own.clone() for reply, own in zip(arrived, parts, strict=True)}
        return Step(replace(state, logits={**state.logits, **fresh}), metrics, bill.total(steps))

    def taught(self, state: Group, data: Examples, steps: int, round: Round) -> tuple[Group, float]:
        """The server's net after so many steps on what devices told, and its mean loss."""
        from fedpmt.training.distillation import on_server
        from fedpmt.training.transfer import STEM, ServerHalfWork

        part = suffix(state.structure, STEM, "behind the tap")
        part = replace(part, sent=part.trained)
        tensors, moments, loss = on_server(
            ServerHalfWork(self.adam(), self.server_alpha, self.temperature, self.distil),
            round.server.site,
            Task((part,), {MODEL: state.tensors}),
            part,
            state.moments,
            data,
            lambda purpose: round.rng(f"server/{purpose}"),
            steps=steps,
            rate=self.rate,
            round_index=round.index,
        )
        return replace(state, tensors=tensors, moments=moments), loss

    def predictor(self, state: Group) -> Predictor:
        return Predictor("split", GLOBAL, state.tensors)


@dataclass(frozen=True)
class Bill:
    """What the server's work of a round costs, in operations."""

    step: float  # a step on one batch; the stem is the devices' to run
    answer: float  # z_s of one batch
    batches: int  # of all samples that came

    @classmethod
    def of(cls, round: Round, structure: Structure, samples: int) -> Bill:
        """For so many samples."""
        from fedpmt.training.transfer import STEM

        cost = round.price(suffix(structure, STEM, ""))
        batches = -(-samples // round.server.site.settings.batch)
        return cls(cost.operations - cost.prefix, cost.forward, batches)

    def total(self, steps: int) -> float:
        """So many steps, and all z_s once, when the net is done."""
        return steps * self.step + self.batches * self.answer


def gathered(arrived: list[Reply], site: Site) -> Examples:
    """What devices told, as the server's samples: features behind the tap, with logits and labels as targets."""
    import numpy as np
    import torch

    from fedpmt.training.transfer import EDGE, FEATURES, LABELS, LOGITS, TRANSFER, behind_the_tap

    told = [reply.tensors[TRANSFER] for reply in arrived]
    features, logits, labels = (torch.cat([one[key] for one in told]) for key in (FEATURES, LOGITS, LABELS))
    features = behind_the_tap(site.models[EDGE], features)
    return Examples(features, {LOGITS: logits, LABELS: labels.long()}, np.arange(len(features)))
