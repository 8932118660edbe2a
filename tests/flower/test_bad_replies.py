"""What a node sends cannot touch the model before it has been looked at."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from bad_replies import GOOD, NODES, ROUNDS, RUN, kind, lie, spoil
from deployments import deploy, model_of, nodes_of
from flwr.app import Error, Message

from fedpmt import api
from fedpmt.flower import roster

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord

SHORT = {**RUN, "rounds": 1}


def of_bad_node(question: Message) -> bool:
    trains = question.metadata.message_type == "train"
    return trains and question.content.config_records["task"]["device"] != GOOD


def spoiled(question: Message, answer: Message) -> Message:
    if of_bad_node(question):
        spoil(question.content, answer.content)
    return answer


def silent(question: Message, answer: Message) -> Message | None:
    return None if of_bad_node(question) else answer


def digest(run: RunRecord) -> str:
    assert run.result is not None
    return run.result.weights_sha256


def test_each_bad_reply_is_refused_and_its_round_completes_without_it(tmp_path: Path) -> None:
    settings = {**RUN, "rounds": ROUNDS, "eval_every": ROUNDS}
    deployed, _ = deploy(tmp_path / "bad", settings, spoiled)
    for step in deployed.rounds:
        assert [one.outcome for one in step.devices] == ["arrived", "refused", "refused", "refused"]
        for one in step.devices[1:]:
            assert kind(one.device, step.round - 1)[1] in one.reason, (step.round, one)
            assert len(one.reason) <= 300
            assert one.reason.isprintable()
            assert one.bytes_up == 0
    without, _ = deploy(tmp_path / "without", settings, silent)
    assert digest(deployed) == digest(without)
    assert [step.layers for step in deployed.rounds] == [step.layers for step in without.rounds]


TEN: dict[str, Any] = {**RUN, "devices": 10, "cohort": 10, "levels": "1/2,1", "rounds": 3, "eval_every": 3}


@pytest.mark.slow
def test_false_replies_within_the_limit_move_the_mean_and_not_the_median(tmp_path: Path) -> None:
    found: dict[str, float] = {}
    for mean in ("plain", "median", "trimmed:0.2"):
        simulated = api.run(out=tmp_path / mean / "simulated", **TEN, mean=mean)
        honest, _ = deploy(tmp_path / mean / "honest", {**TEN, "mean": mean})
        assert digest(honest) == digest(simulated)
        false, _ = deploy(tmp_path / mean / "false", {**TEN, "mean": mean}, lie(-30))
        assert {one.outcome for step in false.rounds for one in step.devices} == {"arrived"}
        ours, theirs = model_of(tmp_path / mean / "false"), model_of(tmp_path / mean / "honest")
        found[mean] = max(float((ours[name] - theirs[name]).norm()) for name in theirs)
    assert found["plain"] > 10 * found["median"], found
    assert found["plain"] > 10 * found["trimmed:0.2"], found


def test_a_lost_reply_is_late_and_known(tmp_path: Path) -> None:
    (step,) = deploy(tmp_path, {**SHORT, "deadline": 500.0}, silent)[0].rounds
    assert [one.outcome for one in step.devices] == ["arrived", "late", "late", "late"]
    assert {one.reason for one in step.devices[1:]} == {"no reply within 500 seconds"}


def test_a_message_whose_time_is_over_is_late_too(tmp_path: Path) -> None:
    def expired(question: Message, answer: Message) -> Message:
        return Message(Error(4, "has expired"), reply_to=question) if of_bad_node(question) else answer

    (step,) = deploy(tmp_path, {**SHORT, "deadline": 500.0}, expired)[0].rounds
    assert [one.outcome for one in step.devices] == ["arrived", "late", "late", "late"]


def test_an_error_on_a_node_is_its_own(tmp_path: Path) -> None:
    def failing(question: Message, answer: Message) -> Message:
        return Message(Error(2, "out of memory"), reply_to=question) if of_bad_node(question) else answer

    (step,) = deploy(tmp_path, SHORT, failing)[0].rounds
    assert [one.outcome for one in step.devices] == ["arrived", "failed", "failed", "failed"]
    assert step.devices[1].reason == "error 2: out of memory"


def test_another_node_cannot_answer_for_a_device(tmp_path: Path) -> None:
    def posing(question: Message, answer: Message) -> Message:
        if of_bad_node(question):
            answer.metadata.__dict__["_src_node_id"] = 5
        return answer

    (step,) = deploy(tmp_path, SHORT, posing)[0].rounds
    assert [one.outcome for one in step.devices] == ["arrived", "refused", "refused", "refused"]
    assert step.devices[1].reason == "node 5 answered for it"


def test_a_round_without_any_reply_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    def lost(question: Message, answer: Message) -> Message | None:
        return None if question.metadata.message_type == "train" else answer

    deployed, _ = deploy(tmp_path, {**RUN, "rounds": 2}, lost)
    still = api.run(**{**SHORT, "lr": 0.0}, out=tmp_path / "still")
    assert digest(deployed) == digest(still)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"device": 3, "samples": 20}, "partition-id = 3 is not one of 3 devices"),
        ({"device": -1, "samples": 20}, "partition-id = -1"),
        ({"device": True, "samples": 20}, "is not a whole number"),
        ({"device": 0, "samples": 0}, "it claims 0 samples"),
        ({"device": 0, "samples": 201}, "1 to 200 are allowed"),
        ({"device": 0, "samples": 3, "labels": [1, 1]}, "add up to 3"),
        ({"device": 0, "samples": 3, "labels": [4, -1]}, "add up to 3"),
        ({"device": 0, "samples": 20, "speed": 0.0}, "speed = '0.0' is not a positive number"),
        ({"device": 0, "samples": 20, "speed": math.inf}, "is not a positive number"),
        ({"device": 0, "samples": 20, "memory-bytes": "much"}, "is not a positive number"),
    ],
)
def test_a_node_that_describes_itself_wrongly_is_not_taken(words: dict[str, Any], reason: str) -> None:
    limits = roster.Limits(devices=3, samples=200, classes=2, labels=True)
    with pytest.raises(ValueError, match=reason):
        roster.parse_node(17, words, limits)


def test_labels_are_told_only_to_a_method_that_needs_them(tmp_path: Path) -> None:
    for method, told in (("fedpmt", False), ("heterofl", True)):
        _, grid = deploy(tmp_path / method, {**SHORT, "method": method})
        words = [one.reply.config_records["node"] for one in grid.traffic if one.kind == "query"]
        assert [("labels" in one) for one in words] == [told] * NODES


def test_a_node_that_cannot_say_who_it_is_is_asked_once(tmp_path: Path) -> None:
    asked = []

    def confused(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "query":
            asked.append(question.metadata.dst_node_id)
            if answer.content.config_records["node"]["device"] == 1:
                return Message(Error(2, "no partition-id"), reply_to=question)
        return answer

    deployed, _ = deploy(tmp_path, {**RUN, "rounds": 2}, confused)
    assert [[one.device for one in step.devices] for step in deployed.rounds] == [[0, 2, 3], [0, 2, 3]]
    assert sorted(asked) == sorted(nodes_of(NODES))


def test_nodes_that_are_not_there_are_not_drawn(tmp_path: Path) -> None:
    nodes = {node: config for node, config in nodes_of(NODES).items() if config["partition-id"] != 1}
    deployed, _ = deploy(tmp_path, {**RUN, "rounds": 2}, nodes=nodes)
    assert [[one.device for one in step.devices] for step in deployed.rounds] == [[0, 2, 3], [0, 2, 3]]


def test_a_node_that_was_started_anew_with_other_data_is_heard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "ANSWER_SECONDS", 1e-9)
    trained: list[str] = []

    def restarted(question: Message, answer: Message) -> Message:
        kind = question.metadata.message_type
        record = answer.content.config_records["reply" if kind == "train" else "node"]
        if record["device"] == 1 and (kind == "train" or trained):
            trained.append(kind)
            record["samples"] = 30
        return answer

    first, second = deploy(tmp_path, {**RUN, "rounds": 2}, restarted)[0].rounds
    assert [one.outcome for one in first.devices] == ["arrived", "refused", "arrived", "arrived"]
    assert first.devices[1].reason == "it trained on 30 samples, not 20"
    assert [one.outcome for one in second.devices] == ["arrived"] * 4
    assert second.devices[1].samples == 30
