"""Without rounds: nodes that answer in any order, and the simulator that plays the same order once more."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from bad_replies import LIARS, lie
from deployments import BITS, READ_ONCE, ScrambledGrid, deploy, digest, nodes_of
from flwr.app import Error, Message, RecordDict

from fedpmt.cli.deploy import _tables
from fedpmt.cli.main import program
from fedpmt.data.sets import embedded
from fedpmt.flower import answers, events, replay
from fedpmt.records import CHECKPOINT, RESULT, ROUNDS, read_run
from fedpmt.simulation.checkpoint import read_value
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from fedpmt.records import DeviceRecord, RunRecord

GIVEN: dict[str, Any] = {
    **BITS,
    "method": "fedpmt",
    "devices": 6,
    "cohort": 4,
    "clock": "events",
    "buffer": 2,
    "rounds": 6,
    "eval_every": 6,
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(embedded, "_table", READ_ONCE)


class KilledError(BaseException):
    """As `kill -9` ends a process, as far as one can be in it."""


def replies(run: RunRecord) -> list[DeviceRecord]:
    return [one for step in run.rounds for one in step.devices]


def replayed(folder: Path) -> str:
    return digest(replay(folder / "run", folder / "replayed"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "fedbuff", "server_optimizer": "adam", "server_lr": 0.02, "executor": "auto"},
        {"method": "fedasync"},
        {"splitting": "device", "speeds": "stated"},
        {"speeds": "measured", "deadline": 1000.0, "full_seconds": 1000.0},
        {"method": "heterofl", "mean": "median", "buffer": 3},
        {"method": "depthfl"},
        {"method": "fedepth", "budget": "memory=0.9"},
        {"method": "fjord", "options": {"sizes": 3}},
        {"method": "slimfl", "options": {"noise": 0.5}},
        {"method": "fedmp", "options": {"bandit": False}},
    ],
    ids=[
        "fedpmt",
        "fedbuff",
        "fedasync",
        "option II",
        "measured",
        "median",
        "depthfl",
        "fedepth",
        "fjord",
        "slimfl",
        "fedmp",
    ],
)
def test_the_simulator_plays_the_recorded_order_to_the_same_bits(
    given: dict[str, Any], tmp_path: Path
) -> None:
    run, grid = deploy(tmp_path, {**GIVEN, **given}, kind=ScrambledGrid)
    buffer = run.settings["buffer"]
    for step in run.rounds:
        assert sum(one.outcome == "arrived" for one in step.devices) == buffer
        assert all(one.staleness == step.round - 1 - (one.version or 0) for one in step.devices)
    assert max(one.staleness or 0 for one in replies(run)) >= 1
    assert buffer == 1 or max(one.turn for one in replies(run)) >= 1
    assert len({(one.version, one.turn, one.device) for one in replies(run)}) == len(replies(run))
    assert len({one.digest for one in replies(run)}) == len(replies(run))
    # Nobody is waited for: at any time as many are at work as there are places.
    trained = sum(one.kind == "train" for one in grid.traffic)
    assert len(replies(run)) <= trained <= len(replies(run)) + run.settings["concurrency"]
    assert replayed(tmp_path) == digest(run)


def test_another_order_of_arrivals_is_another_model_and_a_reply_that_differs_is_named(tmp_path: Path) -> None:
    """Two replies change places: staleness is 1 where it was 0, and the other way round."""
    run, _ = deploy(tmp_path, GIVEN, kind=ScrambledGrid)
    path = tmp_path / "run" / ROUNDS
    step, one = next(
        (step, place) for step in run.rounds[1:] for place, one in enumerate(step.devices) if one.staleness
    )
    before = run.rounds[step.round - 2]
    here, there = list(step.devices), list(before.devices)
    here[one], there[0] = there[0], here[one]
    rounds = {
        before.round: before.model_copy(update={"devices": tuple(there)}),
        step.round: step.model_copy(update={"devices": tuple(here)}),
    }
    lines = [rounds.get(one.round, one).model_dump_json(exclude_defaults=True) for one in run.rounds]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SettingError, match=r"does not reply what it replied in server step \d"):
        replayed(tmp_path)
    path.write_text(path.read_text().replace('"digest"', '"unknown"'))
    assert digest(replay(tmp_path / "run", tmp_path / "other")) != digest(run)


class LateGrid(ScrambledGrid):
    """The last node comes when two tasks have been done, and device 1 dies then."""

    def get_node_ids(self) -> Iterable[int]:
        later = sum(one.kind == "train" for one in self.traffic) >= 2
        self.dead = {1} if later else ()
        nodes = {config["partition-id"]: node for node, config in self.nodes.items()}
        return [node for device, node in nodes.items() if device != (1 if later else 5)]


def test_a_node_that_dies_is_not_waited_for_and_one_that_comes_gets_work(tmp_path: Path) -> None:
    given = {**GIVEN, "concurrency": 6, "rounds": 8}
    speeds = {node: {**one, "speed": 1 / (1 + one["partition-id"])} for node, one in nodes_of(6).items()}
    run, _ = deploy(tmp_path, given, nodes=speeds, kind=LateGrid, min_nodes=5)
    lost = [one for one in replies(run) if one.outcome != "arrived"]
    assert [(one.device, one.outcome, one.reason) for one in lost] == [(1, "failed", "error 5: gone")]
    assert lost[0].staleness is None
    assert 5 in {one.device for one in replies(run)}
    assert all(sum(one.outcome == "arrived" for one in step.devices) == 2 for step in run.rounds)
    assert replayed(tmp_path) == digest(run)


def killed_after(tasks: int) -> Callable[[Message, Message], Message]:
    """The server is killed when this many tasks have been answered."""
    done = 0

    def tamper(question: Message, answer: Message) -> Message:
        nonlocal done
        done += question.metadata.message_type == "train"
        if done > tasks:
            raise KilledError
        return answer

    return tamper


def test_a_killed_server_goes_on_and_asks_those_anew_who_were_at_work(tmp_path: Path) -> None:
    given = {**GIVEN, "server_optimizer": "momentum", "server_lr": 0.3}
    with pytest.raises(KilledError):
        deploy(tmp_path, given, killed_after(7), kind=ScrambledGrid)
    saved = read_value(tmp_path / "run" / CHECKPOINT).progress
    assert saved.rounds >= 2
    assert saved.flights.devices
    assert not saved.flights.versions  # nobody needs them
    before = {flight.key for flight in saved.flights.devices}
    first = read_run(tmp_path / "run").rounds[: saved.rounds]
    run, _ = deploy(tmp_path, given, resume=True, kind=ScrambledGrid)
    assert run.rounds[: saved.rounds] == first
    assert len(run.rounds) == given["rounds"]
    after = {
        (one.version, one.turn, one.device) for step in run.rounds[saved.rounds :] for one in step.devices
    }
    assert not before & after
    assert min(version or 0 for version, _, _ in after) == saved.rounds
    assert replayed(tmp_path) == digest(run)


def test_timelyfl_steps_by_the_real_clock(tmp_path: Path) -> None:
    """Work is fitted to what is left of the interval without transport; a replay fits it to the same."""
    given = {**GIVEN, "method": "timelyfl", "buffer": None, "step_every": 0.3, "rounds": 4, "eval_every": 4}
    given |= {"full_seconds": 0.1, "levels": "1/4,1/2,1"}
    run, _ = deploy(tmp_path, given, kind=ScrambledGrid, transport_seconds=0.1)
    assert all(step.round_seconds >= 0.3 * (1 - 1e-9) for step in run.rounds)
    parts = {
        1: "depth 2",
        2: "depth 4",
        3: "depth 4, 2 epochs",
    }  # of 0.2 s: a full round takes 0.4, 0.2 and 0.1
    assert replies(run)
    assert all(one.part == parts[one.level] for one in replies(run))
    assert replayed(tmp_path) == digest(run)
    with pytest.raises(
        SettingError, match=r"step-every = 0.3 is refused: transport-seconds = 0.3 leaves nothing"
    ):
        deploy(tmp_path / "refused", given, kind=ScrambledGrid, transport_seconds=0.3)


def test_failing_and_false_replies_are_lost_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device's place is free again, and its node is asked who it is before long."""

    def tamper(question: Message, answer: Message) -> Message:
        if question.metadata.message_type != "train":
            return answer
        device = question.content.config_records["task"]["device"]
        if device == 2:
            return Message(Error(2, "battery is empty"), reply_to=question)
        if device == 3:
            answer.content.config_records["reply"]["samples"] = 99
        return answer

    run, _ = deploy(tmp_path, {**GIVEN, "cohort": 6}, tamper, kind=ScrambledGrid)
    found = {(one.device, one.outcome, one.reason) for one in replies(run) if one.outcome != "arrived"}
    assert found == {
        (2, "failed", "error 2: battery is empty"),
        (3, "refused", "it trained on 99 samples, not 20"),
    }
    _tables(run)
    lost = capsys.readouterr().err
    assert re.search(r"^step \d: device 2 failed: error 2: battery is empty$", lost, re.MULTILINE)
    assert "round" not in lost
    assert replayed(tmp_path) == digest(run)


