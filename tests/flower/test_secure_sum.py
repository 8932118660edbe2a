"""The secure sum by itself: exact for those who stay, shut for whoever is left with too little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import RUN_ID, SERVER, InProcessGrid

from fedpmt.flower.factory import SECURE_ANSWERS, _handle
from fedpmt.flower.secure import masks
from fedpmt.flower.secure.layer_vector import Scale
from fedpmt.flower.secure.node import SECURE, hand_out_shares, put_masks_on
from fedpmt.flower.secure.sums import SecureSum
from fedpmt.flower.strategy import SumError
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

SIZES = (3, 5, 0, 2)


def vector_of(node: int) -> list[np.ndarray]:
    rng = np.random.default_rng(node)
    return [rng.integers(0, 2**32, size, dtype=np.uint32) for size in SIZES]


def grid_of(
    nodes: Collection[int], tamper: Callable[[Message, Message], Message | None] | None = None
) -> InProcessGrid:
    """Nodes that only answer what a secure sum asks."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, SERVER, RUN_ID
    client = ClientApp()
    for action, answer in SECURE_ANSWERS.items():
        client.train(action)(_handle(answer))

    @client.train()
    def train(message: Message, context: Context) -> Message:
        masked = put_masks_on(message.content, context, vector_of(context.node_id))
        arrays = ArrayRecord({str(group): Array(words) for group, words in enumerate(masked)})
        return Message(RecordDict({"masked": arrays}), reply_to=message)

    return InProcessGrid(client, {}, {node: {} for node in nodes}, tamper)


def leaving(stages: dict[int, str]) -> Callable[[Message, Message], Message | None]:
    """Nodes that do not answer any more from a stage on."""
    order = ["train.keys", "train.shares", "train", "train.open"]

    def lost(question: Message, answer: Message) -> Message | None:
        stage = stages.get(question.metadata.dst_node_id)
        kind = question.metadata.message_type
        return None if stage is not None and order.index(kind) >= order.index(stage) else answer

    return lost


def summed(grid: InProcessGrid) -> SecureSum:
    """A sum to which everybody that is still there has added its vector."""
    secure = SecureSum(SIZES)
    secure.gather(grid, grid.nodes, lambda: 5.0)
    tasks = [
        Message(secure.letters(node), dst_node_id=node, message_type="train")
        for node in sorted(secure.members)
    ]
    for reply in grid.send_and_receive(tasks):
        if not reply.has_error():
            arrays = reply.content.array_records["masked"]
            words = [arrays[str(group)].numpy() for group in range(len(SIZES))]
            secure.add(reply.metadata.src_node_id, words)
    return secure


@given(
    st.sets(st.integers(1, 2**64 - 1), min_size=2, max_size=7),
    st.data(),
)
@settings(max_examples=20)
def test_what_is_opened_is_the_sum_of_those_who_sent_a_vector(nodes: set[int], data: Any) -> None:
    """Whoever leaves, wherever: the sum is exact, or it is not opened. With few neighbours and with many."""
    order = sorted(nodes)
    stages = st.sampled_from(["train.keys", "train.shares", "train", "train.open", None, None, None])
    gone = {node: stage for node in order if (stage := data.draw(stages)) is not None}
    groups = data.draw(st.sets(st.integers(0, len(SIZES) - 1), min_size=1).map(sorted))
    grid = grid_of(order, leaving(gone))
    with mock.patch.object(masks, "NEIGHBOURS", data.draw(st.sampled_from([2, 4, 40]))):
        secure = summed(grid)
        there = [node for node in order if gone.get(node) in (None, "train.open")]
        try:
            opened = secure.open(grid, groups, 5.0)
        except SumError:
            assert gone
            return
    sums = [sum(words) for words in zip(*map(vector_of, there), strict=True)]
    assert set(opened) == set(groups)
    for group in groups:
        assert np.array_equal(opened[group], np.asarray(sums[group]).astype(np.uint32))


def test_one_of_four_may_leave_at_any_time_and_two_of_four_may_not() -> None:
    nodes = [11, 22, 33, 44]
    for stage in ("train.keys", "train.shares", "train", "train.open"):
        grid = grid_of(nodes, leaving({22: stage}))
        opened = summed(grid).open(grid, [1], 5.0)
        others = [node for node in nodes if node != 22 or stage == "train.open"]
        assert np.array_equal(opened[1], sum(vector_of(node)[1] for node in others))
    grid = grid_of(nodes, leaving({22: "train", 44: "train"}))
    with pytest.raises(SumError, match=r"2 of 4 nodes that hold node \d+'s secrets are left, 3 are needed"):
        summed(grid).open(grid, [1], 5.0)


