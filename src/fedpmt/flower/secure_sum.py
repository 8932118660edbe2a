"""The server's side of a secure sum: who takes part, what is added up, and which groups of it are opened.

A vector is made of groups, each under masks of its own, so that one group can be opened and another stay shut.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedpmt.flower import masks
from fedpmt.flower.answers import RefusedError, no_answer, reading
from fedpmt.flower.collect import SumError
from fedpmt.flower.secure_node import KEYS, OPEN, SECURE, SHARES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from flwr.serverapp import Grid

    from fedpmt.flower.answers import Loss
    from fedpmt.flower.fixed_point import Words

LETTER_BYTES = 100_000
"""More than a letter of shares takes, with hundreds of groups."""


@dataclass(frozen=True)
class Dealt:
    """What a node has dealt: a letter for each neighbour, and what its seeds will be held against."""

    letters: Mapping[int, bytes]
    commitments: Sequence[bytes]


@dataclass
class SecureSum:
    """One sum, from the keys to the opened groups."""

    sizes: Sequence[int]  # words in each group
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    lost: dict[int, Loss] = field(default_factory=dict)  # by node
    _keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # for masks and for letters
    _around: dict[int, list[int]] = field(default_factory=dict)  # who holds a node's shares
    _dealt: dict[int, Dealt] = field(default_factory=dict)
    _totals: list[Words] = field(default_factory=list)
    _added: set[int] = field(default_factory=set)

    @property
    def members(self) -> set[int]:
        """The nodes that have dealt their secrets: the sum is over these, or over those of them that stay."""
        return set(self._dealt)

    def gather(self, grid: Grid, nodes: Iterable[int], seconds: Callable[[], float]) -> None:
        """Ask for keys, then let neighbours deal their secrets to each other. Who does not answer is not in the sum."""
        asked = {node: self._record() for node in nodes}
        self._keys = self._exchange(grid, KEYS, asked, seconds(), self._read_keys)
        if len(set().union(*self._keys.values())) < 2 * len(self._keys):
            self.lost |= dict.fromkeys(self._keys, ("refused", "two nodes have sent the same key"))
            self._keys = {}
        self._around = masks.neighbourhoods(self._keys)
        asked = {
            node: self._record(
                nodes=around,
                masks=[self._keys[other][0] for other in around],
                seals=[self._keys[other][1] for other in around],
                groups=len(self.sizes),
            )
            for node, around in self._around.items()
            if len(around) > 1
        }
        self._dealt = self._exchange(grid, SHARES, asked, seconds(), self._read_shares)
        self._totals = [np.zeros(size, np.uint32) for size in self.sizes]

    def letters(self, node: int) -> RecordDict:
        """What goes to a node with its task: the letters of those neighbours that are in the sum."""
        senders = [other for other in self._around[node] if other != node and other in self._dealt]
        return self._record(nodes=senders, letters=[self._dealt[sender].letters[node] for sender in senders])

    def add(self, node: int, groups: Sequence[Words]) -> None:
        """Add a node's masked vector."""
        for total, words in zip(self._totals, groups, strict=True):
            np.add(total, words, out=total)
        self._added.add(node)

    def open(self, grid: Grid, groups: Sequence[int], seconds: float) -> dict[int, Words]:
        """Take the masks off these groups of the sum."""
        gone = self.members - self._added
        if not self._added:
            raise SumError("no sum: nobody is in it")
        for node in self.members:
            self._enough(node, self._added)
        asked = {
            node: self._record(
                active=[other for other in self._around[node] if other in self._added],
                gone=[other for other in self._around[node] if other in gone],
                groups=list(groups),
            )
            for node in self._added
        }
        answers = self._exchange(
            grid, OPEN, asked, seconds, lambda node, said: self._read_opened(asked[node], said), note=False
        )
        for node in self.members:
            self._enough(node, answers)
        found = {group: self._totals[group].copy() for group in groups}
        for node in sorted(self._added):
            for place, group in enumerate(groups):
                found[group] -= masks.mask(
                    self._seed(node, place, group, asked, answers), group, self.sizes[group]
                )
        for node in sorted(gone):
            key = self._key(node, asked, answers)
            for other in sorted(self._added & set(self._around[node])):
                secret = masks.agreed(key, self._keys[other][0])
                for group in groups:
                    # Its neighbour has put their mask on, and it has not come to take it off.
                    masks.pairwise(found[group], secret, group, adds=other < node)
        return found

    def _seed(
        self, node: int, place: int, group: int, asked: Mapping[int, RecordDict], answers: Mapping[int, Any]
    ) -> bytes:
        """The seed of one in the sum, from the shares of its neighbours."""
        found = []
        for holder in self._around[node]:
            if holder in answers:
                said: Mapping[str, Any] = asked[holder].config_records[SECURE]
                row = said["active"].index(node)
                found.append(answers[holder][0][row * len(said["groups"]) + place])
        committed = self._dealt[node].commitments[group]
        return self._combined(node, "secret", found, lambda seed: masks.commitment(seed) == committed)

    def _key(self, node: int, asked: Mapping[int, RecordDict], answers: Mapping[int, Any]) -> bytes:
        """The key of one that has gone, from the shares of its neighbours."""
        found = []
        for holder in self._around[node]:
            if holder in answers:
                said: Mapping[str, Any] = asked[holder].config_records[SECURE]
                found.append(answers[holder][1][said["gone"].index(node)])
        return self._combined(node, "key", found, lambda key: masks.public_half(key) == self._keys[node][0])

    def _combined(self, node: int, what: str, found: list[bytes], right: Callable[[bytes], bool]) -> bytes:
        """A node's secret from its shares. Whatever is wrong with what nodes gave, there is no sum and nothing ends."""
        try:
            secret = masks.combined(found, len(self._around[node]))
            fits = right(secret)
        except Exception:
            fits = False
        if not fits:
            raise SumError(f"no sum: the shares of node {node}'s {what} do not fit together")
        return secret

    def _enough(self, node: int, there: Collection[int]) -> None:
        """Whether enough are there of those that hold a node's secrets."""
        around = self._around[node]
        left, needed = sum(holder in there for holder in around), masks.threshold(len(around))
        if left < needed:
            raise SumError(
                f"no sum: {left} of {len(around)} nodes that hold node {node}'s secrets are left, {needed} are needed"
            )

    def _record(self, **said: Any) -> RecordDict:
        return RecordDict({SECURE: ConfigRecord({"session": self.session, **said})})

    def _exchange(
        self,
        grid: Grid,
        action: str,
        contents: Mapping[int, RecordDict],
        seconds: float,
        read: Callable[[int, Mapping[str, Any]], Any],
        *,
        note: bool = True,
    ) -> dict[int, Any]:
        """Ask nodes and read their answers; what became of the others is noted."""
        kind = f"{MessageType.TRAIN}.{action}"
        messages = [
            Message(content, dst_node_id=node, message_type=kind, ttl=seconds)
            for node, content in contents.items()
        ]
        replies = list(grid.send_and_receive(messages, timeout=seconds)) if messages else []
        answers = {reply.metadata.reply_to_message_id: reply for reply in replies}
        found: dict[int, Any] = {}
        lost: dict[int, Loss] = {}
        for message in messages:
            node, reply = message.metadata.dst_node_id, answers.get(message.metadata.message_id)
            loss = no_answer(reply, seconds, node)
            if loss is not None:
                lost[node] = loss
                continue
            assert reply is not None
            try:
                with reading("its answer"):
                    found[node] = read(node, self._said(reply))
            except RefusedError as error:
                lost[node] = ("refused", str(error))
        if note:
            self.lost |= lost
        return found

    def _said(self, reply: Message) -> Mapping[str, Any]:
        _must(set(reply.content) == {SECURE}, "it says more than it was asked")
        said: Mapping[str, Any] = reply.content.config_records[SECURE]
        _must(said.get("session") == self.session, "its answer belongs to another sum")
        return said

    def _read_keys(self, node: int, said: Mapping[str, Any]) -> tuple[bytes, bytes]:
        keys: Any = (said.get("mask"), said.get("seal"))
        _must(
            all(isinstance(key, bytes) and masks.is_public_key(key) for key in keys), "its keys are not keys"
        )
        return keys[0], keys[1]

    def _read_shares(self, node: int, said: Mapping[str, Any]) -> Dealt:
        others = [other for other in self._around[node] if other != node]
        _must(said.get("nodes") == others, "its letters are not for its neighbours")
        letters = _texts(said.get("letters"), len(others), "letters")
        commitments = _texts(said.get("commitments"), len(self.sizes), "commitments")
        return Dealt(dict(zip(others, letters, strict=True)), commitments)

    def _read_opened(self, asked: RecordDict, said: Mapping[str, Any]) -> tuple[list[bytes], list[bytes]]:
        wanted: Mapping[str, Any] = asked.config_records[SECURE]
        active, gone, groups = (len(wanted[key]) for key in ("active", "gone", "groups"))
        seeds = _texts(said.get("seeds"), active * groups, "shares of seeds")
        return seeds, _texts(said.get("keys"), gone, "shares of keys")


def _texts(found: Any, count: int, what: str) -> list[bytes]:
    right = isinstance(found, list) and len(found) == count
    right = right and all(isinstance(one, bytes) and len(one) <= LETTER_BYTES for one in found)
    _must(right, f"its {what} are not {count} short pieces of bytes")
    return list(found)


def _must(holds: object, reason: str) -> None:
    if not holds:
        raise RefusedError(reason)
