"""The server's own work: what it may cost, what the clock makes of it, and where it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from fedpmt import api
from fedpmt.methods.base import Fold, Gather, Server, Step, Traits
from fedpmt.methods.fedavg import FedAvg
from fedpmt.parts.part import GLOBAL
from fedpmt.report import tables
from fedpmt.settings import resolve
from fedpmt.simulation.assemble import make_price
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.methods.averaging import Averaged
    from fedpmt.methods.base import Round
    from fedpmt.training.messages import Reply

SMALL: dict[str, Any] = {"rounds": 2, "devices": 10, "cohort": 5, "samples": 20}


@dataclass(frozen=True)
class Busy(FedAvg):
    """FedAvg whose server spends all that it may, up to a limit."""

    most: int = 10**12

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        mean = super().fold(state, round)

        def finish(replies: list[Reply], server: Server) -> Step[Averaged]:
            for reply in replies:
                mean.add(reply)
            spent = server.affordable(float, self.most)
            metrics = {"server_steps": spent, "server_steps_default": self.most}
            return Step(mean.finish(server).state, metrics, float(spent))

        return Gather(finish)


@pytest.mark.parametrize(
    ("given", "times"), [({}, 2.0), ({"server_cap": 0.5}, 0.5), ({"server_cap": "none"}, None)]
)
def test_the_cap_is_so_many_times_the_operations_of_the_devices_that_count(
    given: dict[str, Any], times: float | None
) -> None:
    run = api.run(Busy(), failure=0.3, **SMALL, **given)
    lost = 0
    for record in run.rounds:
        counted = sum(device.operations for device in record.devices if device.outcome == "arrived")
        assert record.server_operations == (10**12 if times is None else int(times * counted))
        lost += sum(device.outcome != "arrived" for device in record.devices)
    assert lost
    assert run.result is not None
    assert run.result.server_operations == sum(record.server_operations for record in run.rounds)


def test_the_servers_work_takes_virtual_time_only_where_it_has_a_speed() -> None:
    """As many operations as one epoch of the full model over |D_k| samples take full_seconds / speed."""
    plain = api.run(Busy(), **SMALL)
    slow = api.run(Busy(), server_speed=4, **SMALL)
    settings = api.settings_of(slow.settings)
    price = make_price(settings, api.paper_problem_of(settings))
    epoch = price.full.operations * settings.samples / settings.batch
    for one, other in zip(plain.rounds, slow.rounds, strict=True):
        longer = one.server_operations / epoch * settings.full_seconds / 4
        assert other.round_seconds == pytest.approx(one.round_seconds + longer)
    assert slow.rounds[-1].virtual_seconds == pytest.approx(sum(one.round_seconds for one in slow.rounds))


def test_affordable_steps_are_the_most_within_the_budget() -> None:
    server = Server(None, budget=100.0)  # type: ignore[arg-type]
    assert server.affordable(lambda steps: 10 + 30 * steps, 50) == 3
    assert server.affordable(lambda steps: 10 + 30 * steps, 2) == 2
    assert server.affordable(lambda steps: 200 + steps, 50) == 0


def test_tables_say_what_the_server_did_what_it_would_have_and_what_was_evaluated() -> None:
    runs = [api.run(Busy(), **SMALL), api.run("comet", **SMALL), api.run("fedpmt", **SMALL)]
    busy, comet, plain = (row.texts() for row in tables.summary(runs))
    assert "of 1000000000000 (cap 2 × devices)" in busy["server steps a round"]
    assert busy["server operations"] != "0"
    assert (busy["evaluated"], comet["evaluated"], plain["evaluated"]) == (
        "global",
        "mean personal",
        "global",
    )
    assert plain["server operations"] == "0"
    assert plain["server steps a round"] == "-"


def test_the_server_has_its_data_and_its_budget_at_hand() -> None:
    """Public and validation data, nets of its own, and how much it may do with them."""
    seen: list[Server] = []

    @dataclass(frozen=True)
    class Looking(FedAvg):
        @property
        def traits(self) -> Traits:
            return Traits(needs_public=True, needs_validation=True)

        def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
            def finish(replies: list[Reply], server: Server) -> Step[Averaged]:
                seen.append(server)
                return Step(state)

            return Gather(finish)

    run = api.run(Looking(), **SMALL)
    assert [server.budget for server in seen] == [2 * record.operations for record in run.rounds]
    for server in seen:
        assert server.public is not None
        assert server.validation is not None
        assert (len(server.public), len(server.validation)) == (400, 40)
        assert set(server.site.models) == {GLOBAL}


@pytest.mark.parametrize("value", ["0", "-1", "inf", "much"])
def test_caps_that_are_none_are_refused(value: str) -> None:
    with pytest.raises(SettingError, match=f"server-cap = '{value}' is refused"):
        resolve({"server_cap": value})