def test_a_masked_vector_tells_nothing_and_a_group_that_is_not_opened_stays_shut() -> None:
    grid = grid_of([1, 2, 3])
    secure = summed(grid)
    first = [one.reply for one in grid.traffic if one.kind == "train"]
    secure.open(grid, [1], 5.0)
    opening = [one.question for one in grid.traffic if one.kind == "train.open"]
    assert [one.config_records[SECURE]["groups"] for one in opening] == [[1]] * 3
    for reply, node in zip(first, (3, 2, 1), strict=True):
        assert not np.array_equal(reply.array_records["masked"]["1"].numpy(), vector_of(node)[1])
    # The other groups of the sum are still under everybody's own mask.
    true = sum(vector_of(node)[3] for node in (1, 2, 3))
    assert not np.array_equal(secure._totals[3], true)


def test_masks_are_told_apart_by_secret_and_group_and_fill_all_bits() -> None:
    words = masks.mask(b"secret", 0, 50_000)
    assert np.array_equal(words, masks.mask(b"secret", 0, 50_000))
    for other in (masks.mask(b"secret", 1, 50_000), masks.mask(b"Secret", 0, 50_000)):
        assert (words == other).mean() < 1e-3
    ones = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 4 * 0.5 / np.sqrt(32 * 50_000)


def test_a_share_that_is_not_right_is_found_out() -> None:
    def wrong(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train.open" and question.metadata.dst_node_id == 1:
            said: dict[str, Any] = {**answer.content.config_records[SECURE]}
            seeds = [share[:4] + bytes(len(share) - 4) for share in said["seeds"]]
            answer.content[SECURE] = ConfigRecord({**said, "seeds": seeds})
        return answer

    grid = grid_of([1, 2, 3], wrong)
    with pytest.raises(SumError, match="do not fit together"):
        summed(grid).open(grid, [1], 5.0)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("train.keys", {"mask": b"key"}, "its keys are not keys"),
        ("train.keys", {"session": "other"}, "its answer belongs to another sum"),
        ("train.shares", {"nodes": [5, 6, 7]}, "its letters are not for its neighbours"),
        ("train.shares", {"letters": [b"one"]}, "its letters are not 3 short pieces of bytes"),
        ("train.shares", {"letters": [bytes(10**6)] * 3}, "its letters are not 3 short pieces of bytes"),
        ("train.shares", {"commitments": []}, "its commitments are not 4 short pieces of bytes"),
    ],
)
def test_a_node_that_answers_wrongly_is_left_out(kind: str, changes: dict[str, Any], reason: str) -> None:
    def wrong(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == kind and question.metadata.dst_node_id == 2:
            said = answer.content.config_records[SECURE]
            answer.content[SECURE] = ConfigRecord({**said, **changes})
        return answer

    grid = grid_of([1, 2, 3, 4], wrong)
    secure = summed(grid)
    assert secure.missing == {2: ("refused", reason)}
    assert np.array_equal(secure.open(grid, [1], 5.0)[1], sum(vector_of(node)[1] for node in (1, 3, 4)))


def test_an_error_of_a_node_is_its_own() -> None:
    def failing(question: Message, answer: Message) -> Message:
        bad = question.metadata.message_type == "train.keys" and question.metadata.dst_node_id == 2
        return Message(Error(2, "out of memory"), reply_to=question) if bad else answer

    secure = summed(grid_of([1, 2, 3, 4], failing))
    assert secure.missing == {2: ("failed", "error 2: out of memory")}
    assert secure.members == {1, 3, 4}


def said_elsewhere(question: Message, answer: Message) -> Message:
    """The name is right, and what it names is a record of another kind."""
    answer.content[SECURE] = MetricRecord({})
    return answer


@pytest.mark.parametrize("kind", ["train.keys", "train.shares", "train.open"])
def test_an_answer_that_cannot_be_read_ends_nothing(kind: str) -> None:
    def wrong(question: Message, answer: Message) -> Message:
        bad = question.metadata.message_type == kind and question.metadata.dst_node_id == 2
        return said_elsewhere(question, answer) if bad else answer

    grid = grid_of([1, 2, 3, 4], wrong)
    secure = summed(grid)
    opened = secure.open(grid, [1], 5.0)[1]
    there = (1, 2, 3, 4) if kind == "train.open" else (1, 3, 4)
    assert np.array_equal(opened, sum(vector_of(node)[1] for node in there))
    lost = {} if kind == "train.open" else {2: ("refused", "its answer cannot be read: KeyError: 'secagg'")}
    assert secure.missing == lost


def test_shares_of_something_that_is_no_key_are_found_out() -> None:
    """Those who are left make up shares of a key under a password: reading it is an error of another kind."""
    password = serialization.BestAvailableEncryption(b"word")
    key = ec.generate_private_key(ec.SECP384R1())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    shares = dict(zip((1, 2, 3, 4), masks.split(key.private_bytes(*form, password), 4), strict=True))

    def wrong(question: Message, answer: Message) -> Message | None:
        node, kind = question.metadata.dst_node_id, question.metadata.message_type
        if kind == "train" and node == 2:
            return None
        if kind == "train.open":
            said = answer.content.config_records[SECURE]
            answer.content[SECURE] = ConfigRecord({**said, "keys": [shares[node]]})
        return answer

    grid = grid_of([1, 2, 3, 4], wrong)
    with pytest.raises(SumError, match="the shares of node 2's key do not fit together"):
        summed(grid).open(grid, [1], 5.0)


def asked_again(said: dict[str, Any], *, opened: bool = True) -> tuple[RecordDict, Context]:
    """A node of four in the middle of a sum, and one more question to it."""
    grid = grid_of([1, 2, 3, 4])
    secure = summed(grid)
    if opened:
        secure.open(grid, [1], 5.0)
    content = RecordDict({SECURE: ConfigRecord({"session": secure.session, **said})})
    return content, Context(RUN_ID, 1, {}, grid.states[1], {})


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"active": [1, 2, 3, 4], "gone": [2], "groups": [1]}, "a node is named twice"),
        ({"active": [1, 2, 3], "gone": [4], "groups": [1]}, "opened for other nodes"),
        ({"active": [2, 3, 4], "gone": [1], "groups": [1]}, "not those of this sum"),
        ({"active": [1, 2, 3, 9], "gone": [], "groups": [1]}, "not those of this sum"),
        ({"active": [1, 2], "gone": [3, 4], "groups": [1]}, "too few neighbours are in the sum"),
        ({"active": [1, 2, 3, 4], "gone": [], "groups": [4]}, "there is no such group"),
        ({"active": [1, 2, 3, 4], "gone": [], "groups": [1], "session": "x"}, "it belongs to another sum"),
    ],
)
def test_a_node_does_not_help_to_open_one_vector(said: dict[str, Any], reason: str) -> None:
    content, context = asked_again(said)
    with pytest.raises(SettingError, match=reason):
        hand_out_shares(content, context)


