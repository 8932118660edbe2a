"""The numbers of docs/models.md that take some minutes each.

python tests/models/studies.py batchnorm    why FedPMT blows up on EfficientNet-B0 with random weights
python tests/models/studies.py tied         which layer should own a weight that embedding and output share
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpmt
from models.zoo import ZOO, hugging_face

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


def watch_norms() -> None:
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


LENGTH, TIED_ROUNDS, SEEDS = 32, 40, (0, 1)
TEXT = Path(__file__).parents[2] / "LICENSE"
"""A text that does not change, unlike the documents."""

STRIDE = 6


def lines() -> tuple[Tensor, Tensor, int]:
    """Rows of characters of the first nine tenths of the text, which overlap, and of the rest; the alphabet's size."""
    text = TEXT.read_text(encoding="utf-8")
    known = {character: place for place, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[one] for one in text])
    end = len(text) * 9 // 10
    return numbers[:end].unfold(0, LENGTH, STRIDE), numbers[end:].unfold(0, LENGTH, LENGTH), len(known)


def compare_owners() -> None:
    """Train a small GPT-2 by FedPMT on four levels, with either owner, and print the perplexities and virtual times."""
    train, test, characters = lines()
    make = partial(
        hugging_face, "GPT2LMHeadModel", "GPT2Config", vocab_size=characters, n_embd=48, n_layer=3, n_head=3,
        n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    for seed in SEEDS:
        found = []
        for tied in ("first", "last"):
            torch.manual_seed(seed)
            run = fedpmt.run(
                "fedpmt", model=make(), train=({"input_ids": train}, train), test=({"input_ids": test}, test),
                objective="causal-lm", tied=tied, rounds=TIED_ROUNDS,
                devices=20, cohort=5, samples=80, lr=0.3, seed=seed,
            )  # fmt: skip
            assert run.result is not None
            found.append(f"{tied} {run.result.score:.2f} in {run.result.virtual_seconds / 60:.1f} min")
        print(f"seed {seed}: perplexity after {TIED_ROUNDS} rounds, owner {', '.join(found)}", flush=True)


if __name__ == "__main__":
    {"batchnorm": watch_norms, "tied": compare_owners}[sys.argv[1]]()
