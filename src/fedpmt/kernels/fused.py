"""The fast path: SGD on a chain of common layers whose backward pass is written out.

`local.train` is the oracle; this does the same steps on the same batches, within rounding. It is chosen by what the
model and the method's local work are. Where compiled code can be had, that is used (`native`); else torch operations
(`operations`), and devices that are alike in everything but their numbers may train together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpmt.kernels.chains import fits, is_chain, modules_in, takes_images
from fedpmt.kernels.native import StepRule, library, native_forward, native_train, shapes_of
from fedpmt.kernels.operations import Flatten, Linear, Operation, Pool, Relu, convolution, rows_with_one
from fedpmt.models.build import FlatLinear
from fedpmt.models.layered import PREFIX_BATCH
from fedpmt.parts.depth import frozen_prefix, mask
from fedpmt.parts.part import Mask, take, within
from fedpmt.parts.width import corners
from fedpmt.training.batches import channels_last, gather
from fedpmt.training.local import LocalSettings, LocalWork, Outcome, local_tensors
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedpmt.kernels.native import Shape
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.training.local import Rng, Site
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples, Tensors

_UNTRAINED = LocalSettings(epochs=0, batch=0, learning_rate=0.0)
_PLAIN: LocalWork[None] = LocalWork()


def fusible(work: LocalWork[Any], site: Site, task: Task, part: Part, data: Examples) -> bool:
    """Whether this work is plain SGD on a chain of modules known here, under cross-entropy."""
    model = site.models[part.model]
    trained = mask(model.structure, part)
    return (
        work.fast
        and _scales_layers(work.factors(task, part, model.structure), model)
        # What a drawn width leaves out keeps its momentum too, which is not kept apart here.
        and not (part.inner and site.settings.momentum)
        and site.objective.loss is functional.cross_entropy
        and is_chain(model)
        and any(trained)
        and all(trained[trained.index(1) :])
        and not any(isinstance(selection, Mask) for selection in part.sent.values())
        and isinstance(data.inputs, Tensor)
        and fits(model, data.inputs)
        and all(tensor.dtype == data.inputs.dtype for tensor in task.tensors[MODEL].values())
        and data.targets.dtype == torch.int64
        and data.targets.ndim == 1
        # A pull is known to compiled code alone.
        and (type(work).pulled is LocalWork.pulled or _shapes(site, task, part, data) is not None)
    )


def _scales_layers(factors: Mapping[str, float], model: LayeredModel) -> bool:
    """Whether weight and bias of each layer have one factor, since they are one matrix here."""
    return all(
        len({factors.get(name, 1.0) for name in layer.parameters}) == 1 for layer in model.structure.layers
    )


def stackable(model: LayeredModel, settings: LocalSettings) -> bool:
    """Whether devices should share each product: linear layers can, and compiled code gains nothing by it."""
    compiled = library() is not None and not settings.momentum
    return not compiled and is_chain(model) and not takes_images(modules_in(model))


class Chain:
    """The layers `first` to `last - 1` as operations, on copies of the tensors of one device or of several alike."""

    def __init__(
        self,
        model: LayeredModel,
        first: int,
        last: int,
        devices: Sequence[Tensors],
        settings: LocalSettings = _UNTRAINED,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self._operations: list[Operation] = []
        self._paths: dict[str, Operation] = {}
        for path, module in model.modules_of(first, last):
            names = [name for name, _ in module.named_parameters()]
            own = [{name: tensors[f"{path}.{name}"] for name in names} for tensors in devices]
            gain = (factors or {}).get(f"{path}.weight", 1.0) ** 2
            match module:
                case nn.Linear():
                    if isinstance(module, FlatLinear):
                        self._flatten()
                    self._operations.append(Linear(own, settings, gain))
                case nn.Conv2d():
                    trained = settings is not _UNTRAINED
                    self._operations.append(convolution(module, own[0], settings, gain, trained=trained))
                case nn.MaxPool2d():
                    self._operations.append(Pool(module))
                case nn.ReLU():
                    self._rectify()
                case nn.Flatten():
                    self._flatten()
            if names:
                self._paths[path] = self._operations[-1]
        weighted = [place for place, one in enumerate(self._operations) if one.weighted]
        self._lowest = weighted[0] if weighted else 0

    def _flatten(self) -> None:
        # Behind a linear layer there are only rows, and nothing to flatten.
        if not self._paths or not isinstance(self._operations[-1], Linear):
            self._operations.append(Flatten())

    def _rectify(self) -> None:
        last = self._operations[-1] if self._operations else None
        if isinstance(last, Linear):
            last.rectified = True
        else:
            self._operations.append(Relu())

    def forward(self, inputs: Tensor) -> Tensor:
        """What comes out; the next call may write over it."""
        for operation in self._operations:
            inputs = operation.forward(inputs)
        return inputs

    def backward(self, error: Tensor) -> None:
        """Take the step that the error at the output asks for."""
        for place in range(len(self._operations) - 1, self._lowest - 1, -1):
            # No error signal into the first trained layer's input.
            error = self._operations[place].backward(error, wanted=place > self._lowest)

    def tensors(self, place: int) -> dict[str, Tensor]:
        """The tensors of one device."""
        return {
            f"{path}.{name}": tensor
            for path, operation in self._paths.items()
            for name, tensor in operation.tensors(place).items()
        }

    def corners(self, narrow: Chain) -> list[tuple[Tensor, Tensor]]:
        """Where the weights of a narrower chain stand in this one, each beside them."""
        pairs = zip(self._operations, narrow._operations, strict=True)
        return [pair for wide, thin in pairs for pair in wide.corners(thin)]


def fused_forward(model: LayeredModel, tensors: Tensors, inputs: Tensor) -> Tensor | None:
    """The outputs of a chain known here, for evaluation; None where the model is not one."""
    if not is_chain(model) or not fits(model, inputs):
        return None
    if (shapes := shapes_of(model, tensors, inputs)) is not None:
        return native_forward(shapes, tensors, inputs)
    chain = Chain(model, 0, len(model.structure.layers), [tensors])
    return chain.forward(_prepared(model, [inputs]))[0, :, :-1]


def evaluated(model: LayeredModel, tensors: Tensors, inputs: Tensor) -> Tensor:
    """The outputs of any model, in evaluation mode; fused where it is a chain known here."""
    model.set_training([False] * len(model.structure.layers))
    outputs = fused_forward(model, tensors, inputs)
    return model.forward(tensors, inputs) if outputs is None else outputs


@torch.no_grad()
def fused_train(
    site: Site,
    tasks: Sequence[Task],
    parts: Sequence[Part],
    data: Sequence[Examples],
    rngs: Sequence[Rng],
    work: LocalWork[Any] = _PLAIN,
    owns: Sequence[Any] = (None,),
) -> list[Outcome]:
    """The local loop of `local.train` for `fusible` work: of one device, or of several alike on a `stackable` model."""
    if len(tasks) == 1:
        outcome = _compiled(site, tasks[0], parts[0], data[0], rngs[0], work, owns[0])
        if outcome is not None:
            return [outcome]
    part, settings = parts[0], site.settings
    model = site.models[part.model]
    factors = work.factors(tasks[0], part, model.structure)
    received = [
        _scaled(local_tensors(task, own, model.structure), factors)
        for task, own in zip(tasks, parts, strict=True)
    ]
    frozen, layers = frozen_prefix(model.structure, part), len(model.structure.layers)
    prefix = Chain(model, 0, frozen, received)
    suffix = Chain(model, frozen, layers, received, settings, factors)
    narrower = _narrower(model, part, suffix, received[0], settings)
    widths = rngs[0]("width") if narrower else None
    inputs = _prepared(model, [examples.inputs for examples in data])
    cached = frozen > 0 and settings.prefix == "cache"
    if cached:
        # Copied, since the operations write every batch to the same place.
        outputs = [prefix.forward(batch).clone() for batch in _split(inputs, PREFIX_BATCH)]
        inputs = torch.cat(outputs, dim=_samples_axis(outputs[0]))
    classes = received[0][model.structure.layers[-1].parameters[0]].shape[0]
    absent = _absent(work, parts, model, inputs)
    wanted = torch.stack([functional.one_hot(one.targets, classes) for one in data]).to(inputs.dtype)

    orders = [rng("order") for rng in rngs]
    count, steps, limit = wanted.shape[1], 0, tasks[0].steps
    total = inputs.new_zeros(len(data))
    log_shares = torch.empty_like(wanted)
    errors = {size: wanted.new_empty(len(data), size, classes) for size in _sizes(count, settings.batch)}
    for _ in range(settings.epochs):
        order = [torch.from_numpy(order.permutation(count)).to(inputs.device) for order in orders]
        labels = torch.stack([one.index_select(0, rows) for one, rows in zip(wanted, order, strict=True)])
        before = steps
        for batch, label, log_share in zip(
            _split(_shuffled(inputs, order), settings.batch),
            _split(labels, settings.batch),
            _split(log_shares, settings.batch),
            strict=True,
        ):
            if steps == limit:
                break
            drawn = len(narrower) if widths is None else int(widths.integers(len(narrower) + 1))
            chain, pairs = narrower[drawn] if drawn < len(narrower) else (suffix, [])
            for wide, thin in pairs:
                thin.copy_(wide)
            logits = chain.forward(batch if cached else prefix.forward(batch))[..., :-1]
            if absent is not None:
                logits = logits.masked_fill(absent, 0)
            torch.log_softmax(logits, dim=2, out=log_share)
            # ∂ℓ/∂z = (softmax(z) - y) / n
            error = torch.exp(log_share, out=errors[label.shape[1]]).sub_(label).div_(label.shape[1])
            chain.backward(error if absent is None else error.masked_fill_(absent, 0))
            for wide, thin in pairs:
                wide.copy_(thin)
            steps += 1
        seen = min(count, (steps - before) * settings.batch)
        total += _mean_losses(log_shares[:, :seen], labels[:, :seen], settings.batch)
    losses = (total / max(1, steps)).tolist()
    return [
        Outcome({MODEL: _trained(own, suffix.tensors(place), factors)}, metrics={"train_loss": losses[place]})
        for place, own in enumerate(parts)
    ]


def steps_taken(settings: LocalSettings, samples: int, limit: int | None) -> int:
    """How many steps a local round has."""
    steps = settings.epochs * -(-samples // settings.batch)
    return steps if limit is None else min(steps, limit)


def _shapes(site: Site, task: Task, part: Part, data: Examples) -> list[Shape] | None:
    """The chain as compiled code sees it; None where it cannot train it."""
    model = site.models[part.model]
    if site.settings.momentum or part.inner:
        return None
    shapes = shapes_of(model, local_tensors(task, part, model.structure), data.inputs)
    # A label that is no class would be read as an address; torch says what is wrong with it.
    if shapes is None or not bool(((data.targets >= 0) & (data.targets < shapes[-1].own_outputs)).all()):
        return None
    return shapes


def _compiled(
    site: Site, task: Task, part: Part, data: Examples, rng: Rng, work: LocalWork[Any], own: Any
) -> Outcome | None:
    """One device's SGD by compiled code; None where there is none for its model."""
    model, settings = site.models[part.model], site.settings
    shapes = _shapes(site, task, part, data)
    if shapes is None:
        return None
    factors = work.factors(task, part, model.structure)
    received = _scaled(local_tensors(task, part, model.structure), factors)
    order = rng("order")
    orders = np.stack([order.permutation(len(data)) for _ in range(settings.epochs)])
    before = model.modules_of(0, frozen_prefix(model.structure, part))
    frozen = sum(isinstance(module, nn.Linear | nn.Conv2d) for _, module in before)
    rule = StepRule(
        {shape.path: factors.get(f"{shape.path}.weight", 1.0) ** 2 for shape in shapes},
        work.absent(part, model.structure),
    )
    pull = work.pulled(site, task, part, own)
    if pull is not None:
        rate = settings.learning_rate
        # η (constant - μ w) is the same in every step; η μ y is a share of the weight.
        shift = {name: rate * one for name, one in pull.constant.items()}
        for name, one in pull.received.items() if pull.strength else ():
            shift[name] = shift.get(name, 0) - rate * pull.strength * one
        rule = replace(rule, shift=_scaled(shift, factors), spring=rate * pull.strength)
    tensors, loss = native_train(
        shapes, received, data.inputs, data.targets, orders, settings, frozen, task.steps, rule
    )
    return Outcome({MODEL: _trained(part, tensors, factors)}, metrics={"train_loss": loss})


