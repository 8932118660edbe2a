"""Which layer should own a weight that embedding and output share: the numbers of docs/models.md, in some minutes.

python tests/models/tied_study.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

import fedpmt
from models.zoo import hugging_face

LENGTH, ROUNDS, SEEDS = 32, 40, (0, 1)
TEXT = Path(__file__).parents[2] / "docs"


def lines() -> tuple[Tensor, int]:
    """The documents of this repository as rows of characters, shuffled, and how many characters there are."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(TEXT.glob("*.md")))
    known = {character: place for place, character in enumerate(sorted(set(text)))}
    rows = torch.tensor([known[one] for one in text])[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))], len(known)


def main() -> None:
    """Train a small GPT-2 by FedPMT on four levels, with either owner, and print the perplexities and virtual times."""
    rows, characters = lines()
    test, train = rows[:200], rows[200:1800]
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
                objective="causal-lm", tied=tied, rounds=ROUNDS, devices=20, cohort=5, samples=80, lr=0.3, seed=seed,
            )  # fmt: skip
            assert run.result is not None
            found.append(f"{tied} {run.result.score:.2f} in {run.result.virtual_seconds / 60:.1f} min")
        print(f"seed {seed}: perplexity after {ROUNDS} rounds, owner {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
