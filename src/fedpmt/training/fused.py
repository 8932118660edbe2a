"""The fast path: SGD on a chain of common layers with its backward pass written out.

`local.train` is the oracle; this does the same steps on the same batches, within rounding. It gains by what it
leaves out: no graph is built, no gradient is stored (a weight is updated by the product that would be its gradient),
buffers are reused from step to step, and images stay channels-last, where convolutions and pooling are fastest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpmt.models.layered import PREFIX_BATCH, hooked
from fedpmt.submodel.depth import frozen_prefix, mask
from fedpmt.submodel.part import Mask
from fedpmt.training.batches import channels_last, gather
from fedpmt.training.local import LocalSettings, LocalWork, local_tensors
from fedpmt.training.messages import Reply
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.models.layered import LayeredModel
    from fedpmt.submodel.part import Part
    from fedpmt.training.local import Rng, Site
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples, Tensors

aten = torch.ops.aten


class Weight:
    """A trained tensor and its momentum; steps are taken where the gradient arises."""

    def __init__(self, tensor: Tensor, settings: LocalSettings) -> None:
        self.value = tensor
        self._rate, self._momentum, self._decay = (
            settings.learning_rate,
            settings.momentum,
            settings.weight_decay,
        )
        self._velocity: Tensor | None = None
        self._kept = 1 - self._rate * self._decay
        self._add_product = tensor.baddbmm_ if tensor.ndim == 3 else tensor.addmm_

    def step_product(self, left: Tensor, right: Tensor) -> None:
        """Take the step whose gradient is a matrix product, without storing it where that can be avoided."""
        if self._momentum:
            self.step(left @ right)
            return
        # w <- (1 - η λ) w - η left right
        self._add_product(left, right, beta=self._kept, alpha=-self._rate)

    def step(self, gradient: Tensor) -> None:
        """Take the step of a given gradient."""
        if self._decay:
            gradient = gradient.add(self.value, alpha=self._decay)
        if self._momentum:
            # v <- m v + g
            self._velocity = (
                gradient if self._velocity is None else self._velocity.mul_(self._momentum).add_(gradient)
            )
            gradient = self._velocity
        # w <- w - η g
        self.value.add_(gradient, alpha=-self._rate)


class Operation(ABC):
    """One module of the chain. `backward` takes the error at the output, trains, and gives the error at the input."""

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """The module's output; what `backward` needs is kept."""

    @abstractmethod
    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        """Update the weights; the result counts only where it is `wanted`."""


class Linear(Operation):
    """y = x Wᵀ + b."""

    def __init__(self, weight: Weight, bias: Weight | None) -> None:
        self._weight, self._bias = weight, bias
        self._outputs: dict[int, Tensor] = {}
        self._errors: dict[int, Tensor] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs = inputs
        count, weight = len(inputs), self._weight.value
        if count not in self._outputs:
            self._outputs[count] = inputs.new_empty(count, weight.shape[0])
        if self._bias is None:
            return torch.mm(inputs, weight.t(), out=self._outputs[count])
        return torch.addmm(self._bias.value, inputs, weight.t(), out=self._outputs[count])

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        count, below = len(error), error
        if wanted:
            if count not in self._errors:
                self._errors[count] = torch.empty_like(self._inputs, memory_format=torch.contiguous_format)
            # Before the step: the error goes down through the weights that made it.
            below = torch.mm(error, self._weight.value, out=self._errors[count])
        self._weight.step_product(error.t(), self._inputs)
        if self._bias is not None:
            self._bias.step(error.sum(dim=0))
        return below


