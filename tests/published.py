"""Models as their libraries publish them, small and from configurations: nothing is downloaded."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import nn


@cache
def _timm() -> Any:
    """Import timm. torchvision's compiled operators need CUDA's libraries: where they are missing, declare them."""
    if not hasattr(torch.ops.torchvision, "nms"):
        missing = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            missing.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(missing)
    return importlib.import_module("timm")


_KEPT: list[Any] = []  # a library that is collected takes its operators with it


def timm_model(name: str, **options: Any) -> nn.Module:
    """A model of timm, with random weights."""
    model: nn.Module = _timm().create_model(name, **options)
    return model
