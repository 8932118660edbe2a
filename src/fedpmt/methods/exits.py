"""Nets with exits: linear heads on what inner layers give, for any model whose layers are known.

A net with exits runs the module's own `forward` and listens to the submodules behind which it has a head; a net that
ends early stops there, and has nothing of the layers that follow. Tensors keep the names that they have in the module,
so the same tensor is the same in all of these nets.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpmt.models.build import initialise
from fedpmt.models.finding import is_inside
from fedpmt.models.layered import layered
from fedpmt.models.trees import tensors_in
from fedpmt.parts.depth import ALL_EXITS, EXITS, exit_name, until
from fedpmt.training.objective import logits_of
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from fedpmt.models.layered import LayeredModel
    from fedpmt.types import Arrays

SIDE = 4
"""Images are averaged to at most this many positions along each side before they enter a head."""

MOST_FEATURES = 4096
"""Other features that are more than these are averaged over their first axis, such as tokens."""


def pool(features: Tensor) -> Tensor:
    """Make a row of few features of what a layer gives for each sample.

    >>> [tuple(pool(torch.zeros(2, *shape)).shape) for shape in ((8, 14, 14), (10,), (128, 64), (6, 5))]
    [(2, 128), (2, 10), (2, 64), (2, 30)]
    """
    if features.ndim == 4:
        height, width = features.shape[2:]
        features = functional.adaptive_avg_pool2d(features, (min(SIDE, height), min(SIDE, width)))
    elif features.ndim > 2 and features[0].numel() > MOST_FEATURES:
        features = features.mean(dim=1)
    return features.flatten(1)


class Exit(nn.Linear):
    """A linear head on pooled features."""

    def forward(self, features: Tensor) -> Tensor:
        """Pool, then the linear map."""
        return super().forward(pool(features))


class _Reached(Exception):  # noqa: N818 - it is no error
    """The last submodule that a net needs has run."""


class WithExits(nn.Module):
    """A module with heads on what some of its submodules give.

    In training mode it gives the logits of all heads, first layer first, and then the module's own unless it ends
    early; in evaluation mode their mean.
    """

    def __init__(self, net: nn.Module, taps: Mapping[str, str], heads: nn.ModuleDict, *, early: bool) -> None:
        super().__init__()
        # The net is no child, but its children are children here, and its tensors are tensors here: by the same names.
        self.__dict__["net"] = net
        for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[registry] = net.__dict__[registry]
        self._modules.update(net._modules)
        self.add_module(EXITS, heads)
        self.taps = dict(taps)  # head -> the submodule it listens to, first layer first
        self.last = next(reversed(self.taps)) if early else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as far as it is needed, and all heads."""
        net: nn.Module = self.__dict__["net"]
        net.training = self.training
        heard: dict[str, Any] = {}
        outputs = None
        with ExitStack() as listening, suppress(_Reached):
            for head, path in self.taps.items():
                _listen(listening, net.get_submodule(path), heard, head, last=head == self.last)
            outputs = net(*args, **kwargs)
        heads = self.get_submodule(EXITS)
        assert isinstance(heads, nn.ModuleDict)
        logits = [heads[head](features_of(heard[head])) for head in self.taps]
        if self.last is None:
            logits.append(logits_of(outputs))
        return tuple(logits) if self.training else torch.stack(logits).mean(dim=0)