class StackedLinear(Operation):
    """y = x Wᵀ + b for several devices at once, each with its own W: small products are mostly overhead."""

    def __init__(self, weight: Weight, bias: Weight | None) -> None:
        self._weight, self._bias = weight, bias
        self._across = weight.value.transpose(1, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs = inputs
        if self._bias is None:
            return torch.bmm(inputs, self._across)
        return torch.baddbmm(self._bias.value, inputs, self._across)

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        below = torch.bmm(error, self._weight.value) if wanted else error
        self._weight.step_product(error.transpose(1, 2), self._inputs)
        if self._bias is not None:
            self._bias.step(error.sum(dim=1, keepdim=True))
        return below


class Convolution(Operation):
    """A two-dimensional convolution, channels last."""

    def __init__(self, module: nn.Conv2d, weight: Weight, bias: Weight | None) -> None:
        self._weight, self._bias = weight, bias
        self._how = (
            list(module.stride),
            list(cast("tuple[int, int]", module.padding)),
            list(module.dilation),
        )
        self._groups = module.groups

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs = inputs
        bias = None if self._bias is None else self._bias.value
        return torch.conv2d(inputs, self._weight.value, bias, *self._how, self._groups)

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        trained = [wanted, True, self._bias is not None]
        sizes = [self._weight.value.shape[0]]
        below, gradient, bias_gradient = aten.convolution_backward(
            error, self._inputs, self._weight.value, sizes, *self._how, False, [0, 0], self._groups, trained
        )
        self._weight.step(gradient)
        if self._bias is not None:
            self._bias.step(bias_gradient)
        return below if wanted else error


class Pool(Operation):
    """A max-pool."""

    def __init__(self, module: nn.MaxPool2d) -> None:
        pairs = [
            _pair(value) for value in (module.kernel_size, module.stride, module.padding, module.dilation)
        ]
        self._how = (*pairs, module.ceil_mode)

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs = inputs
        outputs, self._where = aten.max_pool2d_with_indices(inputs, *self._how)
        return cast("Tensor", outputs)

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        return cast(
            "Tensor", aten.max_pool2d_with_indices_backward(error, self._inputs, *self._how, self._where)
        )


class Relu(Operation):
    """max(x, 0), in place: no operation before it needs its own output."""

    def forward(self, inputs: Tensor) -> Tensor:
        self._outputs = inputs.clamp_min_(0)
        return self._outputs

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        return cast("Tensor", aten.threshold_backward.grad_input(error, self._outputs, 0, grad_input=error))


class Flatten(Operation):
    """From images to rows, in the order of channels that the next layer's weights expect."""

    def forward(self, inputs: Tensor) -> Tensor:
        self._shape = inputs.shape
        return inputs.flatten(1)

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        error = error.view(self._shape)
        return error.contiguous(memory_format=torch.channels_last) if error.ndim == 4 else error


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def fusible(work: LocalWork[Any], site: Site, task: Task, part: Part, data: Examples) -> bool:
    """Whether this work is plain SGD on a chain of modules known here, under cross-entropy."""
    model = site.models[part.model]
    trained = mask(model.structure, part)
    return (
        type(work) is LocalWork
        and site.objective.loss is functional.cross_entropy
        and is_chain(model)
        and any(trained)
        and all(trained[trained.index(1) :])
        and not any(isinstance(selection, Mask) for selection in part.sent.values())
        and isinstance(data.inputs, Tensor)
        and all(tensor.dtype == data.inputs.dtype for tensor in task.tensors[MODEL].values())
        and data.targets.dtype == torch.int64
        and data.targets.ndim == 1
    )


def is_chain(model: LayeredModel) -> bool:
    """Whether a model is made of modules known here and can be run in halves."""
    modules = [module for _, module in model.modules_of(0, len(model.structure.layers))]
    shaping = (nn.Flatten, nn.Identity)
    # A ReLU works in place, so it must not be what meets the data first.
    first = next((module for module in modules if not isinstance(module, shaping)), None)
    last = next((module for module in reversed(modules) if not isinstance(module, shaping)), None)
    return (
        model.composable
        and isinstance(first, nn.Linear | nn.Conv2d)
        and isinstance(last, nn.Linear)
        and all(_known(module) for module in modules)
    )


def _known(module: nn.Module) -> bool:
    if hooked(module) or not all(parameter.requires_grad for parameter in module.parameters()):
        return False
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if type(module) is nn.MaxPool2d:
        return not module.return_indices
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    return type(module) in (nn.Linear, nn.ReLU, nn.Identity)


def operations(
    model: LayeredModel, first: int, last: int, tensors: Tensors, settings: LocalSettings
) -> list[Operation]:
    """The layers `first` to `last - 1` as operations on these tensors, which they will change."""
    chain: list[Operation] = []
    for path, module in model.modules_of(first, last):
        weights = {name: Weight(tensors[f"{path}.{name}"], settings) for name, _ in module.named_parameters()}
        match module:
            case nn.Linear():
                chain.append(Linear(weights["weight"], weights.get("bias")))
            case nn.Conv2d():
                chain.append(Convolution(module, weights["weight"], weights.get("bias")))
            case nn.MaxPool2d():
                chain.append(Pool(module))
            case nn.ReLU():
                chain.append(Relu())
            case nn.Flatten():
                chain.append(Flatten())
    return chain


def fused_forward(model: LayeredModel, tensors: Tensors, inputs: Tensor) -> Tensor | None:
    """The outputs of a chain known here, for evaluation; None where the model is not one."""
    if not is_chain(model):
        return None
    local = {name: channels_last(tensor) for name, tensor in tensors.items()}
    settings = LocalSettings(epochs=0, batch=0, learning_rate=0.0)
    chain = operations(model, 0, len(model.structure.layers), local, settings)
    return _run(chain, channels_last(inputs))


@torch.no_grad()
def fused_train(
    site: Site, task: Task, part: Part, data: Examples, rng: Rng, *, device: int, round_index: int
) -> Reply:
    """The local loop of `local.train` for work that is `fusible`."""
    model, settings = site.models[part.model], site.settings
    received = local_tensors(task, part, model.structure)
    local = {
        name: _own(tensor) if name in part.trained else channels_last(tensor)
        for name, tensor in received.items()
    }
    frozen, layers = frozen_prefix(model.structure, part), len(model.structure.layers)
    prefix = operations(model, 0, frozen, local, settings)
    suffix = operations(model, frozen, layers, local, settings)
    inputs = channels_last(data.inputs)
    if frozen and settings.prefix == "cache":
        # Copied, since the operations write every batch to the same place.
        inputs = torch.cat([_run(prefix, batch).clone() for batch in torch.split(inputs, PREFIX_BATCH)])
        prefix = []
    classes = local[model.structure.layers[-1].parameters[0]].shape[0]
    wanted = functional.one_hot(data.targets, classes).to(inputs.dtype)

    order = rng("order")
    steps, limit = 0, task.steps
    total = inputs.new_zeros(())
    for _ in range(settings.epochs):
        positions = torch.from_numpy(order.permutation(len(data))).to(inputs.device)
        shuffled, labels = gather(inputs, positions), gather(wanted, positions)
        for batch, label in zip(
            torch.split(shuffled, settings.batch), torch.split(labels, settings.batch), strict=True
        ):
            if steps == limit:
                break
            logits = _run(suffix, _run(prefix, batch) if prefix else batch)
            log_shares = torch.log_softmax(logits, dim=1)
            total -= (log_shares * label).sum() / len(batch)
            # ∂ℓ/∂z = (softmax(z) - y) / n
            error = log_shares.exp_().sub_(label).div_(len(batch))
            _back(suffix, error)
            steps += 1
    trained = {name: local[name].contiguous() for name in part.trained}
    metrics = {"train_loss": float(total) / max(1, steps)}
    return Reply(device, round_index, part, len(data), {MODEL: trained}, metrics=metrics)


def _run(chain: Sequence[Operation], inputs: Tensor) -> Tensor:
    for operation in chain:
        inputs = operation.forward(inputs)
    return inputs


def _back(chain: Sequence[Operation], error: Tensor) -> None:
    weighted = [
        position
        for position, operation in enumerate(chain)
        if isinstance(operation, Linear | StackedLinear | Convolution)
    ]
    for position in range(len(chain) - 1, weighted[0] - 1, -1):
        # No error signal into the first trained layer's input.
        error = chain[position].backward(error, wanted=position > weighted[0])


def _own(tensor: Tensor) -> Tensor:
    """A copy that may be changed."""
    return tensor.clone(memory_format=torch.channels_last if tensor.ndim == 4 else torch.contiguous_format)


def stackable(model: LayeredModel) -> bool:
    """Whether devices can share each product: linear layers can, a convolution has one set of filters."""
    modules = [module for _, module in model.modules_of(0, len(model.structure.layers))]
    return is_chain(model) and all(isinstance(module, nn.Linear | nn.ReLU | nn.Flatten) for module in modules)


@torch.no_grad()
def stacked_train(
    site: Site, tasks: Sequence[Task], parts: Sequence[Part], data: Sequence[Examples], rngs: Sequence[Rng]
) -> list[tuple[dict[str, Tensor], float]]:
    """`fused_train` for several devices at once, alike in everything but their numbers.

    Gives each device's trained tensors and mean training loss.
    """
    part, settings = parts[0], site.settings
    model = site.models[part.model]
    received = [local_tensors(task, own, model.structure) for task, own in zip(tasks, parts, strict=True)]
    local = {name: torch.stack([tensors[name] for tensors in received]) for name in received[0]}
    frozen, layers = frozen_prefix(model.structure, part), len(model.structure.layers)
    prefix, suffix = (_stack(model, *span, local, settings) for span in ((0, frozen), (frozen, layers)))
    inputs = torch.stack([examples.inputs.flatten(1) for examples in data])
    if prefix and settings.prefix == "cache":
        inputs = torch.cat([_run(prefix, batch) for batch in torch.split(inputs, PREFIX_BATCH, dim=1)], dim=1)
        prefix = []
    classes = local[model.structure.layers[-1].parameters[0]].shape[1]
    wanted = torch.stack([functional.one_hot(one.targets, classes) for one in data]).to(inputs.dtype)

    orders = [rng("order") for rng in rngs]
    count, steps, limit = inputs.shape[1], 0, tasks[0].steps
    total = inputs.new_zeros(len(data))
    for _ in range(settings.epochs):
        rows = [torch.from_numpy(order.permutation(count)).to(inputs.device) for order in orders]
        shuffled = torch.stack([one.index_select(0, row) for one, row in zip(inputs, rows, strict=True)])
        labels = torch.stack([one.index_select(0, row) for one, row in zip(wanted, rows, strict=True)])
        batches = (torch.split(tensor, settings.batch, dim=1) for tensor in (shuffled, labels))
        for batch, label in zip(*batches, strict=True):
            if steps == limit:
                break
            logits = _run(suffix, _run(prefix, batch) if prefix else batch)
            log_shares = torch.log_softmax(logits, dim=2)
            total -= (log_shares * label).sum(dim=(1, 2)) / batch.shape[1]
            _back(suffix, log_shares.exp_().sub_(label).div_(batch.shape[1]))
            steps += 1
    losses = (total / max(1, steps)).tolist()
    return [
        ({name: local[name][place] for name in part.trained}, losses[place]) for place in range(len(data))
    ]


def _stack(
    model: LayeredModel, first: int, last: int, tensors: Tensors, settings: LocalSettings
) -> list[Operation]:
    """Linear layers and ReLUs on stacked tensors; their flatten was done when the inputs were stacked."""
    chain: list[Operation] = []
    for path, module in model.modules_of(first, last):
        if isinstance(module, nn.Linear):
            weight = Weight(tensors[f"{path}.weight"], settings)
            # One row per device: added to each sample's row.
            bias = Weight(tensors[f"{path}.bias"].unsqueeze(1), settings) if module.bias is not None else None
            chain.append(StackedLinear(weight, bias))
        elif isinstance(module, nn.ReLU):
            chain.append(Relu())
    return chain
