"""Which models are chains of modules that the fast paths know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedpmt.models.build import FlatLinear
from fedpmt.models.chain import hooked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.models.layered import LayeredModel

_IMAGES, _FEATURES = (nn.Conv2d, nn.MaxPool2d, nn.ReLU), (nn.Linear, nn.ReLU, nn.Flatten)


def is_chain(model: LayeredModel, first: int = 0) -> bool:
    """Whether a model can be run in halves and is made, from layer `first` on, of modules known here.

    Images come first, then features.
    """
    if not model.composable or model.structure.fixed:
        return False  # what is frozen, or counts, is not known here
    modules = modules_in(model, first)
    kinds = [kind for module in modules for kind in _kinds(module)]
    flat = kinds.index(nn.Flatten) if takes_images(modules) and nn.Flatten in kinds else 0
    return (
        all(_known(module) for module in modules)
        and not _tied(modules)
        # A ReLU works in place, so it must not be what meets the data first.
        and next((kind for kind in kinds if kind is not nn.Flatten), None) in (nn.Linear, nn.Conv2d)
        and next((kind for kind in reversed(kinds) if kind is not nn.Flatten), None) is nn.Linear
        and all(kind in _IMAGES for kind in kinds[:flat])
        and all(kind in _FEATURES for kind in kinds[flat:])
    )


def modules_in(model: LayeredModel, first: int = 0) -> list[nn.Module]:
    """What a chain runs, in order, from layer `first` on."""
    everything = (module for _, module in model.modules_of(first, len(model.structure.layers)))
    return [module for module in everything if not does_nothing(module)]


def does_nothing(module: nn.Module) -> bool:
    """Whether a module hands on what it is given, in training mode as well."""
    return type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)


def takes_images(modules: Sequence[nn.Module]) -> bool:
    """Whether a chain begins with a convolution."""
    return bool(modules) and type(modules[0]) is nn.Conv2d


def fits(model: LayeredModel, inputs: Tensor, first: int = 0) -> bool:
    """Whether inputs have the shape that a chain reads: a linear layer also takes sequences, which are not for here."""
    modules = modules_in(model, first)
    if takes_images(modules):
        return inputs.ndim == 4
    return inputs.ndim == 2 or type(modules[0]) is nn.Flatten


def _kinds(module: nn.Module) -> list[type[nn.Module]]:
    return [nn.Flatten, nn.Linear] if type(module) is FlatLinear else [type(module)]


def _tied(modules: Sequence[nn.Module]) -> bool:
    """Whether a tensor is used in two places."""
    used = [id(parameter) for module in modules for parameter in module.parameters()]
    return len(set(used)) < len(used)


def _known(module: nn.Module) -> bool:
    if hooked(module):
        return False
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if type(module) is nn.MaxPool2d:
        return not module.return_indices
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    return type(module) in (nn.Linear, FlatLinear, nn.ReLU)
