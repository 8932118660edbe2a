"""The server's side of a secure sum: who takes part, what is added up, and which groups of it are opened.

A vector consists of groups, each under masks of its own, so that one group can be opened while another stays closed.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, MessageType, RecordDict

from fedpmt.flower.answers import ask
from fedpmt.flower.checks import require
from fedpmt.flower.secure import masks
from fedpmt.flower.secure.node import KEYS, OPEN, SECURE, SHARES
from fedpmt.flower.strategy import SumError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from flwr.serverapp import Grid

    from fedpmt.flower.answers import Answer, Missing
    from fedpmt.flower.secure.layer_vector import Words

LETTER_BYTES = 100_000
"""The longest letter; one with shares for hundreds of groups is shorter."""


@dataclass(frozen=True)
class Deal:
    """What a node has dealt: a letter for each neighbour, and hashes that its seeds are checked against."""

    letters: Mapping[int, bytes]
    commitments: Sequence[bytes]


@dataclass
class SecureSum:
    """One sum, from the exchange of keys to the opened groups."""

    sizes: Sequence[int]  # words in each group
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    missing: dict[int, Missing] = field(default_factory=dict)  # nodes that dropped out, by id
    _keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # for masks and for letters
    _holders: dict[int, list[int]] = field(default_factory=dict)  # the nodes with shares of a node's secrets
    _deals: dict[int, Deal] = field(default_factory=dict)
    _totals: list[Words] = field(default_factory=list)
    _added: set[int] = field(default_factory=set)

    @property
    def members(self) -> set[int]:
        """The nodes that have dealt their secrets: the sum is over those of them that send a vector."""
        return set(self._deals)

    def gather(self, grid: Grid, nodes: Iterable[int], seconds: Callable[[], float]) -> None:
        """Collect keys, then let neighbours deal their secrets to each other. Nodes that do not answer are left out."""
        asked = {node: self._record() for node in nodes}
        self._keys, self.missing = self._ask(grid, KEYS, asked, seconds(), self._read_keys)
        if len(set().union(*self._keys.values())) < 2 * len(self._keys):
            self.missing |= dict.fromkeys(self._keys, ("refused", "two nodes have sent the same key"))
            self._keys = {}
        self._holders = masks.neighbourhoods(self._keys)
        asked = {
            node: self._record(
                nodes=holders,
                masks=[self._keys[other][0] for other in holders],
                seals=[self._keys[other][1] for other in holders],
                groups=len(self.sizes),
            )
            for node, holders in self._holders.items()
            if len(holders) > 1
        }
        self._deals, silent = self._ask(grid, SHARES, asked, seconds(), self._read_deal)
        self.missing |= silent
        self._totals = [np.zeros(size, np.uint32) for size in self.sizes]

    def letters(self, node: int) -> RecordDict:
        """The record that goes to a node with its task: the letters of those neighbours that are in the sum."""
        senders = [other for other in self._holders[node] if other != node and other in self._deals]
        return self._record(nodes=senders, letters=[self._deals[sender].letters[node] for sender in senders])

    def add(self, node: int, groups: Sequence[Words]) -> None:
        """Add a node's masked vector to the sum."""
        for total, words in zip(self._totals, groups, strict=True):
            np.add(total, words, out=total)
        self._added.add(node)

    def open(self, grid: Grid, groups: Sequence[int], seconds: float) -> dict[int, Words]:
        """Remove the masks from these groups of the sum. Raises `SumError` where that is not possible."""
        gone = self.members - self._added
        if not self._added:
            raise SumError("no sum: nobody is in it")
        for node in self.members:
            self._require_holders(node, self._added)
        asked = {
            node: self._record(
                active=[other for other in self._holders[node] if other in self._added],
                gone=[other for other in self._holders[node] if other in gone],
                groups=list(groups),
            )
            for node in self._added
        }
        answers, _ = self._ask(grid, OPEN, asked, seconds, partial(self._read_opening, asked))
        for node in self.members:
            self._require_holders(node, answers)
        found = {group: self._totals[group].copy() for group in groups}
        for node in sorted(self._added):
            for place, group in enumerate(groups):
                found[group] -= masks.mask(
                    self._seed(node, place, group, asked, answers), group, self.sizes[group]
                )
        for node in sorted(gone):
            key = self._key(node, asked, answers)
            for other in sorted(self._added & set(self._holders[node])):
                secret = masks.agree(key, self._keys[other][0])
                for group in groups:
                    # The neighbour applied the mask of this pair, and nothing that the other sent cancels it.
                    masks.apply_pair(found[group], secret, group, adds=other < node)
        return found

    def _seed(
        self, node: int, place: int, group: int, asked: Mapping[int, RecordDict], answers: Mapping[int, Any]
    ) -> bytes:
        """Reconstruct the seed of a node that is in the sum."""
        found = []
        for holder in self._holders[node]:
            if holder in answers:
                question: Mapping[str, Any] = asked[holder].config_records[SECURE]
                row = question["active"].index(node)
                found.append(answers[holder][0][row * len(question["groups"]) + place])
        committed = self._deals[node].commitments[group]
        return self._combine(node, "secret", found, lambda seed: masks.commit(seed) == committed)

    def _key(self, node: int, asked: Mapping[int, RecordDict], answers: Mapping[int, Any]) -> bytes:
        """Reconstruct the key of a node that has left."""
        found = []
        for holder in self._holders[node]:
            if holder in answers:
                question: Mapping[str, Any] = asked[holder].config_records[SECURE]
                found.append(answers[holder][1][question["gone"].index(node)])
        return self._combine(node, "key", found, lambda key: masks.public_half(key) == self._keys[node][0])

    def _combine(self, node: int, what: str, found: list[bytes], right: Callable[[bytes], bool]) -> bytes:
        """Reconstruct a node's secret. Wrong shares mean that there is no sum; they must not end the run."""
        try:
            secret = masks.combine(found, len(self._holders[node]))
            fits = right(secret)
        except Exception:
            fits = False
        if not fits:
            raise SumError(f"no sum: the shares of node {node}'s {what} do not fit together")
        return secret

    def _require_holders(self, node: int, there: Collection[int]) -> None:
        """Make sure that enough of the nodes that hold shares of a node's secrets are there."""
        holders = self._holders[node]
        left, needed = sum(holder in there for holder in holders), masks.threshold(len(holders))
        if left < needed:
            raise SumError(
                f"no sum: {left} of {len(holders)} nodes that hold node {node}'s secrets are left, {needed} are needed"
            )

    def _record(self, **values: Any) -> RecordDict:
        return RecordDict({SECURE: ConfigRecord({"session": self.session, **values})})

    def _ask(
        self,
        grid: Grid,
        action: str,
        questions: Mapping[int, RecordDict],
        seconds: float,
        read: Callable[[int, Mapping[str, Any]], Answer],
    ) -> tuple[dict[int, Answer], dict[int, Missing]]:
        """Ask nodes as a part of this sum; their answers, and who gave none."""

        def read_record(node: int, content: RecordDict) -> Answer:
            require(set(content) == {SECURE}, "it says more than it was asked")
            answer: Mapping[str, Any] = content.config_records[SECURE]
            require(answer.get("session") == self.session, "its answer belongs to another sum")
            return read(node, answer)

        return ask(grid, f"{MessageType.TRAIN}.{action}", questions, seconds, read_record)

    def _read_keys(self, node: int, answer: Mapping[str, Any]) -> tuple[bytes, bytes]:
        keys: Any = (answer.get("mask"), answer.get("seal"))
        right = all(isinstance(key, bytes) and masks.is_public_key(key) for key in keys)
        require(right, "its keys are not keys")
        return keys[0], keys[1]

    def _read_deal(self, node: int, answer: Mapping[str, Any]) -> Deal:
        others = [other for other in self._holders[node] if other != node]
        require(answer.get("nodes") == others, "its letters are not for its neighbours")
        letters = _read_list(answer.get("letters"), len(others), "letters")
        commitments = _read_list(answer.get("commitments"), len(self.sizes), "commitments")
        return Deal(dict(zip(others, letters, strict=True)), commitments)

    def _read_opening(
        self, asked: Mapping[int, RecordDict], node: int, answer: Mapping[str, Any]
    ) -> tuple[list[bytes], list[bytes]]:
        question: Mapping[str, Any] = asked[node].config_records[SECURE]
        active, gone, groups = (len(question[key]) for key in ("active", "gone", "groups"))
        seeds = _read_list(answer.get("seeds"), active * groups, "shares of seeds")
        return seeds, _read_list(answer.get("keys"), gone, "shares of keys")


def _read_list(found: Any, count: int, what: str) -> list[bytes]:
    right = isinstance(found, list) and len(found) == count
    right = right and all(isinstance(one, bytes) and len(one) <= LETTER_BYTES for one in found)
    require(right, f"its {what} are not {count} short pieces of bytes")
    return list(found)
