"""Adam's steps are torch's, also when they are taken in two goes."""

from __future__ import annotations

import pytest
import torch
from fedpmt.training.adam import Adam, Moments, Stepper


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_are_those_of_torch(amsgrad: bool, decay: float) -> None:
    start = {"w": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64)}
    ours = {name: tensor.clone() for name, tensor in start.items()}
    theirs = [tensor.clone().requires_grad_() for tensor in start.values()]
    oracle = torch.optim.Adam(theirs, lr=0.01, weight_decay=decay, amsgrad=amsgrad)
    moments = Moments()
    for _ in range(2):
        stepper = Stepper(Adam(0.01, decay, amsgrad), moments)
        for _ in range(5):
            gradients = {name: torch.randn_like(tensor) for name, tensor in ours.items()}
            stepper.step(ours, gradients)
            for parameter, gradient in zip(theirs, gradients.values(), strict=True):
                parameter.grad = gradient.clone()
            oracle.step()
        before = {name: tensor.clone() for name, tensor in moments.mean.items()}
        kept, moments = moments, stepper.moments()
        # What was given is left as it was.
        assert all(torch.equal(kept.mean[name], tensor) for name, tensor in before.items())
    assert moments.steps == 10
    for tensor, parameter in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-12, atol=1e-12)
