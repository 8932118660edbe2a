"""The price of a part of the model, as plain numbers. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RoundMemory:
    """Bytes that a device holds in one local round, trained by PyTorch.

    Counted are the tensors of the round. Not counted are the device's own samples, which it has anyway, the code,
    and the module, which only lends its forward pass. Compiled code (`executor = auto`) has fewer and smaller buffers.

    >>> RoundMemory(10, 4, 5, optimizer=4, prefix_cache=20, prefix_pass=23, step=8).total
    42
    """

    weights: int  # the base, and what was received, with copies of what is trained and of the buffers; where frozen
    # layers are streamed, of the others only
    gradients: int
    activations: int  # what the backward pass of one batch begins with: the batch, and what autograd keeps
    optimizer: int  # momentum, and what else a method holds all along
    prefix_cache: int = 0  # outputs of the frozen layers, and of a base, for all of the device's samples
    prefix_pass: int = 0  # the most held while they are computed
    step: int = 0  # the most held at once in one step: activations, gradients and temporary buffers
    streamed: int = (
        0  # the most held while frozen layers run one by one, before the others' weights are there
    )

    @property
    def total(self) -> int:
        """The peak: the larger of its two phases, running the frozen layers and training the others."""
        training = self.weights + max(self.optimizer + self.prefix_cache + self.step, self.prefix_pass)
        return max(training, self.streamed)


@dataclass(frozen=True)
class StepCost:
    """Price of one batch of n^x samples for one Part.

    >>> cost = StepCost(10, 20, 15, 20, 5, share=0.7, memory=RoundMemory(0, 0, 0, 0), sustained=70)
    >>> cost.operations
    70
    >>> [cost.round_operations(samples=12, epochs=2, batch=6, cached=cached) for cached in (False, True)]
    [280.0, 260.0]
    >>> replace(cost, whole=True).round_operations(samples=12, epochs=0.5, batch=6, cached=True)
    80.0
    >>> more = cost.plus(step=7, once=30)
    >>> more.operations, more.share, more.round_operations(samples=12, epochs=2, batch=6, cached=False)
    (77, 0.77, 368.0)
    """

    prefix: float  # forward of the frozen layers before the first trained one
    forward: float  # forward of the others
    error: float  # error signals e_{l,x}
    gradient: float  # weight gradients D_{l,l-1}
    update: float  # W - η_t D, one per trained parameter
    share: float  # c_k relative to the full model's, what the clock multiplies with
    memory: RoundMemory
    sustained: float = (
        0.0  # operations per batch on average over a local round: a cached prefix runs once in it
    )
    once: float = 0.0  # beside the steps, per batch of the device's data and round: a pass of its own
    base: float = 0.0  # of the prefix, what does not run in this round, as its outputs are kept over rounds
    whole: bool = False  # whether the prefix runs on all samples, however few steps are taken

    @property
    def operations(self) -> float:
        """One batch: forward, backward and update."""
        return self.prefix + self.forward + self.error + self.gradient + self.update

    @property
    def inference(self) -> float:
        """One batch forward and no more."""
        return self.prefix + self.forward

    @property
    def memory_bytes(self) -> int:
        """Peak training memory."""
        return self.memory.total

    def round_operations(
        self,
        *,
        samples: int,
        epochs: float,
        batch: int,
        cached: bool,
        frozen: float = 1.0,
        trained: float = 1.0,
    ) -> float:
        """The work of one local round; a cached prefix runs once per round instead of once per epoch.

        A base whose outputs are kept has run before, once.
        Operations of the `frozen` prefix, and those of the forward and backward pass of the other layers, may
        count for less: where they are computed in fewer bits.
        """
        prefix_epochs = 1 if self.whole else min(epochs, 1) if cached else epochs
        saved = (1 - trained) * (self.forward + self.error + self.gradient)
        prefix = (self.prefix - self.base) * frozen
        steps = epochs * (self.operations - self.prefix - saved) + prefix_epochs * prefix
        return samples / batch * (steps + self.once)

    def plus(self, *, step: float = 0.0, once: float = 0.0, memory_bytes: int = 0) -> StepCost:
        """With more operations in every step, or once a round per batch of data, and more held all along.

        How many epochs share what is done once is not known here: `sustained` takes it for one.
        """
        return replace(
            self,
            update=self.update + step,
            share=self.share * (self.operations + step) / self.operations,
            memory=replace(self.memory, optimizer=self.memory.optimizer + memory_bytes),
            sustained=self.sustained + step + once,
            once=self.once + once,
        )


@dataclass(frozen=True)
class LayerCost:
    """Price of one batch for one layer of the full model.

    The operations of a suffix are Σ forward over all layers + Σ (error + gradient + update) over
    the trained ones. `error` is what bringing the error signal to this layer's output adds.
    """

    name: str
    kind: str  # conv, linear or other
    units: int  # n_l: neurons, or filters
    parameters: int
    forward: float
    error: float
    gradient: float
    update: float
    activations: float  # bytes per sample that training it keeps for the backward pass

    @property
    def operations(self) -> float:
        """Its part of a full training step."""
        return self.forward + self.error + self.gradient + self.update
