"""FeDepth: Zhang, Dai, Wang, Sha and Chen, "Memory-adaptive Depth-wise Heterogeneous Federated Learning", 2023.

Every device trains the whole model. One that is short of memory trains it block by block within a round: all epochs on
the first block, then all on the second, and so on. While a block learns, the layers before it are frozen and the layers
behind it do not run; a classifier on what the block gives stands in for them. Memory falls to that of the largest
block, the operations of a round stay about the same:

    memory = weights + max_b step_b,        operations = Σ_b E (forward_{<= b} + backward_b + update_b)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from fedpmt.methods.averaging import PLAIN, Averaged, MeanFold, Weight, send
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits, require
from fedpmt.parts.depth import ALL_EXITS, even_ends, exit_of, exits_in, until, with_exits
from fedpmt.parts.part import GLOBAL, mask
from fedpmt.training.local import LocalWork
from fedpmt.training.server import REPLACE, ServerOptimizer
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.methods.base import Action
    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.resources import Resource
    from fedpmt.training.local import Job, Outcome, PriceOf, Run
    from fedpmt.training.messages import Client, Reply, Task
    from fedpmt.types import Arrays, Examples, Tensors

MOST_BLOCKS = 8
"""Places where a model of many layers can be cut: each takes a net of its own."""

BLOCKS, CURRENT = "blocks", "current"


def block_part(structure: Structure, first: int, last: int) -> Part:
    """What a device does while it trains layers `first` to `last - 1`: a part of the net that ends behind them."""
    net = with_exits(structure, (last,), until(last), f"layers {first + 1}-{last}", last)
    names = [name for layer in structure.layers[first:last] for name in layer.tensors]
    return replace(net, trained={name: net.sent[name] for name in names if name in net.sent})


def blocks_of(structure: Structure, part: Part) -> list[Part]:
    """The blocks of a device's part, which end behind its exits."""
    ends = [end for end in exits_in(structure) if any(exit_of(name) == end for name in part.trained)]
    return [
        block_part(structure, first, last)
        for first, last in zip([0, *ends], [*ends, len(structure.layers)], strict=True)
    ]