def _trained(part: Part, tensors: Tensors, factors: Mapping[str, float] | None = None) -> dict[str, Tensor]:
    factors = factors or {}
    return {
        name: take(
            tensors[name].div_(factors[name]) if name in factors else tensors[name],
            within(selection, part.sent[name]),
        )
        for name, selection in part.trained.items()
    }


def _scaled(tensors: dict[str, Tensor], factors: Mapping[str, float]) -> Tensors:
    """A layer whose output is scaled is trained as the layer of scaled weights: Weight knows what a step is then."""
    return {name: one * factors[name] if name in factors else one for name, one in tensors.items()}


def _narrower(
    model: LayeredModel, part: Part, widest: Chain, tensors: Tensors, settings: LocalSettings
) -> list[tuple[Chain, list[tuple[Tensor, Tensor]]]]:
    """A chain for each width inside the part, and what to copy before and after one of its steps."""
    chains = []
    for inner in part.inner:
        cut = {name: tensors[name][corner] for name, corner in corners(model.structure, inner).items()}
        chain = Chain(model, 0, len(model.structure.layers), [cut], settings)
        chains.append((chain, widest.corners(chain)))
    return chains


def _absent(work: LocalWork[Any], parts: Sequence[Part], model: LayeredModel, like: Tensor) -> Tensor | None:
    """The classes that each device leaves out, as a mask over its logits; None where nobody does."""
    masks = [work.absent(part, model.structure) for part in parts]
    known = next((mask for mask in masks if mask is not None), None)
    if known is None:
        return None
    rows = [torch.from_numpy(known & False if mask is None else mask) for mask in masks]
    return torch.stack(rows)[:, None].to(like.device)


