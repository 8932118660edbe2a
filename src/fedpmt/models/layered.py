"""Any `nn.Module` as an ordered list of layers that can be run in two halves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedpmt.models.axes import chain_axes, declared_axes, fit_attributes, traced_axes
from fedpmt.models.chain import bind_chain, find_chain, is_plain_sequential, sequential_children, split_chain
from fedpmt.models.cutting import Cut, capture, find_cut, replay, unit_calls
from fedpmt.models.finding import (
    Finder,
    candidates,
    declare,
    group,
    has_parameters,
    is_inside,
    may_hold_blocks,
)
from fedpmt.models.layout import Layout, TiedOwner, arrange, is_counter
from fedpmt.models.lora import LoraConv2d, LoraLinear
from fedpmt.models.tracing import trace
from fedpmt.models.trees import map_tensors, tensors_in
from fedpmt.models.unwrap import computes_weights, copy_module, prepare
from fedpmt.types import Arrays, SettingError, Tensors

if TYPE_CHECKING:
    from fedpmt.models.axes.declared import Declared
    from fedpmt.models.chain import Chain, Link
    from fedpmt.models.cutting import UnitCall
    from fedpmt.models.finding import Stage
    from fedpmt.models.structure import Axes
    from fedpmt.models.tracing import Trace

PREFIX_BATCH = 64
"""Samples at a time when a frozen prefix is run for the cache: enough to be fast, few enough to stay in memory."""

KEPT, INPUTS = "kept", "inputs"


@dataclass
class Cuts:
    """Where a module can be cut at run time; found when first asked for, and shared by all clones of a model."""

    example: Arrays
    calls: tuple[UnitCall, ...]
    trace: Trace
    found: dict[int, Cut | None] = field(default_factory=dict)


class LayeredModel:
    """A module, its layers in the order of the forward pass, and ways to run it on given tensors.

    Weights are arguments, never state: the module only lends its forward pass. It is changed while
    it runs, so each thread works on its own `clone`.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        chain: Chain | None = None,
        cuts: Cuts | None = None,
        *,
        channels_last: bool = False,
        writes_inputs: bool = False,
    ) -> None:
        self.module = module
        self.layout = layout
        self.channels_last = channels_last  # how images lie in memory when they are given to the module
        self.writes_inputs = writes_inputs  # whether it changes its inputs in place, so that it gets copies
        self.structure = layout.structure
        self._whole_chain, self._cuts = chain, cuts
        # The modules that each layer runs one after another; None where that is not all that the module does.
        self.chain = None
        if chain is not None:
            self.chain = split_chain(bind_chain(chain, module), [stage.paths for stage in layout.stages])
        self._slots = {name: _slots(module, names) for name, names in layout.aliases.items()}
        self._own = {name: slots[0][0][slots[0][1]] for name, slots in self._slots.items()}
        self._bound: dict[str, Tensor] = {}
        state = module.state_dict(keep_vars=True).keys()
        buffers = {name: self._own[name] for name, _ in module.named_buffers() if name in self._own}
        self._local = [
            name for name, own in buffers.items() if is_counter(own) or state.isdisjoint(layout.aliases[name])
        ]
        self._lent: dict[str, Tensor] = {}
        self._reset({})
        self._left_out: set[int] = set()
        floats = (name for name, one in module.named_parameters() if one.is_floating_point())
        self._first = next(floats, None)  # by its type the samples are cast

    def clone(self) -> LayeredModel:
        """Copy the model, for another thread."""
        self.release()
        return self._with(copy_module(self.module))

    def to(self, device: torch.device) -> LayeredModel:
        """The same model on a device; itself where it is there already."""
        if all(tensor.device.type == device.type for tensor in self._own.values()):
            return self
        return self._with(self.clone().module.to(device))

    def _with(self, module: nn.Module) -> LayeredModel:
        return LayeredModel(
            module,
            self.layout,
            self._whole_chain,
            self._cuts,
            channels_last=self.channels_last,
            writes_inputs=self.writes_inputs,
        )

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        device: torch.device = next(iter(self._own.values())).device
        return device

    @property
    def composable(self) -> bool:
        """Whether it is a chain of its layers, each of which runs its modules one after another."""
        return self.chain is not None

    def initial(self) -> dict[str, Tensor]:
        """A copy of the module's own weights."""
        return {name: self._own[name].detach().clone().contiguous() for name in self.structure.tensors}

    def fixed(self) -> dict[str, Tensor]:
        """The tensors that are neither trained nor averaged."""
        return {name: self._own[name].detach() for name in self.structure.fixed}

    def local_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that stay on a device: every local round begins with these.

        They are integers, such as BatchNorm's count of batches, and what is not in the module's state.
        """
        return {name: self._own[name].clone() for name in self._local}

    def base(self) -> dict[str, Tensor]:
        """What every device must hold, bit by bit, before its first round: the fixed tensors without counters."""
        return {name: one for name, one in self.fixed().items() if not is_counter(self._own[name])}

    def state_dict(self, tensors: Tensors) -> dict[str, Tensor]:
        """All of the module's state with these weights, under every name: what loads strictly into the module."""
        state = self.module.state_dict(keep_vars=True)
        values = {**self._own, **tensors}
        named = {alias: values[name] for name, names in self.layout.aliases.items() for alias in names}
        return {name: named.get(name, own).detach() for name, own in state.items()}

    def set_training(
        self, trained: Sequence[bool], *, norms: bool = True, left_out: Collection[int] = ()
    ) -> None:
        """Put trained layers in training mode; frozen ones stay as received, in evaluation mode.

        Modules that hold layers, and so may drop something between them, are in training mode where a layer is.
        Without `norms` modules with running statistics stay in evaluation mode, wherever they are. Optional layers
        that are `left_out` give back what they are given, until this is called again.
        """
        self._leave_out(left_out)
        self.module.train(any(trained))
        modules = dict.fromkeys(self.layout.base, False)
        for stage, on in zip(self.layout.stages, trained, strict=True):
            modules |= dict.fromkeys(stage.paths, on)
        for path, on in modules.items():
            self.module.get_submodule(path).train(on)
        if not norms:
            for module in self.module.modules():
                if getattr(module, "track_running_stats", False):
                    module.eval()

    def forward(self, tensors: Tensors, inputs: Arrays) -> Any:
        """Run the whole model on these tensors."""
        self._bind(tensors)
        return self._call(inputs)

    def release(self) -> None:
        """Let go of the tensors it was run on last; the module has its own again, and all of its layers."""
        self.unbind()
        self._leave_out(())

    def unbind(self) -> None:
        """Let go of the tensors it was run on last."""
        self._bind({})

    def candidates(self) -> list[str]:
        """Submodules and parameters that could be layers, in the order in which they are used."""
        return candidates(self.module, None if self._cuts is None else self._cuts.trace)

    def can_cut(self, cut: int) -> bool:
        """Whether the model can be run in halves before this layer."""
        if self.composable:
            return 0 < cut < len(self.structure.layers)
        return self._cut(cut) is not None

    def prefix(
        self, cut: int, tensors: Tensors, inputs: Arrays, before: Arrays | None = None, first: int = 0
    ) -> Arrays:
        """Run the first `cut` layers in evaluation mode, without a graph, and give what the others need of them.

        With `before`, what was kept of these samples before layer `first`, nothing runs that comes before that layer.
        """
        with torch.no_grad():
            if self.composable:
                return self.run(first, cut, tensors, inputs, before)
            found = self._checked(cut)
            with self._evaluating():
                self._bind(tensors)
                samples = _count(inputs)

                def run() -> dict[str, Tensor]:
                    return capture(self.module, found, samples, lambda: self._call(inputs))

                if before is None:
                    return run()
                kept: dict[str, Tensor] = replay(
                    self.module, self._checked(first), before, samples, self.device, run
                )
                return kept

    def entry(self, kept: Arrays, inputs: Arrays) -> Arrays:
        """What `suffix` takes: what was kept of samples and, unless the model is a chain, the samples themselves."""
        return kept if self.composable else {KEPT: kept, INPUTS: inputs}

    def suffix(self, cut: int, tensors: Tensors, entry: Arrays) -> Any:
        """Run the layers from `cut` on."""
        if self.composable:
            return self.run(cut, len(self.structure.layers), tensors, entry)
        inputs, found = entry[INPUTS], self._checked(cut)
        self._bind(tensors)
        return replay(
            self.module, found, entry[KEPT], _count(inputs), self.device, lambda: self._call(inputs)
        )

    def run(
        self, first: int, last: int, tensors: Tensors, inputs: Arrays, before: Arrays | None = None
    ) -> Tensor:
        """Run layers `first` to `last - 1` (counted from 0) of a model that is a chain of its layers.

        With `before` they run on that, just as the layers before them gave it.
        """
        self._bind(tensors)
        links, outputs = self.modules_of(first, last), before
        if outputs is None:
            # What was kept in fewer bits, and samples for a net of fewer bits, come in another type.
            outputs = self._as_weights(inputs, self.structure.layers[first].tensors[0])
        if self.writes_inputs or any(getattr(link.module, "inplace", False) for link in links[:1]):
            outputs = map_tensors(outputs, torch.clone)
        for link in links:
            outputs = link.module(outputs)
        return outputs  # type: ignore[no-any-return]

    def modules_of(self, first: int, last: int) -> list[Link]:
        """The modules of layers `first` to `last - 1` of a chain in order, each with its path."""
        if self.chain is None:
            raise SettingError("this model is not a chain of its layers, so it cannot be run in halves")
        return [link for layer in self.chain[first:last] for link in layer]

    def _call(self, inputs: Arrays) -> Any:
        """Run the module on samples in the type of its weights: a net of 16 bits takes them in 16 bits."""
        call = _call_channels_last if self.channels_last else _call
        own = map_tensors(inputs, torch.clone) if self.writes_inputs else inputs
        return call(self.module, self._as_weights(own, self._first))

    def _as_weights(self, inputs: Arrays, name: str | None) -> Arrays:
        """Inputs in the type of the weight that meets them first, as it is bound now."""
        return inputs if name is None else _as(inputs, self._bound.get(name, self._own[name]).dtype)

    def _leave_out(self, layers: Collection[int]) -> None:
        for place in self._left_out - set(layers):
            del self.module.get_submodule(self.layout.stages[place].name).__dict__["forward"]
        for place in set(layers) - self._left_out:
            # A class may set attributes in a way of its own.
            child = self.module.get_submodule(self.layout.stages[place].name)
            child.__dict__["forward"] = partial(_pass_on, self.layout.returned[place])
        self._left_out = set(layers)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put everything in evaluation mode for a while."""
        with self._keeping_modes():
            self.module.eval()
            yield

    @contextlib.contextmanager
    def _keeping_modes(self) -> Iterator[None]:
        """Put every module back into its mode afterwards."""
        modes = [(module, module.training) for module in self.module.modules()]
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _checked(self, cut: int) -> Cut:
        found = self._cut(cut)
        if found is None:
            raise SettingError(f"this model cannot be cut before layer {cut + 1}")
        return found

    def _cut(self, cut: int) -> Cut | None:
        cuts = self._cuts
        if cuts is None or not 0 <= cut < len(self.structure.layers):
            return None
        if cut not in cuts.found:
            cuts.found[cut] = self._try_cut(cuts, cut)
        return cuts.found[cut]

    def _try_cut(self, cuts: Cuts, layer: int) -> Cut | None:
        """Compare the cut forward pass with the whole one; where they differ, keep all that crosses, or do not cut."""
        cut = find_cut(cuts.calls, cuts.trace, layer)
        if cut is None:
            return None
        everything = replace(cut, needed=frozenset(range(len(cut.calls))))
        tried = (replace(one, written=written) for one in (cut, everything) for written in (False, True))
        missing = self._left_out
        self._leave_out(())
        try:
            return next((one for one in tried if self._agrees(cuts, layer, one)), None)
        finally:
            self._leave_out(missing)

    def _agrees(self, cuts: Cuts, layer: int, cut: Cut) -> bool:
        cuts.found[layer] = cut
        example = _on(cuts.example, self.device)
        trained = [place >= layer for place in range(len(self.structure.layers))]
        # Rounding to fewer bits, where they were asked for, would hide whether both are the same.
        in_full = torch.autocast(self.device.type, enabled=False)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), self._keeping_modes(), in_full:
                kept = self.prefix(layer, {}, _rows(example, [0, 1, 0]))
                # Other samples in another order: what has been kept must really be one row per sample.
                rows = {name: tensor[[1, 2]] for name, tensor in kept.items()}
                # As it is evaluated, and as it is trained: a forward pass may do more then.
                for switch in (self.module.eval, partial(self.set_training, trained, norms=False)):
                    switch()
                    if not self._halves_agree(layer, rows, _rows(example, [1, 0])):
                        return False
        except Exception:
            # A user's forward pass meets stand-ins here, and may fail on them in any way.
            return False
        finally:
            del cuts.found[layer]
        return True

    def _halves_agree(self, layer: int, kept: Tensors, inputs: Arrays) -> bool:
        """Compare the layers from a cut on with the whole forward pass; what is kept must stay as it is."""

        def outputs_of(run: Callable[[Tensors], Any]) -> list[Tensor]:
            torch.default_generator.manual_seed(0)
            # In training a forward pass writes to its buffers.
            buffers = {name: self._own[name].clone() for name in self.structure.buffers}
            return list(tensors_in(run(buffers)))

        before, entry = _versions(kept), self.entry(kept, inputs)
        half = outputs_of(lambda buffers: self.suffix(layer, buffers, entry))
        whole = outputs_of(lambda buffers: self.forward(buffers, inputs))
        if not whole or _versions(kept) != before:
            return False
        return all(_close(one, other) for one, other in zip(half, whole, strict=True))

    def _bind(self, tensors: Tensors) -> None:
        """Put tensors in their places in the module; what is not given is the module's own.

        Only what has changed since the last time is put there, so that the steps of a local round cost next to nothing.
        """
        bound, changed = self._bound, False
        if len(bound) > len(tensors) or not bound.keys() <= tensors.keys():
            for name in [name for name in bound if name not in tensors]:
                self._put(name, self._own[name])
                del bound[name]
                changed = True
        for name, tensor in tensors.items():
            if bound.get(name) is not tensor:
                self._put(name, tensor)
                bound[name] = tensor
                changed = True
        self._reset(bound)
        if changed:
            fit_attributes(self.module, self.structure, bound)

    def _reset(self, bound: Tensors) -> None:
        """Put back the buffers that stay on a device where a forward pass has changed or replaced them."""
        for name in self._local:
            if name in bound:
                continue
            holder, attribute = self._slots[name][0]
            lent = self._lent.get(name)
            unchanged = lent is not None and lent._version == 0 and holder.get(attribute) is lent
            if not unchanged:
                with torch.inference_mode(
                    False
                ):  # else training could not use it, nor its changes be counted
                    self._lent[name] = self._own[name].clone()
                self._put(name, self._lent[name])

    def _put(self, name: str, tensor: Tensor) -> None:
        for holder, attribute in self._slots[name]:
            holder[attribute] = tensor


def _pass_on(returned: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Answer for a layer that is left out: what it was given, in the form in which it returns its own."""
    given = next(tensors_in((args, kwargs)))
    return map_tensors(returned, lambda _: given)


