"""What one Part costs a device, in one of two modes.

    exact   multiply-adds as really run: forward, weight gradients, error signals (none into the first
            trained layer's input), and one operation per trained parameter and step
    paper   the formulas behind the printed table, for the paper's three nets

Memory is measured in both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedpmt.models.finding import is_inside
from fedpmt.models.layered import PREFIX_BATCH
from fedpmt.models.nets import KERNEL, POOL
from fedpmt.parts import depth
from fedpmt.parts.part import WHOLE, Whole, frozen_prefix, left_out, local_shape, mask, size
from fedpmt.pricing import paper
from fedpmt.pricing.cost import LayerCost, RoundMemory, StepCost
from fedpmt.pricing.measure import BASE, measure, two_samples
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.nets import Net
    from fedpmt.models.structure import FrozenPrecision, Layer, TrainedPrecision
    from fedpmt.parts.part import Part
    from fedpmt.pricing.count import Timeline
    from fedpmt.pricing.measure import Block, Measurement
    from fedpmt.types import Arrays

Mode: TypeAlias = Literal["exact", "paper"]
MODES = ("exact", "paper")
Keeping: TypeAlias = Literal["auto", "cache", "recompute", "streamed"]

WORTHWHILE = 0.1
"""Of the operations of a full step: with less to save, a base's outputs are not worth the memory (an embedding's)."""

Key: TypeAlias = tuple[tuple[object, ...], tuple[object, ...]]


class Price:
    """Prices parts of one model for batches of `batch` samples; parts of equal sizes are measured once.

    `samples` is the usual |D_k|, the unit of `load`. `cached` says that training keeps the outputs of
    frozen layers for a whole round; a model that cannot be run in halves never does. `keep_base` says the same of the
    outputs of a frozen base and the whole run, or that frozen layers are streamed, one by one, where that takes less
    memory; `room` is how much there is. With `reused`, outputs of frozen layers are kept over rounds, too. `others` are
    nets that some devices have instead, by the name that parts call them; shares are of this one. `precision_seconds`
    weighs operations of a lower precision where they become seconds, and only there.
    """

    def __init__(
        self,
        model: LayeredModel,
        *,
        mode: Mode,
        batch: int,
        samples: int,
        cached: bool,
        keep_base: Keeping = "recompute",
        room: float = math.inf,
        reused: bool = False,
        held: int = 0,
        example: Arrays,
        net: Net | None = None,
        epochs: int = 1,
        others: Mapping[str, LayeredModel] | None = None,
        precision: TrainedPrecision = "fp32",
        frozen_precision: FrozenPrecision = "fp32",
        precision_seconds: Mapping[str, float] | None = None,
    ) -> None:
        if mode not in MODES:
            raise SettingError.unknown("mode", mode, MODES)
        if mode == "paper" and (net is None or not _is_net(model, net)):
            raise SettingError("mode = 'paper' prices the paper's nets only; use mode = 'exact'")
        self.structure = model.structure
        self.mode, self.net = mode, net
        self.batch, self.samples = batch, samples  # n^x, |D_k|
        self.cached = cached
        self.held, self.epochs = held, epochs  # numbers that the optimizer holds of each parameter; E
        self._keep_base, self._room, self._reused = keep_base, room, reused
        self._precision, self._frozen_precision = precision, frozen_precision
        self._seconds = precision_seconds or {}  # of an operation, relative to fp32's
        self._model = model.clone()
        self._tensors = self._model.initial()
        self._inputs = two_samples(example)
        self._costs: dict[tuple[Key, int], StepCost] = {}
        self._measured: dict[tuple[Key, bool, bool], Measurement] = {}
        self._others: dict[str, Price] = {}
        for name, other in (others or {}).items():
            if mode == "paper":
                raise SettingError(f"mode = 'paper' has no price for the net '{name}'; use mode = 'exact'")
            self._others[name] = Price(
                other,
                mode=mode,
                batch=batch,
                samples=samples,
                cached=cached,
                held=held,
                example=example,
                epochs=epochs,
                precision=precision,
                frozen_precision=frozen_precision,
                precision_seconds=precision_seconds,
            )

    @cached_property
    def _full_operations(self) -> float:
        return self._price(depth.full(self.structure), self.samples).operations

    @cached_property
    def full(self) -> StepCost:
        """The price of the full model; found when it is first asked for, since a device that is told may never ask."""
        return self(depth.full(self.structure))

    def __call__(self, part: Part, samples: int | None = None) -> StepCost:
        """The price of one batch, of whichever net it is a part of; what a device keeps costs as if it were sent.

        Of its memory, what the device keeps of its `samples` is a part: by default, of as many as are usual.
        """
        # Only what is kept depends on them.
        keeps = self.cached or self.keeps_base or self._keep_base == "streamed"
        samples = samples if samples is not None and keeps else self.samples
        if part.model in self._others:
            cost = self._others[part.model](part, samples)
            return replace(cost, share=self._share(cost))
        part = self._typical(part.resident())
        key = self._key(part), samples
        if key not in self._costs:
            cost = self._price(part, samples)
            self._costs[key] = replace(cost, share=self._share(cost), sustained=self._sustained(cost))
        return self._costs[key]

    def streams(self, part: Part, samples: int) -> bool:
        """Whether frozen layers run one by one: where that is wanted, and takes less memory."""
        return self(part, samples).memory.streamed > 0

    def streamed_memory(self, part: Part, samples: int) -> RoundMemory:
        """What a round takes where weights of frozen layers, and of a base, are held one by one before it trains."""
        measured = self._measure(part, streamed=True)
        memory = self._memory(part, measured, samples)
        if not measured.blocks:
            return memory
        cut = measured.blocks[-1].last
        base = self.structure.base_bytes - sum(self._frozen_bytes)
        kept = math.ceil(samples * measured.base_bytes)
        passes = [
            kept
            + self._held(part, range(one.first, one.last))
            + _run_block(one, samples, final=one.last == cut)
            for one in measured.blocks
        ]
        if measured.base is None:
            passes[0] += base
        else:
            passes.append(base + _keep(measured.base, measured.base_bytes, samples)[1])
        names = {name for layer in self.structure.layers[:cut] for name in layer.tensors}
        copies = self._bytes(part, names.intersection(self.structure.buffers, part.sent))
        weights = memory.weights - base - self._held(part, range(cut)) - copies
        return replace(memory, weights=weights, prefix_pass=0, streamed=max(passes))

    def _held(self, part: Part, layers: Iterable[int]) -> int:
        """Bytes of what layers read: what was sent of them, and what is frozen in them."""
        places = [place for place in layers if place not in left_out(self.structure, part)]
        names = [name for place in places for name in self.structure.layers[place].tensors]
        own = self._bytes(part, [name for name in names if name in part.sent])
        return own + sum(self._frozen_bytes[place] for place in places)

    def load(self, cost: StepCost, *, samples: int, epochs: float) -> float:
        """A local round in units of one epoch of the full model over `self.samples` samples.

        T_k is this, times the seconds of that epoch at speed 1, over κ_k.
        """
        if self.mode == "paper":
            # c_k · |D_k| · E
            return (cost.share * epochs + cost.once / self._full_operations) * samples / self.samples
        work = cost.round_operations(
            samples=samples,
            epochs=epochs,
            batch=self.batch,
            cached=self.cached,
            frozen=self._seconds.get(self._frozen_precision, 1.0),
            trained=self._seconds.get(self._precision, 1.0),
        )
        return work / (self.full.operations * self.samples / self.batch)

    def round_operations(self, cost: StepCost, *, samples: int, epochs: float) -> float:
        """Return the operations of a local round; the paper pays for the frozen layers in every epoch."""
        cached = self.cached and self.mode == "exact"
        return cost.round_operations(samples=samples, epochs=epochs, batch=self.batch, cached=cached)

    def layers(self) -> tuple[LayerCost, ...]:
        """The full model layer by layer."""
        if self.mode == "paper":
            rows = [
                (float(row.forward), float(row.error), float(row.gradient), float(row.update))
                for row in self._formulas(depth.full(self.structure))
            ]
        else:
            rows = self._differences()
        return tuple(
            LayerCost(layer.name, *self._units(layer), self.structure.size(layer.parameters), *row, kept)
            for layer, row, kept in zip(self.structure.layers, rows, self._activations(), strict=True)
        )

    @cached_property
    def base_forward(self) -> float:
        """The operations of a batch before the first layer: those of a frozen base."""
        if not self.structure.base_bytes:
            return 0.0
        return self.batch * self._measure(depth.full(self.structure), keeps_base=False).forward[BASE]

    @cached_property
    def keeps_base(self) -> bool:
        """Whether devices keep over rounds what a frozen base makes of their samples.

        `auto` does where it saves at least a tenth of a full step, and the smallest part leaves room for it.
        """
        if (
            self._keep_base in ("recompute", "streamed")
            or not self.structure.base_bytes
            or not self._model.can_cut(0)
        ):
            return False
        if self._keep_base == "cache":
            return True
        whole = self._measure(depth.full(self.structure), keeps_base=False)
        step = sum(whole.forward.values()) + whole.backward
        if self.base_forward < WORTHWHILE * step * self.batch:
            return False
        smallest = depth.suffix(self.structure, len(self.structure.layers) - 1, "")
        measured = self._measure(smallest, keeps_base=True)
        return self._memory(smallest, measured, self.samples).total <= self._room

    def base_operations(self, samples: int) -> float:
        """Return the operations that a device takes once, before its first round: the base, where it is kept."""
        return self.base_forward * samples / self.batch if self.keeps_base else 0.0

    def base_load(self, samples: int) -> float:
        """Return the same in the unit of `load`."""
        work = self.base_operations(samples) * self._seconds.get(self._frozen_precision, 1.0)
        return work / (self._full_operations * self.samples / self.batch)

    def _suffixes(self) -> list[Measurement]:
        """What training takes from each layer on, first layer first."""
        # Without a kept base, whose outputs are no layer's activations.
        return [
            self._measure(depth.suffix(self.structure, frozen, ""), keeps_base=False)
            for frozen in range(len(self.structure.layers))
        ]

    def _activations(self) -> list[float]:
        """Bytes per sample that training each layer keeps, beyond what training the layers behind it does.

        A layer's input is its own; the sample itself, which is there anyway, is no layer's.
        """
        sample = sum(
            array[0].numel() * array.element_size()
            for array in (self._inputs.values() if isinstance(self._inputs, dict) else [self._inputs])
        )
        held = [one.activations_each for one in self._suffixes()]
        return [max(0.0, here - behind) for here, behind in pairwise([*held, float(sample)])]

    def _differences(self) -> list[tuple[float, float, float, float]]:
        """What each layer adds to the suffix behind it."""
        suffixes, count = self._suffixes(), len(self.structure.layers)
        rows = []
        for index, layer in enumerate(self.structure.layers):
            here = suffixes[index]
            behind = suffixes[index + 1] if index + 1 < count else None
            gradient = here.gradient - (behind.gradient if behind else 0)
            backward = here.backward - (behind.backward if behind else 0)
            batch = self.batch
            update = float(self.structure.size(layer.parameters))
            rows.append(
                (here.forward[layer.name] * batch, (backward - gradient) * batch, gradient * batch, update)
            )
        return rows

    def _units(self, layer: Layer) -> tuple[str, int]:
        groups = self.structure.axes.groups if self.structure.axes else {}
        shapes = [self.structure.shapes[name] for name in layer.parameters]
        dimensions = next((shape for shape in shapes if len(shape) > 1), shapes[0])
        kind = "other" if layer.name not in groups else ("linear" if len(dimensions) == 2 else "conv")
        return kind, dimensions[0]

    def _price(self, part: Part, samples: int) -> StepCost:
        measured = self._measure(part)
        cut = frozen_prefix(self.structure, part)
        if self.mode == "paper":
            rows = self._formulas(part)
            trained = mask(self.structure, part)
            prefix = float(sum(row.forward for row in rows[:cut]))
            forward = float(sum(row.forward for row in rows[cut:]))
            # The signal passes through every layer behind the first trained one, trained or not.
            error = float(sum(row.error for row in rows[cut:]))
            gradient = float(sum(row.gradient for row, on in zip(rows, trained, strict=True) if on))
            update = float(sum(row.update for row, on in zip(rows, trained, strict=True) if on))
        else:
            names = [BASE, *(layer.name for layer in self.structure.layers)]
            halves = cut + 1 if self._model.can_cut(cut) or cut == len(names) - 1 else 0
            prefix = self.batch * sum(measured.forward[name] for name in names[:halves])
            forward = self.batch * sum(measured.forward[name] for name in names[halves:])
            error = self.batch * (measured.backward - measured.gradient)
            gradient = self.batch * measured.gradient
            update = float(self._count(part, self._trained(part)))
        base = self.base_forward if self.keeps_base and self._model.can_cut(cut) else 0.0
        memory = self._memory(part, measured, samples)
        if self._keep_base == "streamed":
            memory = min(memory, self.streamed_memory(part, samples), key=lambda one: one.total)
        whole = self._reused or memory.streamed > 0
        return StepCost(
            prefix, forward, error, gradient, update, share=1.0, memory=memory, base=base, whole=whole
        )

    def _sustained(self, cost: StepCost) -> float:
        if self.mode == "paper":
            return cost.operations  # the paper pays for the frozen layers in every epoch
        work = cost.round_operations(
            samples=self.batch, epochs=self.epochs, batch=self.batch, cached=self.cached
        )
        return work / self.epochs

    def _share(self, cost: StepCost) -> float:
        if self.mode == "exact":
            return cost.operations / self._full_operations
        # Rounded up to 0.01 by integers alone, as the printed times need it: .46 .58 .88 .94 1
        return -(-100 * int(cost.operations) // int(self._full_operations)) / 100

    def _memory(self, part: Part, measured: Measurement, samples: int) -> RoundMemory:
        # A masked tensor is worked on, and derived, as a whole.
        gradients = self._bytes(part, self._trained(part))
        # Buffers are copied whether they are trained or not: the forward pass may write to them.
        copies = gradients + self._bytes(part, [name for name in self.structure.buffers if name in part.sent])
        missing = sum(self._frozen_bytes[place] for place in left_out(self.structure, part))
        weights = self.structure.base_bytes - missing + self._bytes(part, part.sent) + copies
        cache = prefix_pass = 0
        for running, each in (
            (measured.base, measured.base_bytes),
            (measured.prefix, measured.hidden_bytes),
        ):
            if running is not None:
                kept, peak = _keep(running, each, samples)
                prefix_pass = max(prefix_pass, cache + peak)
                cache += kept
        return RoundMemory(
            weights,
            gradients,
            measured.activations(self.batch),
            gradients * self.held,
            cache,
            prefix_pass,
            measured.step.peak(self.batch),
        )

    @cached_property
    def _frozen_bytes(self) -> list[int]:
        """Bytes of the frozen tensors in each layer's own module, which nobody needs who runs without it."""
        base, stages = self._model.base(), self._model.layout.stages
        return [
            sum(
                one.numel() * one.element_size()
                for name, one in base.items()
                if is_inside(name, [stage.name])
            )
            for stage in stages
        ]

    def _typical(self, part: Part) -> Part:
        """The same number of layers of each kind, those that come first: which ones are left out has no price."""
        missing = set(left_out(self.structure, part))
        selections = [*part.sent.values(), *part.trained.values()]
        if not missing or part.sent.keys() != part.trained.keys() or any(one != WHOLE for one in selections):
            return part
        kinds: dict[object, list[int]] = {}
        for place in range(len(self.structure.layers)):
            kinds.setdefault(self._layer_kinds[place], []).append(place)
        kept = [
            place
            for places in kinds.values()
            for place in places[: sum(one not in missing for one in places)]
        ]
        layers = [self.structure.layers[place] for place in sorted(kept)]
        whole = dict.fromkeys((name for layer in layers for name in layer.tensors), WHOLE)
        return replace(part, sent=whole, trained=whole)

    @cached_property
    def _layer_kinds(self) -> list[object]:
        """What two layers must have in common to cost the same: whether one may be left out, operations, shapes."""
        forward = self._measure(depth.full(self.structure)).forward
        return [
            (
                layer.optional,
                forward[layer.name],
                self._frozen_bytes[place],
                tuple(self.structure.shapes[name] for name in layer.tensors),
            )
            for place, layer in enumerate(self.structure.layers)
        ]

    def _bytes(self, part: Part, names: Iterable[str]) -> int:
        return sum(self.structure.bytes_each(name) * math.prod(self._shape(part, name)) for name in names)

    def _formulas(self, part: Part) -> tuple[paper.Operations, ...]:
        net = self.net
        if net is None or any(name not in part.sent for name in self.structure.tensors):
            raise SettingError("mode = 'paper' prices the paper's nets only; use mode = 'exact'")
        # A part cut by width has whole numbers of neurons, unlike the table's columns.
        kept = [Fraction(self._shape(part, f"{layer.name}.weight")[0]) for layer in self.structure.layers]
        convolutions = len(net.filters)
        return paper.layer_operations(
            net,
            self.batch,
            filters=kept[:convolutions],
            hidden=kept[convolutions:-1],
            departures=paper.PRINTED[net.name],
        )

    def _measure(self, part: Part, *, keeps_base: bool | None = None, streamed: bool = False) -> Measurement:
        keeps = self.keeps_base if keeps_base is None else keeps_base
        key = self._key(part), keeps, streamed
        if key not in self._measured:
            self._measured[key] = measure(
                self._model,
                self._tensors,
                part,
                self._inputs,
                cached=self.cached,
                keeps_base=keeps,
                streamed=streamed,
                precision=self._precision,
                frozen_precision=self._frozen_precision,
            )
        return self._measured[key]

    def _trained(self, part: Part) -> list[str]:
        return [name for name in self.structure.parameters if name in part.trained]

    def _count(self, part: Part, names: list[str]) -> int:
        return sum(size(part.trained[name], self.structure.shapes[name]) for name in names)

    def _shape(self, part: Part, name: str) -> tuple[int, ...]:
        return local_shape(part.sent.get(name, WHOLE), self.structure.shapes[name])

    def _key(self, part: Part) -> Key:
        """All that decides a price: which channels were kept does not, only how many."""
        sent = tuple(
            (name, None if isinstance(selection, Whole) else self._shape(part, name))
            for name, selection in part.sent.items()
        )
        trained = tuple(
            (name, None if isinstance(selection, Whole) else size(selection, self.structure.shapes[name]))
            for name, selection in part.trained.items()
        )
        return sent, trained


