"""LoRA adapters: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022.

The weight W of a layer is frozen; a product of two thin matrices is trained in addition:

    y = W x + b + (α / r) B A x,   A: r x inputs, B: outputs x r, B = 0 at first

Layers keep their class's attributes and the names of their tensors, as in loralib: `query.weight` stays `query.weight`,
and `query.lora_A` and `query.lora_B` come in addition, so published weights load under their published names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpmt.models.unwrap import check_module, copy_module, unwrap
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator

Ranks = tuple[int, int] | Sequence[int]


def lora(
    module: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] | str | None = None,
    ranks: Ranks | None = None,
    *,
    head: Sequence[str] | str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Copy a module with LoRA adapters in its linear layers: they and the head are trained, all else is frozen.

    Adapters are put in `nn.Linear` and in `nn.Conv2d` with one group; other layers are refused as targets. Where you
    need more (GPT-2's Conv1D, embeddings, dropout, DoRA), wrap the model with `peft`, which works as well.

    Args:
        module: Any module, which stays as it is.
        rank: The rank r of all adapters.
        alpha: The scale of an adapter is alpha / r.
        targets: Names of the layers, e.g. `("query", "value")`: whole paths, or how these end. Default: all linear
            layers but the head; in a net without any, all 1 x 1 convolutions.
        ranks: In place of `rank`, ranks that grow from input to output, as LEGEND has them: `(first, last)` for the
            first block with adapters and the last, in even steps between. Or one rank for each such block.
        head: Names of what is trained as a whole. Default: the last linear layer, unless its weight is also used
            elsewhere. `()`: nothing.
        seed: Draws the factors A; adapters are the same each time.

    Returns:
        A new module. All of its state loads strictly into another one made in the same way.

    Raises:
        SettingError: There is no such layer, or no adapter can be put there, or a rank is not within 1 and its sizes.

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
        >>> [name for name, one in lora(net, rank=2).named_parameters() if one.requires_grad]
        ['0.lora_A', '0.lora_B', '2.lora_A', '2.lora_B', '4.weight', '4.bias']
    """
    module = unwrap(module)
    check_module(module)
    copied = copy_module(module).requires_grad_(requires_grad=False)
    heads = _find_heads(copied, head)
    paths = _find_targets(copied, targets, heads)
    chosen = _ranks_of(paths, rank, ranks)
    rng = torch.Generator().manual_seed(seed)
    for path in paths:
        _replace(copied, path, _adapt(copied.get_submodule(path), path, chosen[path], alpha, rng))
    for path in heads:
        copied.get_submodule(path).requires_grad_()
    _leave_fast_paths(copied)
    return copied


