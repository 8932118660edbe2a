"""A node's side of a secure sum. Its secrets live in the node's own context from one message to the next."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, RecordDict

from fedpmt.flower import masks
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flwr.app import Context

    from fedpmt.flower.fixed_point import Words

SECURE = "secagg"
"""The record of what is said about the sum, and of what a node remembers of it."""

KEYS, SHARES, OPEN = "keys", "shares", "open"
"""The messages of a sum beside the task itself, in their order."""


def offer_keys(content: RecordDict, context: Context) -> RecordDict:
    """Begin a sum: two fresh keys, one to agree on masks with others, one to write letters to them."""
    session = str(content.config_records[SECURE]["session"])
    mask_key, mask_public = masks.new_key()
    seal_key, seal_public = masks.new_key()
    context.state[SECURE] = ConfigRecord({"session": session, "mask-key": mask_key, "seal-key": seal_key})
    return _answer(session, mask=mask_public, seal=seal_public)


def share_secrets(content: RecordDict, context: Context) -> RecordDict:
    """Deal the secrets that take masks off again to the neighbours, so that the sum survives those who leave."""
    said, state = _open_session(content, context)
    nodes, own = list(said["nodes"]), context.node_id
    publics = dict(zip(nodes, zip(said["masks"], said["seals"], strict=True), strict=True))
    mine = (masks.public_half(state["mask-key"]), masks.public_half(state["seal-key"]))
    keys = [key for pair in publics.values() for key in pair]
    _must(
        len(nodes) > 1 and len(set(keys)) == 2 * len(nodes), "keys are not one pair for each of several nodes"
    )
    _must(publics.get(own) == mine, "the keys of this node are not its own")
    _must("seeds" not in state, "secrets are dealt once")
    seeds = [os.urandom(masks.SEED_BYTES) for _ in range(int(said["groups"]))]
    key_shares = masks.shares(state["mask-key"], len(nodes))
    seed_shares = list(zip(*(masks.shares(seed, len(nodes)) for seed in seeds), strict=True))
    others, letters = [], []
    for place, node in enumerate(nodes):
        if node == own:
            state |= {"holders": [own], "key-shares": [key_shares[place]]}
            state["seed-shares"] = [b"".join(seed_shares[place])]
            continue
        secret = masks.agreed(state["seal-key"], publics[node][1])
        others.append(node)
        letters.append(masks.seal(secret, own, node, key_shares[place], seed_shares[place]))
    state |= {"nodes": nodes, "masks": list(said["masks"]), "seals": list(said["seals"]), "seeds": seeds}
    context.state[SECURE] = ConfigRecord(state)
    return _answer(
        state["session"],
        nodes=others,
        letters=letters,
        commitments=[masks.commitment(seed) for seed in seeds],
    )


def put_masks_on(content: RecordDict, context: Context, groups: Sequence[Words]) -> list[Words]:
    """The vector as it leaves the node: under a mask of its own for each group, and one with each neighbour."""
    said, state = _open_session(content, context)
    _must(
        "seeds" in state and len(groups) == len(state["seeds"]), "secrets have not been dealt for this vector"
    )
    # Two vectors under one mask would show their difference.
    _must(len(state["holders"]) == 1, "a mask is used once")
    senders, own = list(said["nodes"]), context.node_id
    publics = dict(zip(state["nodes"], zip(state["masks"], state["seals"], strict=True), strict=True))
    _must(
        len(set(senders) - {own}) == len(senders) and set(senders) <= set(publics), "a stranger has written"
    )
    _must(len(senders) + 1 >= masks.threshold(len(publics)), "too few neighbours are left")
    for sender, letter in zip(senders, said["letters"], strict=True):
        secret = masks.agreed(state["seal-key"], publics[sender][1])
        key_share, seed_shares = masks.unseal(secret, sender, own, letter)
        state["holders"] = [*state["holders"], sender]
        state["key-shares"] = [*state["key-shares"], key_share]
        state["seed-shares"] = [*state["seed-shares"], seed_shares]
    agreed = {sender: masks.agreed(state["mask-key"], publics[sender][0]) for sender in senders}
    masked = []
    for group, words in enumerate(groups):
        total = words + masks.mask(state["seeds"][group], group, len(words))
        for sender, secret in agreed.items():
            masks.pairwise(total, secret, group, adds=own > sender)
        masked.append(total)
    context.state[SECURE] = ConfigRecord(state)
    return masked


def hand_out_shares(content: RecordDict, context: Context) -> RecordDict:
    """Give shares that open the named groups of the sum: of the seeds of those in it, of the keys of those gone.

    Never both of one node, and for every group of one sum the same nodes: both together would open a single vector.
    """
    said, state = _open_session(content, context)
    active, gone, groups = list(said["active"]), list(said["gone"]), list(said["groups"])
    holders = state.get("holders", [])
    _must(len({*active, *gone}) == len(active) + len(gone), "a node is named twice")
    _must(
        {*active, *gone} <= set(holders) and context.node_id in active, "the nodes are not those of this sum"
    )
    _must(len(active) >= masks.threshold(len(state["nodes"])), "too few neighbours are in the sum")
    _must(
        sorted(state.get("active", active)) == sorted(active)
        and sorted(state.get("gone", gone)) == sorted(gone),
        "this sum was opened for other nodes",
    )
    place = {node: number for number, node in enumerate(holders)}
    count = len(state["seeds"])
    _must(set(groups) <= set(range(count)), "there is no such group")

    def seed_share(node: int, group: int) -> bytes:
        together: bytes = state["seed-shares"][place[node]]
        size = len(together) // count
        return together[group * size : (group + 1) * size]

    context.state[SECURE] = ConfigRecord({**state, "active": active, "gone": gone})
    return _answer(
        state["session"],
        seeds=[seed_share(node, group) for node in active for group in groups],
        keys=[state["key-shares"][place[node]] for node in gone],
    )


def _open_session(content: RecordDict, context: Context) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """What is said, and what this node remembers, of one and the same sum."""
    _must(SECURE in content.config_records, "the task does not belong to a secure sum")
    said: Mapping[str, Any] = content.config_records[SECURE]
    state: dict[str, Any] = dict(context.state.config_records.get(SECURE, {}))
    _must(state.get("session") == said["session"], "it belongs to another sum")
    return said, state


def _answer(session: str, **said: Any) -> RecordDict:
    return RecordDict({SECURE: ConfigRecord({"session": session, **said})})


def _must(holds: object, reason: str) -> None:
    if not holds:
        raise SettingError(f"secure aggregation is refused by this node: {reason}")