def test_a_node_masks_one_vector_and_no_second_one() -> None:
    content, context = asked_again({"nodes": [2, 3, 4], "letters": [b"", b"", b""]}, opened=False)
    with pytest.raises(SettingError, match="a mask is used once"):
        put_masks_on(content, context, vector_of(1))


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.lists(st.floats(-4, 4), min_size=3, max_size=3)),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=100)
def test_the_mean_is_off_by_no_more_than_the_stated_bound(devices: list[tuple[int, list[float]]]) -> None:
    scale = Scale(reach=4.0, devices=len(devices), unit=float(max(weight for weight, _ in devices)))
    total = np.zeros(3, np.uint32)
    for weight, update in devices:
        total += scale.encode(np.array(update), weight)
    weights = np.array([weight for weight, _ in devices])
    true = weights @ np.array([update for _, update in devices]) / weights.sum()
    bound = scale.error(len(devices), float(weights.sum()))
    assert np.abs(scale.mean(total, float(weights.sum())) - true).max() <= bound * (1 + 1e-6)


def test_the_bound_by_hand() -> None:
    """Q = ⌊(2³¹ - 1) / 4⌋ = 536870911; four equal weights: 4 · 8 / (2 Q) / 4 = 7.45e-9."""
    scale = Scale(reach=8.0, devices=4, unit=20.0)
    assert scale.levels == 536870911
    assert scale.error(4, 80.0) == pytest.approx(7.4506e-9, rel=1e-4)
    assert scale.error(2, 40.0) == scale.error(4, 80.0)
    assert scale.error(4, 40.0) == 2 * scale.error(4, 80.0)  # three light devices beside a heavy one


def test_what_is_out_of_reach_is_cut_and_does_not_wrap_around() -> None:
    scale = Scale(reach=1.0, devices=2, unit=1.0)
    total = scale.encode(np.array([5.0, -5.0]), 1) + scale.encode(np.array([1.0, -9.0]), 1)
    assert scale.mean(total, 2.0) == pytest.approx([1.0, -1.0])