def merge_lora(module: nn.Module) -> nn.Module:
    """Copy a module made by `lora` without adapters: each product is added to the weight that it adapts.

    Args:
        module: What `lora` returned, e.g. with the weights of a run loaded; it stays as it is.

    Returns:
        A module of the classes that it had before, whose state has the published names. All of it requires a gradient.

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        >>> merged = merge_lora(lora(net, rank=2))
        >>> sorted(merged.state_dict())
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    copied = copy_module(module)
    for path, child in list(copied.named_modules()):
        if isinstance(child, LoraLinear | LoraConv2d):
            _replace(copied, path, child.merge())
    return copied.requires_grad_()


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; made of another layer, whose tensors it takes over."""

    lora_A: nn.Parameter  # noqa: N815 (its published name)
    lora_B: nn.Parameter  # noqa: N815
    scale: float

    @classmethod
    def around(cls, layer: nn.Linear, rank: int, alpha: float, rng: torch.Generator) -> Self:
        """Put an adapter in a layer."""
        like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        own = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        own.weight, own.bias = layer.weight, layer.bias
        own.lora_A = nn.Parameter(_drawn((rank, layer.in_features), layer.in_features, rng).to(**like))
        own.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, **like))
        own.scale = alpha / rank
        own.train(layer.training)
        return own

    def forward(self, input: Tensor) -> Tensor:
        """Add what the adapter makes of the inputs."""
        low = functional.linear(input, self.lora_A)
        return super().forward(input) + functional.linear(low, self.lora_B) * self.scale

    def merge(self) -> nn.Linear:
        """The layer without its adapter, which is added to the weight."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(self.weight.detach() + self.scale * (self.lora_B @ self.lora_A).detach())
        plain.bias = self.bias
        return plain.train(self.training)


class LoraConv2d(nn.Conv2d):
    """A convolution of one group with an adapter: A has its kernel, B looks at single positions."""

    lora_A: nn.Parameter  # noqa: N815 (its published name)
    lora_B: nn.Parameter  # noqa: N815
    scale: float

    @classmethod
    def around(cls, layer: nn.Conv2d, rank: int, alpha: float, rng: torch.Generator) -> Self:
        """Put an adapter in a layer."""
        like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        own = cls(bias=False, device="meta", **_options(layer))
        own.weight, own.bias = layer.weight, layer.bias
        shape = (rank, *layer.weight.shape[1:])
        own.lora_A = nn.Parameter(_drawn(shape, math.prod(shape[1:]), rng).to(**like))
        own.lora_B = nn.Parameter(torch.zeros(layer.out_channels, rank, 1, 1, **like))
        own.scale = alpha / rank
        own.train(layer.training)
        return own

    def forward(self, input: Tensor) -> Tensor:
        """Add what the adapter makes of the inputs."""
        low = self._conv_forward(input, self.lora_A, None)
        return super().forward(input) + functional.conv2d(low, self.lora_B) * self.scale

    def merge(self) -> nn.Conv2d:
        """The layer without its adapter, which is added to the weight."""
        plain = nn.Conv2d(bias=False, device="meta", **_options(self))
        product = (self.lora_B.flatten(1) @ self.lora_A.flatten(1)).view_as(self.weight)
        plain.weight = nn.Parameter(self.weight.detach() + self.scale * product.detach())
        plain.bias = self.bias
        return plain.train(self.training)


def _options(layer: nn.Conv2d) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
    return {name: getattr(layer, name) for name in names}


def _drawn(shape: tuple[int, ...], inputs: int, rng: torch.Generator) -> Tensor:
    """The factor A at first: uniform within 1 / sqrt(inputs), as torch draws linear layers."""
    return (2 * torch.rand(shape, generator=rng) - 1) / math.sqrt(inputs)


def _adapt(layer: nn.Module, path: str, rank: int, alpha: float, rng: torch.Generator) -> nn.Module:
    kind = LoraLinear if isinstance(layer, nn.Linear) else LoraConv2d
    matrix = layer.weight.flatten(1)  # type: ignore[operator]
    if not 1 <= rank <= min(matrix.shape):
        raise SettingError(f"rank must be from 1 to {min(matrix.shape)} in '{path}' (got {rank})")
    return kind.around(layer, rank, alpha, rng)  # type: ignore[arg-type]


def _find_heads(module: nn.Module, head: Sequence[str] | str | None) -> list[str]:
    """What is trained as a whole: what was named, or the last linear layer if its weight is its own."""
    modules = dict(module.named_modules())
    if head is not None:
        return [
            path
            for name in _listed(head)
            for path in _named("head", name, [path for path in modules if path])
        ]
    last = next((path for path in reversed(modules) if isinstance(modules[path], nn.Linear)), None)
    if last is None:
        return []
    uses = [one for _, one in module.named_parameters(remove_duplicate=False)]
    weight = modules[last].weight
    return [last] if sum(one is weight for one in uses) == 1 else []


def _find_targets(module: nn.Module, targets: Sequence[str] | str | None, heads: Sequence[str]) -> list[str]:
    """The layers that get an adapter, in the order in which the module has them."""
    layers = {
        path: child for path, child in _layers(module) if not any(_inside(path, head) for head in heads)
    }
    if targets is None:
        linear = [path for path, child in layers.items() if isinstance(child, nn.Linear)]
        found = linear or [path for path, child in layers.items() if child.kernel_size == (1, 1)]
        if not found:
            raise SettingError(
                f"targets: {type(module).__name__} has no linear layer or 1 x 1 convolution for an adapter, "
                "apart from its head"
            )
        return found
    chosen = {path for name in _listed(targets) for path in _named("targets", name, list(layers))}
    return [path for path in layers if path in chosen]


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers that can have an adapter; not those whose weights are read by the module around them."""
    hidden = {id(child.out_proj) for child in module.modules() if isinstance(child, nn.MultiheadAttention)}
    for path, child in module.named_modules():
        plain = type(child) is nn.Linear or (type(child) is nn.Conv2d and child.groups == 1)
        if path and plain and id(child) not in hidden:
            yield path, child


def _named(key: str, name: str, paths: Sequence[str]) -> list[str]:
    found = [path for path in paths if path == name or path.endswith(f".{name}")]
    if not found:
        ends = dict.fromkeys(path.rpartition(".")[2] for path in paths)
        raise SettingError.unknown(key, name, [end for end in ends if not end.isdigit()] or paths)
    return found


def _listed(names: Sequence[str] | str) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _inside(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}.")


def _ranks_of(paths: Sequence[str], rank: int, ranks: Ranks | None) -> dict[str, int]:
    """The rank of each adapter; those in one block have the same."""
    blocks = list(dict.fromkeys(map(_block, paths)))
    if ranks is None:
        return dict.fromkeys(paths, rank)
    if len(ranks) == len(blocks):
        each = list(ranks)
    elif len(ranks) == 2:
        first, last = ranks
        steps = max(1, len(blocks) - 1)
        each = [round(first + (last - first) * place / steps) for place in range(len(blocks))]
    else:
        raise SettingError(
            f"ranks must be the first and the last rank, or one for each of {len(blocks)} blocks "
            f"(got {len(ranks)})"
        )
    by_block = dict(zip(blocks, each, strict=True))
    return {path: by_block[_block(path)] for path in paths}


def _block(path: str) -> str:
    """The block that a layer belongs to: its path up to the first number.

    >>> _block("bert.encoder.layer.3.attention.self.query"), _block("bert.pooler.dense")
    ('bert.encoder.layer.3', 'bert.pooler.dense')
    """
    names = path.split(".")
    first = next((place for place, name in enumerate(names) if name.isdigit()), len(names) - 1)
    return ".".join(names[: first + 1])


def _replace(module: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._modules[name] = layer


def _leave_fast_paths(module: nn.Module) -> None:
    """Keep torch's own encoder layers from their fused path, which reads weights and knows of no adapter."""
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer):
            child.activation_relu_or_gelu = 0
        elif isinstance(child, nn.TransformerEncoder):
            child.use_nested_tensor = False
