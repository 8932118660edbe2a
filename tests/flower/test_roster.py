"""Which node is which device, and numbers that nodes state: none moves the server's state without bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from deployments import BITS, RUN_ID, SERVER, InProcessGrid, deploy, nodes_of
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedpmt.flower import roster as module
from fedpmt.flower.roster import AGAIN_SECONDS, ANSWER_SECONDS, Limits, Roster
from fedpmt.methods.fedgen import COUNTS
from fedpmt.methods.prunefl import SQUARES
from fedpmt.methods.scaffold import CONTROL, Controlled
from fedpmt.training.local import LocalSettings, Reach
from fedpmt.training.messages import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from flwr.app import Context


class Clock:
    """Time as the test tells it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Asked(InProcessGrid):
    """Nodes that say who they are by a table; None stays silent, and a text is an error."""

    def __init__(self, words: dict[int, Any]) -> None:
        super().__init__(client_of(words), {}, {node: {} for node in words}, self.silence)
        self.words = words
        self.questions: list[int] = []

    def silence(self, question: Message, answer: Message) -> Message | None:
        node = question.metadata.dst_node_id
        self.questions.append(node)
        assert question.metadata.ttl == ANSWER_SECONDS
        if isinstance(self.words[node], str):
            return Message(Error(2, self.words[node]), reply_to=question)
        return None if self.words[node] is None else answer


def client_of(words: dict[int, Any]) -> Any:
    def answer(message: Message, context: Context) -> Message:
        said = words[context.node_id]
        return Message(RecordDict({"node": ConfigRecord(said or {})}), reply_to=message)

    return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, SERVER, RUN_ID
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def of(device: int, samples: int = 20) -> dict[str, Any]:
    return {"device": device, "samples": samples}


def begun() -> Roster:
    return Roster(Limits(devices=4, samples=200, classes=None, labels=False))


def asked_over(grid: Asked, roster: Roster, clock: Clock, seconds: float, step: float = 30.0) -> list[float]:
    """When node 12 is asked, with a look at the grid every so often."""
    times = []
    end = clock.now + seconds
    while clock.now < end:
        before = grid.questions.count(12)
        roster.refresh(grid)
        times += [clock.now] * (grid.questions.count(12) - before)
        clock.now += step
    return times


def test_a_silent_node_is_asked_less_and_less_often(clock: Clock) -> None:
    grid, roster = Asked({11: of(0), 12: None}), begun()
    times = asked_over(grid, roster, clock, 3000.0)
    assert times == [0.0, 30.0, 90.0, 270.0, 690.0, 1290.0, 1890.0, 2490.0]
    assert grid.questions.count(11) == 1
    grid.words[12] = of(1)
    clock.now += AGAIN_SECONDS
    roster.refresh(grid)
    assert roster.online() == [0, 1]


def test_a_node_that_could_not_say_who_it_is_gets_another_chance(clock: Clock) -> None:
    grid, roster = Asked({12: "no data yet"}), begun()
    assert asked_over(grid, roster, clock, 1500.0) == [0.0, AGAIN_SECONDS, 2 * AGAIN_SECONDS]
    grid.words[12] = of(1)
    clock.now += AGAIN_SECONDS
    roster.refresh(grid)
    assert roster.online() == [1]


@pytest.mark.parametrize("words", [{}, {"device": 0}, {"device": "0", "samples": 2}, of(0, 10**9)])
def test_words_that_make_no_sense_are_refused_and_end_nothing(words: dict[str, Any], clock: Clock) -> None:
    grid, roster = Asked({11: of(0), 12: words}), begun()
    roster.refresh(grid)
    assert roster.online() == [0]


def test_a_node_is_one_device(clock: Clock) -> None:
    """It was started anew with another partition id, faster than Flower found it gone."""
    grid, roster = Asked({11: of(0), 12: of(1)}), begun()
    roster.refresh(grid)
    grid.words[12] = of(2)
    roster.doubt(1)
    clock.now += ANSWER_SECONDS
    roster.refresh(grid)
    assert roster.online() == [0, 2]
    assert not roster.knows(1)


def test_a_node_that_went_wrong_is_asked_again_and_not_all_the_time(clock: Clock) -> None:
    """It was started anew with more samples: its replies are refused until it has said so."""
    grid, roster = Asked({12: of(1)}), begun()
    roster.refresh(grid)
    grid.words[12] = of(1, 30)
    roster.doubt(1)
    roster.refresh(grid)
    assert roster.of(1).samples == 20  # it has only just been asked
    clock.now += ANSWER_SECONDS
    roster.refresh(grid)
    assert roster.of(1).samples == 30
    assert asked_over(grid, roster, clock, 3000.0) == []


