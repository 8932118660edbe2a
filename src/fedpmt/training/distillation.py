"""Learning from another net's answers: what a net says to all inputs, and losses towards it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.models.layered import LayeredModel
    from fedpmt.types import Examples, Tensors


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(z_t / T) || softmax(z_s / T)), the mean over a batch; no T² and no gradient to the teacher."""
    from torch.nn import functional

    target = functional.softmax(teacher.detach() / temperature, dim=-1)
    return functional.kl_div(
        functional.log_softmax(student / temperature, dim=-1), target, reduction="batchmean"
    )


def answers(model: LayeredModel, tensors: Tensors, examples: Examples, cut: int = 0) -> Tensor:
    """The logits of all inputs, in evaluation mode; from layer `cut` on, where inputs are what comes before it."""
    import torch

    from fedpmt.training.batches import chunks
    from fedpmt.training.loop import evaluate_model
    from fedpmt.training.objective import logits_of

    with torch.no_grad():
        batches = (examples.take(span).inputs for span in chunks(examples))
        if cut:
            model.set_training([False] * len(model.structure.layers))
            return torch.cat([logits_of(model.suffix(cut, tensors, inputs)) for inputs in batches])
        return torch.cat([logits_of(evaluate_model(model, tensors, inputs)) for inputs in batches])