LEARNS: dict[str, Any] = {
    **GIVEN,
    **{"method": "fedavg", "devices": 10, "cohort": 10, "buffer": 10, "levels": "1"},
    **{"samples": 200, "lr": 0.2, "partition": "iid", "executor": "auto"},
}
"""Ten devices that are always at work and, where all are honest, come to 70 % in six steps."""


def test_two_liars_of_ten_break_the_mean_and_neither_the_median_nor_a_trimmed_mean(tmp_path: Path) -> None:
    """They send minus ten times their update, within the norm limit, and reply up to three times of ten in a step."""
    found = {}
    for mean, tamper in (
        ("plain", None), ("plain", lie(-10)), ("median", lie(-10)), ("trimmed:0.3", lie(-10))
    ):  # fmt: skip
        name = f"{mean}, {'false' if tamper else 'honest'}"
        run, _ = deploy(tmp_path / name, {**LEARNS, "mean": mean}, tamper, kind=ScrambledGrid)
        assert {one.outcome for one in replies(run)} == {"arrived"}
        assert 1 <= max(sum(one.device in LIARS for one in step.devices) for step in run.rounds) <= 3
        assert run.result is not None
        found[name] = run.result.score or 0.0
    assert found["plain, false"] < 0.2, found
    assert min(score for name, score in found.items() if name != "plain, false") > 0.5, found