def _keep(running: Timeline, each: float, samples: int) -> tuple[int, int]:
    """Bytes of what frozen layers make of all samples, and the most held while they run."""
    kept = math.ceil(samples * each)
    # The first chunk's output is what is kept, or says how large it is to be; the others are run while it is held.
    first, others = min(PREFIX_BATCH, samples), min(PREFIX_BATCH, samples - PREFIX_BATCH)
    peak = running.peak(first)
    return kept, max(peak, kept + running.peak(others)) if others > 0 else peak


def _run_block(block: Block, samples: int, *, final: bool) -> int:
    """The most held while a block runs on all samples: what it has not yet run on, and what it has made so far."""
    peaks = []
    for start in range(0, samples, PREFIX_BATCH):
        made = (samples if final else start) * block.made if start else 0.0
        running = block.running.peak(min(PREFIX_BATCH, samples - start))
        peaks.append(math.ceil((samples - start) * block.given + made) + running)
    if final and samples > PREFIX_BATCH:
        # What is kept is held together with the first outputs, which say how large it is to be.
        peaks.append(
            math.ceil((samples - PREFIX_BATCH) * block.given + (samples + PREFIX_BATCH) * block.made)
        )
    return max(peaks)


def _is_net(model: LayeredModel, net: Net) -> bool:
    channels, side = net.input_shape[0], net.input_shape[1]
    expected: list[tuple[int, ...]] = []
    for filters in net.filters:
        expected.append((filters, channels, KERNEL, KERNEL))
        channels, side = filters, (side - KERNEL + 1) // POOL
    units = [channels * side**2, *net.hidden, net.classes]
    expected += [(after, before) for before, after in pairwise(units)]
    shapes = model.structure.shapes
    return [shapes.get(f"{layer.name}.weight") for layer in model.structure.layers] == expected
