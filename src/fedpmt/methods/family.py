"""Rivals of FedPMT that differ from it in which layers a device trains and in how these are averaged.

Each is FedPMT with other values: none has a loop, a fold or a price of its own. FedEL, which has an option more, is in
methods/fedel.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpmt.methods.averaging import Weight
from fedpmt.methods.fedpmt import Average, Block, FedPMT


@dataclass(frozen=True)
class EmbracingFL(FedPMT):
    """As many layers at the output as a device has resources for, which is FedPMT's rule.

    Paper: Lee, Zhang, Prakash, Niu and Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation
    via Partial Model Training", IEEE Transactions on Mobile Computing 2024.
    """


@dataclass(frozen=True)
class FedOLF(FedPMT):
    """Layers are frozen in order from the input on, which is FedPMT's rule.

    Paper: Niu, Dong, Qin, Gu and Zhang, "Energy and Memory-Efficient Federated Learning With Ordered Layer Freezing",
    2025.
    """


@dataclass(frozen=True)
class SALF(FedPMT):
    """A straggler sends the layers that its back-propagation has reached, last to first.

    Paper: Lang, Cohen and Shlezinger, "Stragglers-Aware Low-Latency Synchronous Federated Learning via Layer-Wise
    Model Updates", IEEE Transactions on Communications 2024.
    """

    weight: Weight = "uniform"
    block: Block = "random-suffix"
    average: Average = "blend"


@dataclass(frozen=True)
class FedPart(FedPMT):
    """All devices train the same layer, from the first to the last.

    Paper: Wang, Liu, Niu, Guo and Tang, "Why Go Full? Elevating Federated Learning Through Partial Network Updates",
    NeurIPS 2024.
    """

    block: Block = "cycle"


@dataclass(frozen=True)
class CoCoFL(FedPMT):
    """A random one of the largest blocks that fit; the others are frozen.

    Paper: Pfeiffer, Rapp, Khalili and Henkel, "CoCoFL: Communication- and Computation-Aware Federated Learning via
    Partial NN Freezing and Quantization", TMLR 2023.
    """

    weight: Weight = "uniform"
    block: Block = "random-block"
    average: Average = "blend"
