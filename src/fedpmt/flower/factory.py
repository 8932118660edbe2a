"""A ServerApp and a ClientApp from one function that makes the problem."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedpmt import records
from fedpmt.api import check, method_of, paper_problem_of
from fedpmt.flower import kept as kept_facts
from fedpmt.flower.client import Worker
from fedpmt.flower.deployment import read_config, refuse_uncarried, refuse_unsummed
from fedpmt.flower.node_data import HeardData, NodeData
from fedpmt.flower.roster import Limits, Roster
from fedpmt.flower.secure_node import KEYS, OPEN, SHARES, hand_out_shares, offer_keys, share_secrets
from fedpmt.flower.strategy import MethodStrategy
from fedpmt.flower.wire import NODE
from fedpmt.simulation.assemble import assembled, plan
from fedpmt.simulation.runner import Journal, exclusive, open_folder
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flwr.app import Context
    from flwr.serverapp import Grid

    from fedpmt.flower.deployment import Deployment
    from fedpmt.methods.base import Method
    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem

SECURE_ANSWERS = {KEYS: offer_keys, SHARES: share_secrets, OPEN: hand_out_shares}
HOLD_SECONDS = 120.0
CLAIM = 10
"""A node may claim so many times the samples that a device usually has."""


class Apps(NamedTuple):
    """The two halves of a Flower app."""

    server: ServerApp
    client: ClientApp


def apps(problem: Callable[[Settings], Problem]) -> Apps:
    """The two halves of a Flower app. `problem(settings)` is called on the server and on each node."""
    server, client, worker = ServerApp(), ClientApp(), Worker(problem)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        settings, deployment = read_config(context.run_config)
        serve(grid, settings, deployment, problem, context.run_id)

    @client.query()
    def describe(message: Message, context: Context) -> Message:
        said = worker.describe(message.content, context)
        return Message(RecordDict({NODE: ConfigRecord(said)}), reply_to=message)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        return Message(worker.train(message.content, context), reply_to=message)

    for action, answer in SECURE_ANSWERS.items():
        client.train(action)(_replying(answer))
    return Apps(server, client)


def _replying(answer: Callable[[RecordDict, Context], RecordDict]) -> Callable[[Message, Context], Message]:
    return lambda message, context: Message(answer(message.content, context), reply_to=message)


def paper_apps() -> Apps:
    """One of the paper's tasks, with data that each node deals itself from a set that all have."""
    return apps(paper_problem_of)


def serve(
    grid: Grid, settings: Settings, deployment: Deployment, make: Callable[[Settings], Problem], run_id: int
) -> None:
    """All rounds, or those that are missing, with a checkpoint after each."""
    from fedpmt.flower.pulling import one_by_one  # it loads much of Flower, and nodes load this module

    check(settings, score_name=None)
    method = method_of(settings)
    refuse_uncarried(method, settings.method)
    refuse_unsummed(method, settings, deployment)
    # On a device's time a round's checkpoint costs nothing.
    settings = settings.model_copy(update={"checkpoint_seconds": 0.0})
    problem = make(settings)
    records.check_target(settings.target, problem.objective.score_name)
    if method.traits.needs_public and problem.data.public is None:
        raise SettingError(
            f"method = '{settings.method}' is refused: the server's data has no public samples"
        )
    if problem.data.devices != settings.devices:
        raise SettingError(f"the data is spread over {problem.data.devices} devices, not {settings.devices}")
    refuse_unseen(method, settings.method, problem)
    folder = Path(deployment.out or f"fedpmt-{settings.method}-{run_id}").absolute()
    open_folder(folder, settings, resume=deployment.resume)
    if (folder / records.RESULT).exists():
        return
    limit = deployment.sample_limit or CLAIM * settings.samples
    roster = Roster(Limits(settings.devices, limit, problem.data.classes, method.traits.needs_labels))
    heard = replace(problem, data=HeardData(problem.data, roster))
    grid, by_level = one_by_one(grid), settings.assign == "level"
    with held(folder), assembled(settings, heard, method, folder) as simulator:
        kept = kept_facts.begin(folder, deployment)
        there = kept.devices or ()
        wanted = len(there) or deployment.min_nodes or settings.devices
        roster.wait(grid, wanted, deployment.wait_seconds, there)
        told = roster.fleet(simulator.fleet, keep_levels=by_level)
        planner = plan(planned(settings, deployment), heard, told)
        if kept.devices is None:
            facts = {"devices": tuple(roster.online()), "deadline": planner.deadline}
            kept = kept_facts.keep(folder, kept.model_copy(update=facts))
        elif kept.deadline is not None:
            # Nodes that came later are known now, and would have changed it.
            planner = replace(planner, deadline=kept.deadline)
        federation = replace(simulator, planner=planner, fleet=told, replays=kept.starts - 1)
        with Journal(federation, folder) as journal:
            strategy = MethodStrategy(federation, journal, roster, simulator.fleet, kept.run, deployment)
            left = settings.rounds - journal.progress.rounds
            strategy.start(grid, ArrayRecord(), num_rounds=left, timeout=strategy.deadline)
        journal.finish()


def refuse_unseen(method: Method[Any, Any], name: str, problem: Problem) -> None:
    """Refuse what the server would need devices' samples for, where only the nodes have them."""
    if (
        problem.model.structure.buffers
        and method.traits.finds_statistics
        and isinstance(problem.data, NodeData)
    ):
        raise SettingError(
            f"{name}.norm = 'static' is refused: BatchNorm statistics would be found on data that only the nodes "
            f"have (set {name}.norm=averaged or frozen)"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder for this process alone; a ServerApp whose SuperLink was killed takes a while to let go of it."""
    end = time.monotonic() + HOLD_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(exclusive(folder))
                break
            except SettingError:
                if time.monotonic() >= end:
                    raise
                time.sleep(1.0)
        yield


def planned(settings: Settings, deployment: Deployment) -> Settings:
    """The settings that depths are fitted to: what of a real deadline is left for training."""
    if settings.deadline is None or not deployment.transport_seconds:
        return settings
    left = settings.deadline - deployment.transport_seconds
    if left <= 0:
        raise SettingError(
            f"deadline = {settings.deadline:g} is refused: transport-seconds = {deployment.transport_seconds:g} "
            "leaves nothing of it"
        )
    return settings.model_copy(update={"deadline": left})
