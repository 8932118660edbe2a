"""Which node is which device, when nodes are silent, confused, or started anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from in_process import RUN, SERVER, InProcessGrid

from fedpmt.flower import roster as module
from fedpmt.flower.roster import AGAIN_SECONDS, ANSWER_SECONDS, Limits, Roster

if TYPE_CHECKING:
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
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SERVER, RUN
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
