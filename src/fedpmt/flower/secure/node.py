"""The node's side of a secure sum. Its secrets are kept in the node's own context from one message to the next."""

from __future__ import annotations

import os
from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, RecordDict
from flwr.common.logger import log

from fedpmt.flower.secure import masks
from fedpmt.flower.secure.layer_vector import Scale, encode, weigh
from fedpmt.flower.wire import write_masked
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flwr.app import Context

    from fedpmt.flower.secure.layer_vector import Words
    from fedpmt.flower.wire import Order
    from fedpmt.simulation.loop import Federation
    from fedpmt.training.messages import Reply

SECURE = "secagg"
"""The record of what the server says about the sum, and of what a node remembers of it."""

KEYS, SHARES, OPEN = "keys", "shares", "open"
"""The messages of a sum other than the task itself, in their order."""


def offer_keys(content: RecordDict, context: Context) -> RecordDict:
    """Begin a sum with two new keys: one to agree on masks with others, one to encrypt letters to them."""
    session = str(content.config_records[SECURE]["session"])
    mask_key, mask_public = masks.new_key()
    seal_key, seal_public = masks.new_key()
    context.state[SECURE] = ConfigRecord({"session": session, "mask-key": mask_key, "seal-key": seal_key})
    return _answer(session, mask=mask_public, seal=seal_public)


def share_secrets(content: RecordDict, context: Context) -> RecordDict:
    """Deal shares of the secrets that remove masks to the neighbours, so that the sum survives nodes that leave."""
    question, state = _open_session(content, context)
    nodes, own = list(question["nodes"]), context.node_id
    publics = dict(zip(nodes, zip(question["masks"], question["seals"], strict=True), strict=True))
    mine = (masks.public_half(state["mask-key"]), masks.public_half(state["seal-key"]))
    keys = [key for pair in publics.values() for key in pair]
    distinct = len(nodes) > 1 and len(set(keys)) == 2 * len(nodes)
    _require(distinct, "keys are not one pair for each of several nodes")
    _require(publics.get(own) == mine, "the keys of this node are not its own")
    _require("seeds" not in state, "secrets are dealt once")
    seeds = [os.urandom(masks.SEED_BYTES) for _ in range(int(question["groups"]))]
    key_shares = masks.split(state["mask-key"], len(nodes))
    seed_shares = list(zip(*(masks.split(seed, len(nodes)) for seed in seeds), strict=True))
    others, letters = [], []
    for place, node in enumerate(nodes):
        if node == own:
            state |= {"holders": [own], "key-shares": [key_shares[place]]}
            state["seed-shares"] = [b"".join(seed_shares[place])]
            continue
        secret = masks.agree(state["seal-key"], publics[node][1])
        others.append(node)
        letters.append(masks.seal(secret, own, node, key_shares[place], seed_shares[place]))
    state |= {
        "nodes": nodes,
        "masks": list(question["masks"]),
        "seals": list(question["seals"]),
        "seeds": seeds,
    }
    context.state[SECURE] = ConfigRecord(state)
    commitments = [masks.commit(seed) for seed in seeds]
    return _answer(state["session"], nodes=others, letters=letters, commitments=commitments)


def mask_reply(
    content: RecordDict,
    context: Context,
    order: Order,
    reply: Reply,
    federation: Federation,
    reach: float,
) -> RecordDict:
    """Encode a reply under masks, for a sum; nothing else of it leaves this node."""
    question: Mapping[str, Any] = content.config_records.get(SECURE, {})
    _require(question, "the task does not belong to a sum")
    for name, change in reply.update.items():
        _require(bool(change.isfinite().all()), f"'{name}' is no longer finite")
        cut = int((change.abs() > reach).sum())
        if cut:
            log(WARNING, "%s entries of '%s' have changed by more than secagg-range = %g", cut, name, reach)
    weight = weigh(federation.method, reply.samples)
    scale = Scale(reach, int(question["devices"]), float(question["unit"]))
    fits = 0 < weight <= scale.unit and scale.devices >= 2
    _require(fits, "its weight does not fit into the sum")
    structure = federation.problem.model.structure
    groups = put_masks_on(content, context, encode(structure, reply.part, reply.update, weight, scale))
    return write_masked(order, reply, groups, hidden=federation.settings.splitting == "device")


def put_masks_on(content: RecordDict, context: Context, groups: Sequence[Words]) -> list[Words]:
    """Mask a vector: each group with a mask of this node's own, and with one for each neighbour."""
    question, state = _open_session(content, context)
    dealt = "seeds" in state and len(groups) == len(state["seeds"])
    _require(dealt, "secrets have not been dealt for this vector")
    # Two vectors under the same masks would show their difference.
    _require(len(state["holders"]) == 1, "a mask is used once")
    senders, own = list(question["nodes"]), context.node_id
    publics = dict(zip(state["nodes"], zip(state["masks"], state["seals"], strict=True), strict=True))
    known = len(set(senders) - {own}) == len(senders) and set(senders) <= set(publics)
    _require(known, "a letter is from an unknown node")
    _require(len(senders) + 1 >= masks.threshold(len(publics)), "too few neighbours are left")
    for sender, letter in zip(senders, question["letters"], strict=True):
        secret = masks.agree(state["seal-key"], publics[sender][1])
        key_share, seed_shares = masks.unseal(secret, sender, own, letter)
        state["holders"] = [*state["holders"], sender]
        state["key-shares"] = [*state["key-shares"], key_share]
        state["seed-shares"] = [*state["seed-shares"], seed_shares]
    secrets = {sender: masks.agree(state["mask-key"], publics[sender][0]) for sender in senders}
    masked = []
    for group, words in enumerate(groups):
        total = words + masks.mask(state["seeds"][group], group, len(words))
        for sender, secret in secrets.items():
            masks.apply_pair(total, secret, group, adds=own > sender)
        masked.append(total)
    context.state[SECURE] = ConfigRecord(state)
    return masked


def hand_out_shares(content: RecordDict, context: Context) -> RecordDict:
    """Give the shares that open the named groups: of the seeds of nodes in the sum, of the keys of nodes that left.

    A node never gives both for another, and gives shares for the same nodes in every group of one sum: both together
    would open a single vector.
    """
    question, state = _open_session(content, context)
    active, gone, groups = list(question["active"]), list(question["gone"]), list(question["groups"])
    holders = state.get("holders", [])
    _require(len({*active, *gone}) == len(active) + len(gone), "a node is named twice")
    known = {*active, *gone} <= set(holders) and context.node_id in active
    _require(known, "the nodes are not those of this sum")
    _require(len(active) >= masks.threshold(len(state["nodes"])), "too few neighbours are in the sum")
    before = sorted(state.get("active", active)), sorted(state.get("gone", gone))
    _require(before == (sorted(active), sorted(gone)), "this sum was opened for other nodes")
    place = {node: number for number, node in enumerate(holders)}
    count = len(state["seeds"])
    _require(set(groups) <= set(range(count)), "there is no such group")

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
    """The server's record and what this node remembers, where both are about the same sum."""
    _require(SECURE in content.config_records, "the task does not belong to a secure sum")
    question: Mapping[str, Any] = content.config_records[SECURE]
    state: dict[str, Any] = dict(context.state.config_records.get(SECURE, {}))
    _require(state.get("session") == question["session"], "it belongs to another sum")
    return question, state


def _answer(session: str, **values: Any) -> RecordDict:
    return RecordDict({SECURE: ConfigRecord({"session": session, **values})})


def _require(holds: object, reason: str) -> None:
    if not holds:
        raise SettingError(f"secure aggregation is refused by this node: {reason}")