@dataclass(frozen=True)
class BlockByBlock(LocalWork[None]):
    """An equal number of steps on each block, first layer first."""

    def start(self, job: Job[None]) -> Run[None]:
        run = super().start(job)
        if job.part.model != GLOBAL:
            run.memo[BLOCKS] = blocks_of(job.model.structure, job.part)
        return run

    def loss(self, run: Run[None], batch: Examples) -> Tensor:
        if run.part.model == GLOBAL:
            return super().loss(run, batch)
        blocks: list[Part] = run.memo[BLOCKS]
        steps = run.site.settings.steps(len(run.job.data), run.task.steps)
        block = blocks[run.steps * len(blocks) // steps]
        net = run.site.models[block.model]
        if run.memo.get(CURRENT) is not block:
            run.memo[CURRENT] = block
            net.set_training([bool(on) for on in mask(net.structure, block)])
        known = {*net.structure.tensors, *net.structure.fixed}
        # Without a gradient to the layers before the block no graph of them exists.
        tensors = {
            name: tensor if name in block.trained else tensor.detach()
            for name, tensor in run.tensors.items()
            if name in known
        }
        *_, logits = net.forward(tensors, batch.inputs)
        return run.site.objective.loss(logits, batch.targets)

    def reply(self, run: Run[None]) -> tuple[Outcome, None]:
        for block in run.memo.get(BLOCKS, ()):
            run.site.models[block.model].release()
        outcome, _ = super().reply(run)
        return outcome, None

    def compiled(self, job: Job[None]) -> StepRule | None:
        return job.rule() if job.part.model == GLOBAL else None

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """A step is as dear as one of a block, on average, and holds what one of the largest block does."""
        if part.model == GLOBAL:
            return part.extra
        whole, costs = price(part), [price(block) for block in blocks_of(structure, part)]
        step = sum(cost.operations for cost in costs) / len(costs) - whole.operations
        held = max(cost.memory.step for cost in costs) - whole.memory.step
        return replace(part.extra, step=step, memory_bytes=held)


@dataclass(frozen=True)
class Blocks:
    """The server's state."""

    model: Averaged  # the whole model, with all exits
    batch: int  # n^x

    @property
    def tensors(self) -> Tensors:
        """The whole model with all exits."""
        return self.model.tensors


class BlocksFold(Fold[Blocks]):
    """The mean of each tensor over those that have it: of the model over all, of an exit over some."""

    def __init__(self, method: FeDepth, state: Blocks) -> None:
        self._state = state
        self._mean = MeanFold(state.model, "overlap", method.weight, method.server, method.mean)

    def add(self, reply: Reply) -> None:
        self._mean.add(reply)

    def finish(self, server: Server) -> Step[Blocks]:
        return Step(replace(self._state, model=self._mean.finish(server).state))


@dataclass(frozen=True)
class FeDepth(Method[Blocks, None]):
    """The whole model on every device, in as few blocks as its memory allows."""

    weight: Weight = "samples"
    blocks: int | None = None  # the same number on every device instead of as few as fit
    mean: str = PLAIN
    server: ServerOptimizer = REPLACE

    def __post_init__(self) -> None:
        require(self, blocks=(self.blocks is None or self.blocks >= 1, ">= 1"))

    @property
    def traits(self) -> Traits:
        budget: dict[Resource, Action] = {} if self.blocks is not None else {"memory": "device"}
        return Traits(
            needs_speeds=True, needs_classes=True, combines="overlap mean", discounts=True, budget=budget
        )

    @property
    def local(self) -> LocalWork[None]:
        return BlockByBlock()

    def models(
        self, model: LayeredModel, example: Arrays, rng: Callable[[str], np.random.Generator]
    ) -> Mapping[str, LayeredModel]:
        """The nets that end where a block may end, each with one classifier; none where there is only one block."""
        from fedpmt.methods.exits import nets_with_exits

        layers = len(model.structure.layers)
        most = min(MOST_BLOCKS, max(1, layers - 1))
        if self.blocks is not None and self.blocks > most:
            raise SettingError(f"fedepth.blocks must be <= {most} for this model (got {self.blocks})")
        ends = even_ends(layers, most)
        if not ends or self.blocks == 1:
            return {}
        return nets_with_exits("fedepth", model, example, (*ends, layers), rng, every=False)

    def init(self, setup: Setup) -> Blocks:
        whole = setup.prototypes.get(ALL_EXITS, setup.prototypes[GLOBAL])
        return Blocks(Averaged(whole.structure, whole.tensors), setup.batch)

    def ends(self, structure: Structure, client: Client, price: PriceOf) -> tuple[int, ...]:
        """Where all blocks but the last end."""
        places = (*exits_in(structure), len(structure.layers))
        if self.blocks is not None:
            return tuple(places[number * len(places) // self.blocks - 1] for number in range(1, self.blocks))
        most = None if client.limit is None else client.limit.memory
        if most is None or len(places) == 1 or client.usage(self.part(structure, ())).memory <= most:
            return ()
        held = price(self.part(structure, places[:-1])).memory
        room, found = most - held.weights - held.optimizer, [0]
        while found[-1] < places[-1]:
            later = [place for place in places if place > found[-1]]
            # As long as the memory lasts, and no shorter than can be.
            fitting = [
                end for end in later if price(block_part(structure, found[-1], end)).memory.step <= room
            ]
            found.append(max(fitting, default=later[0]))
        return tuple(found[1:-1])

    def part(self, structure: Structure, ends: tuple[int, ...]) -> Part:
        """The whole model with the exits behind these blocks."""
        memo = structure.memo
        if (FeDepth, ends) not in memo:
            label, net = f"{len(ends) + 1} blocks", ALL_EXITS if ends else GLOBAL
            memo[FeDepth, ends] = with_exits(structure, ends, net, label if ends else "1 block")
        made: Part = memo[FeDepth, ends]
        return made

    def assign(self, state: Blocks, client: Client, round: Round) -> Task:
        structure = state.model.structure
        ends = self.ends(structure, client, round.price)
        # E, of which each block has as many
        epochs = client.steps // -(-client.samples // state.batch)
        more = {"epochs": epochs * (len(ends) + 1)} if ends else {}
        return send(state.tensors, (self.part(structure, ends),), **more)

    def fold(self, state: Blocks, round: Round) -> Fold[Blocks]:
        return BlocksFold(self, state)

    def predictor(self, state: Blocks) -> Predictor:
        own = {name: tensor for name, tensor in state.tensors.items() if exit_of(name) is None}
        return Predictor("global", GLOBAL, own)

    def neutral(self) -> Self:
        return replace(self, blocks=1)