def _slots(module: nn.Module, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    """The dictionaries in which a module keeps a tensor, and its key there."""
    found = []
    for name in names:
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        found.append((owner._parameters if attribute in owner._parameters else owner._buffers, attribute))
    return found


def _call(module: nn.Module, inputs: Arrays) -> Any:
    # A dict of inputs is a call by keyword, as most modules with several inputs expect.
    return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)


def _call_on_copy(module: nn.Module, inputs: Arrays) -> Any:
    return _call(module, map_tensors(inputs, torch.clone))


def _call_channels_last(module: nn.Module, inputs: Arrays) -> Any:
    return _call(module, map_tensors(inputs, _with_channels_last))


def _with_channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images


def prefers_channels_last(module: nn.Module, example: Arrays) -> bool:
    """Whether a net is faster with the channels of each pixel side by side, and computes the same.

    Nets with convolutions are: a step of a MobileNet or of a ResNet with BatchNorm takes a third less. A forward pass
    that reshapes images by `view` can't.
    """
    convolutions = any(isinstance(one, nn.Conv2d) and max(one.kernel_size) > 1 for one in module.modules())
    images = any(one.dim() == 4 and one.is_floating_point() for one in tensors_in(example))
    if not (images and convolutions):
        return False
    module = copy_module(module).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            usual, found = (
                list(tensors_in(call(module, map_tensors(example, torch.clone))))
                for call in (_call, _call_channels_last)
            )
    except Exception:
        # A user's forward pass may fail in any way; if it does on usual images too, its trace will say so.
        return False
    return len(usual) == len(found) and all(_close(*pair) for pair in zip(found, usual, strict=True))


