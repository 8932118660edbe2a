"""What is minimised and what is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedpmt.types import Arrays


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each sample whose largest logit is its label's."""
    return (outputs.argmax(dim=-1) == targets).to(torch.float32)


@dataclass(frozen=True)
class Objective:
    """A loss ℓ(w; z) averaged over a batch, and a score per sample whose mean is the accuracy."""

    loss: Callable[[Tensor, Arrays], Tensor] = functional.cross_entropy
    score: Callable[[Tensor, Arrays], Tensor] = correct


CLASSIFICATION = Objective()