def test_a_resume_waits_for_the_devices_that_it_began_with(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, roster = Asked({11: of(0), 12: of(1)}), begun()

    def later(seconds: float) -> None:
        clock.now += seconds
        grid.words[13], grid.nodes[13], grid.states[13] = of(3), {}, grid.states[11]

    monkeypatch.setattr(clock, "sleep", later, raising=False)
    roster.wait(grid, 2, 100.0)
    assert roster.online() == [0, 1]
    roster.wait(grid, 2, 100.0, devices=(0, 3))
    assert roster.online() == [0, 1, 3]


@pytest.mark.parametrize("speed", [5e-324, 1e300])
def test_a_speed_that_no_clock_can_run_by_is_refused(speed: float) -> None:
    limits = Limits(devices=3, samples=200, classes=2, labels=False)
    with pytest.raises(ValueError, match="too far from 1"):
        module.parse_node(17, {**of(0), "speed": speed}, limits)


GIVEN: dict[str, Any] = {**BITS, "rounds": 2, "cohort": 4, "eval_every": 2}


def filling(group: str, value: float, device: int = 1) -> Callable[[Message, Message], Message]:
    """A node that sends nothing but this number in one group of its replies."""

    def tamper(question: Message, answer: Message) -> Message:
        if question.metadata.message_type != "train":
            return answer
        if question.content.config_records["task"]["device"] == device:
            arrays: Any = answer.content.array_records.get(group, {})
            for name in list(arrays):
                arrays[name] = Array(np.full(arrays[name].shape, value, np.float32))
        return answer

    return tamper


@pytest.mark.parametrize(
    ("method", "group", "options"),
    [
        ("scaffold", CONTROL, {"option": "II"}),
        ("scaffold", CONTROL, {"option": "I"}),
        ("prunefl", SQUARES, {"interval": 1, "initial_rounds": 0}),
        ("fedgen", COUNTS, {}),
    ],
)
def test_what_travels_beside_the_weights_has_a_limit_too(
    method: str, group: str, options: dict[str, Any], tmp_path: Path
) -> None:
    given = {**GIVEN, "method": method, "options": options}
    honest, _ = deploy(tmp_path / "honest", given)
    assert {one.outcome for step in honest.rounds for one in step.devices} == {"arrived"}
    run, grid = deploy(tmp_path / "bad", given, filling(group, 1e18))
    for step in run.rounds:
        assert [one.outcome for one in step.devices] == ["arrived", "refused", "arrived", "arrived"]
        assert step.devices[1].reason.startswith(f"its {group} has norm ")
    sent: list[Any] = [
        one.question.array_records.get(CONTROL, {}) for one in grid.traffic if one.kind == "train"
    ]
    assert all(abs(array.numpy()).max() < 100 for arrays in sent for array in arrays.values())


def test_the_limit_of_a_control_variate_by_hand() -> None:
    """‖w_k - w‖ <= 10, two steps of 0.5, ‖c‖ = 3: 10 / (2 · 0.5) + 3. Option I: two gradients of at most 10 / 0.5."""
    task = Task((), {CONTROL: {"a": torch.tensor([3.0, 0.0])}})
    reach = Reach(10.0, LocalSettings(epochs=1, batch=5, learning_rate=0.5), steps=2, samples=10, rounds=1)
    assert Controlled("II").bounds(task, reach) == {CONTROL: 13.0}
    assert Controlled("I").bounds(task, reach) == {CONTROL: 40.0}
    assert Controlled("none").bounds(task, reach) == {CONTROL: 0.0}


class Joining(InProcessGrid):
    """The last node comes when a round has been played."""

    def get_node_ids(self) -> Iterable[int]:
        played = any(one.kind == "train" for one in self.traffic)
        return list(self.nodes)[: None if played else -1]


def test_a_level_keeps_its_depth_whatever_speeds_nodes_state(tmp_path: Path) -> None:
    """A node with a speed of its own is no level of its own: there are as many depths as there were."""
    given = {**GIVEN, "assign": "level", "devices": 5, "cohort": 5}
    nodes = nodes_of(5)
    nodes[max(nodes, key=lambda node: nodes[node]["partition-id"])]["speed"] = 0.9
    run, _ = deploy(tmp_path, given, nodes=nodes, kind=Joining, min_nodes=4)
    first, second = ([(one.device, one.level, one.part) for one in step.devices] for step in run.rounds)
    assert first == [(level - 1, level, f"depth {level}") for level in (1, 2, 3, 4)]
    assert second == [*first, (4, 1, "depth 1")]
    assert run.rounds[1].devices[4].speed == 0.9


def test_energy_is_of_the_seconds_that_a_device_measured(tmp_path: Path) -> None:
    """Watts stay with their device, though it states a speed of its own."""
    fleet = "speed,count,watts_computing\n1,2,4\n1,2,2\n"
    nodes = nodes_of(4)
    next(one for one in nodes.values() if one["partition-id"] == 3)["speed"] = 0.5
    run, _ = deploy(tmp_path, {**GIVEN, "devices": 4, "cohort": 4, "rounds": 1, "fleet": fleet}, nodes=nodes)
    for one in run.rounds[0].devices:
        assert one.joules == pytest.approx((4, 4, 2, 2)[one.device] * one.seconds)
    assert run.rounds[0].joules == pytest.approx(sum(one.joules or 0.0 for one in run.rounds[0].devices))


@pytest.mark.parametrize("seconds", [1e-300, 1e9, 5e-324])
@pytest.mark.parametrize("deadline", [None, 50.0])
def test_no_time_that_a_node_reports_stops_the_planner(
    seconds: float, deadline: float | None, tmp_path: Path
) -> None:
    def lying(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train":
            said = answer.content.config_records["reply"]
            said["seconds"] = seconds if said["device"] == 0 else 1.0
        return answer

    given = {**GIVEN, "rounds": 3, "eval_every": 3, "speeds": "measured", "speed_weight": 1.0}
    given |= {} if deadline is None else {"deadline": deadline}
    run, _ = deploy(tmp_path, given, lying)
    assert {one.outcome for step in run.rounds for one in step.devices} == {"arrived"}
    slow, others = run.rounds[-1].devices[0], run.rounds[-1].devices[1:]
    assert slow.part == ("depth 1" if seconds > 1 else "depth 4")
    assert {one.part for one in others} == {"depth 4"}