def writes_inputs(module: nn.Module, example: Arrays | None) -> bool:
    """Whether a forward pass changes its inputs in place; `module`, a copy, is changed as any run changes it.

    Without an example any module may that is neither torch's nor the library's own.
    """
    if example is None:
        known = ("torch.nn.", "fedpmt.")
        kinds = ((getattr(one, "inplace", False), type(one).__module__) for one in module.modules())
        return any(in_place or not kind.startswith(known) for in_place, kind in kinds)
    for training in (False, True):
        given = map_tensors(example, torch.clone)
        before = _versions(given)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                _call(module.train(training), given)
        except Exception:
            # A user's forward pass may fail in any way; if it does in a run, that will say so.
            return True
        if _versions(given) != before:
            return True
    return False


def _versions(inputs: Arrays) -> list[int]:
    """How often each tensor has been changed in place."""
    return [tensor._version for tensor in tensors_in(inputs)]


def _count(inputs: Arrays) -> int:
    return len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)


def _rows(inputs: Arrays, rows: list[int]) -> Arrays:
    if isinstance(inputs, Mapping):
        return {name: _rows(array, rows) for name, array in inputs.items()}
    return inputs[rows]


def _on(inputs: Arrays, device: torch.device) -> Arrays:
    if isinstance(inputs, Mapping):
        return {name: _on(array, device) for name, array in inputs.items()}
    return inputs.to(device)


