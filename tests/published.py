"""Models as their libraries publish them, small and from configurations: nothing is downloaded.

Import this module before timm, transformers or peft.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

_DECLARED: list[Any] = []  # a library that is collected takes its operators with it


def _declare_operators() -> None:
    """Declare torchvision's compiled operators: their own file needs CUDA's libraries, which may not be there."""
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(  # type: ignore[no-untyped-call]
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    _DECLARED.append(library)


_declare_operators()


def timm_model(name: str, **options: Any) -> nn.Module:
    """A model of timm, with random weights."""
    model: nn.Module = importlib.import_module("timm").create_model(name, **options)
    return model
