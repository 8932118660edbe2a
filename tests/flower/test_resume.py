"""A server that is killed and started again goes on as it began, and says so where it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from deployments import BITS, InProcessGrid, deploy, nodes_of

from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.flower.deployment import Deployment, begin, read_app, read_start
from fedpmt.training.privacy import epsilon
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from flwr.app import Message

GIVEN: dict[str, Any] = {**BITS, "devices": 3, "cohort": 3, "levels": "1", "rounds": 4, "eval_every": 4}


class KilledError(BaseException):
    """As `kill -9` ends a process, as far as one can be in it."""


def killed_in(round_index: int) -> Callable[[Message, Message], Message]:
    """Somebody has answered in that round when the server is killed."""

    def tamper(question: Message, answer: Message) -> Message:
        trains = question.metadata.message_type == "train"
        if trains and question.content.config_records["task"]["round"] == round_index:
            raise KilledError
        return answer

    return tamper


class Joining(InProcessGrid):
    """The last node, the slowest, comes when a round has been played."""

    def get_node_ids(self) -> Iterable[int]:
        played = any(one.kind == "train" for one in self.traffic)
        return list(self.nodes)[: None if played else -1]


def test_a_node_that_came_later_does_not_change_what_widths_are_fitted_to(tmp_path: Path) -> None:
    speeds = {
        node: {**config, "speed": (1.0, 0.5, 0.05)[config["partition-id"]]}
        for node, config in nodes_of(3).items()
    }
    whole, _ = deploy(tmp_path / "whole", GIVEN, nodes=speeds, kind=Joining, min_nodes=2)
    with pytest.raises(KilledError):
        deploy(tmp_path / "part", GIVEN, killed_in(2), nodes=speeds, kind=Joining, min_nodes=2)
    facts = read_start(tmp_path / "part" / "run", Deployment())
    assert facts is not None
    assert (facts.devices, facts.starts) == ((0, 1), 1)
    resumed, _ = deploy(tmp_path / "part", GIVEN, nodes=speeds, resume=True)
    parts = [[one.part for one in step.devices] for step in whole.rounds]
    assert parts[0] != parts[1]
    assert parts == [[one.part for one in step.devices] for step in resumed.rounds]
    assert whole.result is not None
    assert resumed.result is not None
    assert whole.result.weights_sha256 == resumed.result.weights_sha256


@pytest.mark.parametrize("secagg", [False, True])
def test_what_the_servers_optimizer_keeps_is_in_the_checkpoint(secagg: bool, tmp_path: Path) -> None:
    given = {**GIVEN, "server_optimizer": "adam", "server_lr": 0.02, "levels": "1/4,1/2,1"}
    whole, _ = deploy(tmp_path / "whole", given, secagg=secagg)
    with pytest.raises(KilledError):
        deploy(tmp_path / "part", given, killed_in(2), secagg=secagg)
    resumed, _ = deploy(tmp_path / "part", given, resume=True, secagg=secagg)
    assert whole.result is not None
    assert resumed.result is not None
    assert whole.result.weights_sha256 == resumed.result.weights_sha256


def test_a_round_that_devices_answered_twice_counts_twice(tmp_path: Path) -> None:
    given = {**GIVEN, "dp_clip": 0.1, "dp_noise": 1.0}
    with pytest.raises(KilledError):
        deploy(tmp_path, given, killed_in(1))
    resumed, _ = deploy(tmp_path, given, resume=True)
    stated = [step.metrics["epsilon"] for step in resumed.rounds]
    # Nobody sends more than was promised: the last round of whoever answered twice is refused by its node.
    assert stated == [epsilon(1.0, releases, 1e-5) for releases in (1, 3, 4, 4)]


def test_a_run_is_extended_but_not_beyond_what_devices_were_promised(tmp_path: Path) -> None:
    whole, _ = deploy(tmp_path / "whole", {**GIVEN, "rounds": 3})
    deploy(tmp_path / "part", {**GIVEN, "rounds": 2})
    extended, _ = deploy(tmp_path / "part", {**GIVEN, "rounds": 3}, resume=True)
    assert whole.result is not None
    assert extended.result is not None
    assert whole.result.weights_sha256 == extended.result.weights_sha256
    private = {**GIVEN, "rounds": 1, "dp_clip": 0.1}
    deploy(tmp_path / "private", private)
    with pytest.raises(SettingError, match="rounds must be 1, for which devices were promised"):
        deploy(tmp_path / "private", {**private, "rounds": 2}, resume=True)


@pytest.mark.parametrize(
    ("begun", "changed", "reason"),
    [
        (
            {"secagg": True},
            {"secagg": False},
            "secagg = false is refused: this run was begun with secagg = true",
        ),
        (
            {"min_devices": 3},
            {"min_devices": 2},
            "min-devices = 2 is refused: this run was begun with min-devices = 3",
        ),
        ({}, {"secagg_range": 2.0}, "secagg-range = 2 is refused: this run was begun with secagg-range = 8"),
        ({}, {"transport_seconds": 1.5}, "transport-seconds = 1.5 is refused: .* transport-seconds = 0"),
        ({}, {"sample_limit": 7}, "sample-limit = 7 is refused: .* sample-limit = 0"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings_of_the_deployment(
    begun: dict[str, Any], changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    first = begin(tmp_path, Deployment(**begun))
    again = begin(tmp_path, Deployment(**begun, update_limit=3.0, wait_seconds=5.0, resume=True))
    assert (again.run, again.starts) == (first.run, 2)
    with pytest.raises(SettingError, match=reason):
        begin(tmp_path, Deployment(**{**begun, **changed}))


def test_plain_flwr_run_does_not_resume_with_other_settings_either(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        deploy(tmp_path, GIVEN, killed_in(1), sample_limit=50)
    with pytest.raises(
        SettingError, match="sample-limit = 60 is refused: this run was begun with sample-limit = 50"
    ):
        deploy(tmp_path, GIVEN, resume=True, sample_limit=60)


def test_deploy_resumes_with_what_the_app_folder_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "here", tmp_path / "run.toml"
    file.write_text("transport-seconds = 2.5\ndeadline = 60.0\n")
    assert program(["deploy", "--write-only", "--out", str(out), "--config", str(file)]) == 0
    app = out / "app" / "pyproject.toml"
    app.write_text(app.read_text().replace("wait-seconds = 120.0", "wait-seconds = 300.0"))
    api.run(**{**GIVEN, "rounds": 1, "eval_every": 1, "deadline": 60.0}, out=out / "run")
    begin(out / "run", Deployment(transport_seconds=2.5))
    resume = ["deploy", "--write-only", "--resume", "--out", str(out)]
    assert program(resume) == 0
    found = read_app(out / "app")
    assert (found["transport_seconds"], found["wait_seconds"]) == (2.5, 300.0)
    assert found["resume"] is True
    capsys.readouterr()
    assert program([*resume, "--min-devices", "3"]) == 2
    assert "min-devices = 3 is refused: this run was begun with min-devices = 2" in capsys.readouterr().err