def _listen(
    listening: ExitStack, module: nn.Module, heard: dict[str, Any], key: str, *, last: bool = False
) -> None:
    """Note what a module gives when it runs first, as one that several layers share has run for the first of them."""

    def note(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        heard.setdefault(key, outputs)
        if last:
            raise _Reached

    listening.callback(module.register_forward_hook(note).remove)


def features_of(outputs: Any) -> Tensor:
    """The tensor that a head works on: the first of what a submodule gives."""
    return next(tensors_in(outputs))


@dataclass(frozen=True)
class Tap:
    """Where to listen to a layer, and what is heard there of two samples."""

    path: str
    features: Tensor


def find_taps(model: LayeredModel, example: Arrays) -> tuple[list[Tap | None], Tensor]:
    """For each layer the submodule of it that runs last, None where nothing can be heard; and the model's logits."""
    trial = model.clone()
    stages = trial.layout.stages
    heard: dict[str, Any] = {}
    with ExitStack() as listening:
        for path in dict.fromkeys(path for stage in stages for path in stage.paths):
            _listen(listening, trial.module.get_submodule(path), heard, path)
        trial.set_training([False] * len(stages))
        with torch.no_grad():
            logits = logits_of(trial.forward(trial.initial(), example))
    taps: list[Tap | None] = []
    for stage in stages:
        own = [
            (path, next(tensors_in(outputs), None)) for path, outputs in heard.items() if path in stage.paths
        ]
        found = [Tap(path, one) for path, one in own if one is not None and len(one) == len(logits)]
        taps.append(found[-1] if found else None)
    return taps, logits


def nets_with_exits(
    method: str,
    model: LayeredModel,
    example: Arrays,
    ends: Sequence[int],
    rng: Callable[[str], np.random.Generator],
    *,
    every: bool,
) -> dict[str, LayeredModel]:
    """Make the nets that end behind each of these numbers of layers, and the whole one with all exits.

    Args:
        method: Who asks, for refusals.
        model: The global model.
        example: Two samples, by which shapes are found.
        ends: How many layers each net has, smallest first; one with all of them has the model's own classifier alone.
        rng: A generator for each purpose.
        every: Whether a net has all exits before its end too, or the last one alone.

    Raises:
        SettingError: The model has no place for an exit, or tensors that layers share.
    """
    if any(len(names) > 1 for names in model.layout.aliases.values()):
        raise SettingError(f"{method} needs a model whose layers share no tensors")
    taps, logits = find_taps(model, example)
    if logits.ndim != 2:
        raise SettingError(f"{method} needs one logit per class (got logits of shape {tuple(logits.shape)})")
    exits: dict[int, tuple[str, Exit]] = {}
    layers = len(model.structure.layers)
    for end in ends:
        if end == layers:
            continue
        tap = taps[end - 1]
        if tap is None:
            layer = model.structure.layers[end - 1].name
            raise SettingError(f"{method} needs a row for each sample behind layer '{layer}'")
        head = Exit(pool(tap.features).shape[1], logits.shape[1])
        initialise(head, rng(exit_name(end)))
        exits[end] = tap.path, head.to(tap.features.dtype)

    def net(end: int) -> LayeredModel:
        own = [one for one in exits if one == end or (every and one < end)]
        return _add_exits(model, {one: exits[one] for one in own}, end)

    return {**{until(end): net(end) for end in ends}, ALL_EXITS: _add_exits(model, exits, layers)}


def _add_exits(model: LayeredModel, exits: Mapping[int, tuple[str, Exit]], layers: int) -> LayeredModel:
    """The first layers of a copy of the model, with exits: each a submodule to listen to, and a head."""
    copied = model.clone()
    module, stages, structure = copied.module, copied.layout.stages, copied.structure
    entries = []
    for place, stage in enumerate(stages):
        single = [name for name in structure.layers[place].parameters if not is_inside(name, stage.paths)]
        if place < layers:
            head = [exit_name(place + 1)] if place + 1 in exits else []
            base = copied.layout.base if place == 0 else ()
            # A layer has the name of its first entry.
            entries.append(list(dict.fromkeys([stage.name, *stage.paths, *single, *head, *base])))
            continue
        needed = {path for earlier in stages[:layers] for path in earlier.paths}
        for path in stage.paths:
            if path not in needed:
                parent, _, name = path.rpartition(".")
                module.get_submodule(parent)._modules[name] = nn.Identity()
        for path in single:
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent)._parameters[name] = None
    heads = nn.ModuleDict({str(end): head for end, (_, head) in exits.items()})
    taps = {str(end): path for end, (path, _) in exits.items()}
    return layered(WithExits(module, taps, heads, early=layers < len(stages)), layers=entries)
