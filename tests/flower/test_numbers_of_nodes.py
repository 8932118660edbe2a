"""Numbers that nodes state: none of them moves the server's state without bound, or stops the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from flwr.app import Array
from in_process import BITS, InProcessGrid, deploy, nodes_of

from fedpmt.methods.fedgen import COUNTS
from fedpmt.methods.prunefl import SQUARES
from fedpmt.methods.scaffold import CONTROL, Controlled
from fedpmt.training.local import LocalSettings, Reach
from fedpmt.training.messages import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from flwr.app import Message

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