def _float_type(module: nn.Module) -> torch.dtype:
    """The type of a module's numbers, by its first parameter."""
    types = (parameter.dtype for parameter in module.parameters() if parameter.dtype.is_floating_point)
    return next(types, torch.float32)


def _as(inputs: Arrays, dtype: torch.dtype) -> Arrays:
    if isinstance(inputs, Mapping):
        return {name: _as(array, dtype) for name, array in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * max(1.0, scale), equal_nan=True)


def layered(
    module: nn.Module,
    *,
    layers: Sequence[str | Sequence[str]] | None = None,
    example: Arrays | None = None,
    axes: Axes | Declared | None = None,
    tied: TiedOwner = "last",
) -> LayeredModel:
    """Find the layers of a module, which itself stays as it is.

    Args:
        module: Any module. A plain `nn.Sequential` is a chain of its layers. A compiled or data-parallel one stands for
            the module inside of it.
        layers: Layers in the order of the forward pass, where they are not to be found: each a path of a submodule or
            a parameter, or a list of these.
        example: Two or more samples of inputs, by which layers are found. Only a plain `nn.Sequential`, or a module
            whose layers are named, does without.
        axes: Which channels go together, for cutting by width: for each tensor that is cut, a group's name for each of
            its axes. Else they are found by following the example, when a method asks.
        tied: The layer to which a parameter belongs that several use: the first of them or the last.

    Raises:
        SettingError: There is no layer to be found, a named one does not exist or runs out of order, or the module
            is of a kind whose weights cannot be exchanged: scripted, traced, quantised.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [layer.name for layer in layered(net).structure.layers]
    ['1', '3']
    """
    example = None if example is None else _as(example, _float_type(module))
    own = prepare(module, example, _call_on_copy)
    scratch = copy_module(own)
    few = many = None
    channels_last = example is not None and prefers_channels_last(own, example)
    call = _call_channels_last if channels_last else _call
    channels: Axes | Callable[[], Axes] | None
    channels = declared_axes(own, axes, example) if isinstance(axes, Mapping) else axes
    if layers is None and _is_plain_chain(own, traceable=example is not None):
        children = list(sequential_children(own))
        stages = group(children)
        channels = channels or chain_axes(own, [path for path, _ in children])
    elif example is not None:
        few, many = (trace(scratch, _rows(example, rows), call) for rows in ([0, 1], [0, 1, 0]))
        finder = Finder(own, few)
        stages = finder.stages() if layers is None else finder.declared(layers)
    elif layers is not None:
        stages = declare(own, layers)
    else:
        raise SettingError(
            f"model: {type(own).__name__} is not an nn.Sequential; "
            "name its layers in the order of the forward pass (layers=[...])"
        )
    _check(own, stages)
    if channels is None and example is not None:
        channels = partial(_follow, module, example)
    layout = arrange(own, stages, few, channels, tied)
    # What runs before the first layer is in none of them.
    chain = None if layout.base else find_chain(own, example)
    cuts = None
    if few is not None and many is not None:
        calls = unit_calls(layout, few, many, (2, 3))
        few.forget_values()
        cuts = None if calls is None else Cuts(_rows(example, [0, 1]), calls, few)
    writes = writes_inputs(scratch, example)
    return LayeredModel(own, layout, chain, cuts, channels_last=channels_last, writes_inputs=writes)


