"""A model's outputs in evaluation mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt import kernels

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.models.layered import LayeredModel
    from fedpmt.types import Arrays, Tensors


def evaluated(model: LayeredModel, tensors: Tensors, inputs: Arrays) -> Tensor:
    """Run any model in evaluation mode, in compiled code where that is possible."""
    model.set_training([False] * len(model.structure.layers))
    outputs = kernels.forward(model, tensors, inputs)
    return model.forward(tensors, inputs) if outputs is None else outputs