def test_answers_are_collected_in_time_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = mock.Mock()
    clock.monotonic.return_value = 100.0
    monkeypatch.setattr(answers, "time", clock)
    grid = mock.Mock()
    grid.push_messages.side_effect = [["first"], ["second"], [None], []]
    post: answers.Post[str] = answers.Post()
    questions = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in range(1, 5)]
    for subject, question in zip("abcd", questions, strict=True):
        post.send(grid, subject, question, seconds=30.0)
    assert post.subjects == set("abcd")
    grid.pull_messages.return_value = []
    returned = ("failed", "the SuperLink has not taken its message")
    assert post.collect(grid) == [("c", returned), ("d", returned)]
    questions[1].metadata.__dict__["_message_id"] = "second"
    grid.pull_messages.return_value = [Message(RecordDict(), reply_to=questions[1])]
    ((subject, answer),) = post.collect(grid)
    assert subject == "b"
    assert isinstance(answer, Message)
    grid.pull_messages.return_value = []
    clock.monotonic.return_value = 129.0
    assert post.collect(grid) == []
    clock.monotonic.return_value = 130.0
    assert post.collect(grid) == [("a", ("late", "no reply within 30 seconds"))]
    assert post.subjects == set()


def test_what_cannot_be_deployed_without_rounds_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {
        "--method scaffold --clock events": "clock = 'events' cannot be combined with scaffold: its devices keep",
        "--clock events --buffer 2 --secagg": "secagg needs clock = 'rounds'",
        "--buffer 2": "buffer = 2 needs clock = 'events'",
        "--clock events --failure 0.1": "failure = '0.1' is refused: only the simulator has it",
    }
    for flags, reason in refused.items():
        out = tmp_path / "here"
        assert program(["deploy", "--write-only", "--out", str(out), *flags.split()]) == 2
        said = capsys.readouterr().err
        assert reason in said
        assert said.count("\n") == 1
        assert not out.exists()


def test_the_command_replays_what_it_deployed_and_refuses_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = deploy(tmp_path, {**GIVEN, "rounds": 2, "eval_every": 2}, kind=ScrambledGrid)
    command = ["deploy", "--replay", "--out", str(tmp_path)]
    assert program([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_sha256"] == digest(run)
    assert program(command) == 0
    assert digest(run)[:20] in capsys.readouterr().out
    assert program([*command, "--rounds", "3"]) == 2
    assert "rounds = 3 cannot be combined with --replay" in capsys.readouterr().err
    deploy(tmp_path / "rounds", {**BITS, "rounds": 1, "eval_every": 1})
    assert program(["deploy", "--replay", "--out", str(tmp_path / "rounds")]) == 2
    assert "is not a deployment with clock = 'events'" in capsys.readouterr().err
    (tmp_path / "run" / RESULT).unlink()
    assert program(command) == 2
    assert "is not finished; continue it with --resume" in capsys.readouterr().err