def _follow(module: nn.Module, example: Arrays) -> Axes:
    """Find the channels of a user's module; of a copy, as the model's own is changed whenever it runs."""
    own = prepare(module, example, _call_on_copy)
    return traced_axes(own, map_tensors(example, torch.clone))


def _is_plain_chain(module: nn.Module, *, traceable: bool) -> bool:
    """Whether a module is an nn.Sequential of layers; a trace finds more where it wraps a net, or a frozen one."""
    if not is_plain_sequential(module):
        return False
    children = [child for _, child in sequential_children(module)]
    first = next((child for child in children if has_parameters(child)), module)
    frozen = not any(parameter.requires_grad for parameter in first.parameters())
    if not traceable:
        return True
    special = any(may_hold_blocks(child) or computes_weights(child) for child in children)
    return not (frozen or special or any(isinstance(child, LoraLinear | LoraConv2d) for child in children))


def _check(module: nn.Module, stages: Sequence[Stage]) -> None:
    """Refuse a module without layers, and layers that overlap."""
    if not any(stage.paths or stage.parameters for stage in stages) or not has_parameters(module):
        raise SettingError(f"model: {type(module).__name__} has no layer with weights")
    owners: dict[str, Stage] = {}
    for stage in stages:
        for name, _ in module.named_parameters(remove_duplicate=False):
            if (
                is_inside(name, [*stage.paths, *stage.parameters])
                and owners.setdefault(name, stage) is not stage
            ):
                raise SettingError(
                    f"model: parameter '{name}' is in two layers, '{owners[name].name}' and '{stage.name}'"
                )