def _prepared(model: LayeredModel, inputs: Sequence[Tensor]) -> Tensor:
    """Images channels-last, or the stacked rows of all devices, each ending with a one."""
    if takes_images(modules_in(model)):
        return channels_last(inputs[0])
    features = [one.flatten(1) for one in inputs]
    rows = rows_with_one(len(features), *features[0].shape, like=features[0])
    for own, one in zip(rows, features, strict=True):
        own[:, :-1] = one
    return rows


def _samples_axis(tensor: Tensor) -> int:
    """Stacked rows have their devices first."""
    return 1 if tensor.ndim == 3 else 0


def _split(tensor: Tensor, size: int) -> tuple[Tensor, ...]:
    return torch.split(tensor, size, dim=_samples_axis(tensor))


def _shuffled(inputs: Tensor, order: Sequence[Tensor]) -> Tensor:
    if inputs.ndim != 3:
        return gather(inputs, order[0])
    devices, count, columns = inputs.shape
    rows = rows_with_one(devices, count, columns - 1, like=inputs)
    for own, one, positions in zip(rows, inputs, order, strict=True):
        torch.index_select(one, 0, positions, out=own)
    return rows


def _sizes(count: int, batch: int) -> set[int]:
    """The sizes of the batches that so many samples make."""
    return {min(count, batch), count % batch or min(count, batch)}


def _mean_losses(log_shares: Tensor, labels: Tensor, batch: int) -> Tensor:
    """The sum over batches of each device's mean loss."""
    each = -(log_shares * labels).sum(dim=2)
    whole = each.shape[1] // batch * batch
    total = each[:, :whole].sum(dim=1) / batch
    return total if whole == each.shape[1] else total + each[:, whole:].mean(dim=1)
