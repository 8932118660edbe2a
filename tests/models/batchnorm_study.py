"""Why FedPMT blows up on EfficientNet-B0 with random weights: the numbers of docs/models.md, in some minutes.

python tests/models/batchnorm_study.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpmt
from models.zoo import ZOO

MODEL = ZOO["timm efficientnet_b0"]
ROUNDS = 3


def pictures(count: int = 400) -> tuple[Tensor, Tensor]:
    """Noise with one brighter quarter, which is the class."""
    drawn = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(count) % 4
    for sample, label in enumerate(labels.tolist()):
        row, column = 16 * (label // 2), 16 * (label % 2)
        drawn[sample, :, row : row + 16, column : column + 16] += 1.5
    return drawn, labels


def widest(module: nn.Module, inputs: Tensor) -> float:
    """How much the inputs of a norm vary, at most, in units of what its running statistics say."""
    found: list[float] = []

    def note(norm: nn.BatchNorm2d, given: tuple[Tensor, ...], _: Tensor) -> None:
        assert norm.running_var is not None
        found.append(float((given[0].var(dim=(0, 2, 3)) / (norm.running_var + norm.eps)).sqrt().max()))

    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.register_forward_hook(note)
    with torch.no_grad():
        module.eval()(inputs)
    return max(found)


def main() -> None:
    """Run both methods and print their losses and statistics."""
    inputs, labels = pictures()
    train, test = (inputs[:320], labels[:320]), (inputs[320:], labels[320:])
    torch.manual_seed(0)
    module = MODEL.make()
    for method in ("fedavg", "fedpmt"):
        with tempfile.TemporaryDirectory() as folder:
            run = fedpmt.run(
                method, model=module, train=train, test=test, rounds=ROUNDS, devices=8, cohort=4,
                samples=40, batch=10, lr=0.02, out=Path(folder) / "run",
            )  # fmt: skip
            module_after = MODEL.make()
            module_after.load_state_dict(load_file(Path(folder) / "run" / "model.safetensors"))
        assert run.result is not None
        print(f"{method}: loss {run.result.loss:.1f} after {ROUNDS} rounds, ", end="")
        print(
            f"inputs of norms vary {widest(module_after, inputs[:64]):.0f} times as much as their statistics say"
        )


if __name__ == "__main__":
    main()
