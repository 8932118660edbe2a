"""A ServerApp and a ClientApp from one function that makes the problem."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedpmt import records
from fedpmt.api import check, method_of, task_problem
from fedpmt.flower.checks import Inspector
from fedpmt.flower.client import Worker, base_digest
from fedpmt.flower.deployment import (
    begin,
    check_deployable,
    check_promise,
    read_config,
    without_transport,
    write_start,
)
from fedpmt.flower.events import GridClock, Network, play_steps
from fedpmt.flower.exchange import Exchange
from fedpmt.flower.node_data import NodeData, ReportedData
from fedpmt.flower.roster import Limits, Roster, override
from fedpmt.flower.secure.node import KEYS, OPEN, SHARES, hand_out_shares, offer_keys, share_secrets
from fedpmt.flower.strategy import InClear, MethodStrategy
from fedpmt.flower.wire import NODE
from fedpmt.simulation.assemble import add_nets, assemble, plan
from fedpmt.simulation.problem import sizes_of
from fedpmt.simulation.runner import Journal, exclusive, is_finished, open_folder
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
"""A node may claim at most this many times the samples that a device usually has."""

CUSTOM = "custom"


class Apps(NamedTuple):
    """The two halves of a Flower app."""

    server: ServerApp
    client: ClientApp


def apps(problem: Callable[[Settings], Problem]) -> Apps:
    """Make the two halves of a Flower app.

    Args:
        problem: Makes the model, the data and the objective from the settings of a run; it is called on the server
            and on each node.
    """
    server, client, worker = ServerApp(), ClientApp(), Worker(problem)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        settings, deployment = read_config(context.run_config)
        serve(grid, settings, deployment, problem, context.run_id)

    @client.query()
    def describe(message: Message, context: Context) -> Message:
        description = worker.describe(message.content, context)
        return Message(RecordDict({NODE: ConfigRecord(description)}), reply_to=message)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        return Message(worker.train(message.content, context), reply_to=message)

    for action, answer in SECURE_ANSWERS.items():
        client.train(action)(_handle(answer))
    return Apps(server, client)


def _handle(answer: Callable[[RecordDict, Context], RecordDict]) -> Callable[[Message, Context], Message]:
    return lambda message, context: Message(answer(message.content, context), reply_to=message)


def paper_apps() -> Apps:
    """Make the apps of a task that comes with fedpmt: each node takes its own samples of a data set that all have."""
    return apps(task_problem)


def serve(
    grid: Grid, settings: Settings, deployment: Deployment, make: Callable[[Settings], Problem], run_id: int
) -> None:
    """Play all rounds, or those that are missing, with a checkpoint after each."""
    from fedpmt.flower.pulling import pull_one_by_one  # it loads much of Flower, and nodes load this module

    check(settings, score_name=None)
    method = method_of(settings)
    check_deployable(method, settings, deployment)
    problem = make(settings)
    check_problem(problem, settings, method)
    # The record says what ran; and compared with what devices take, a checkpoint after each round costs nothing.
    own = {"optimizer": problem.optimizer, "schedule": problem.rate}
    custom = {key: CUSTOM for key, value in own.items() if value is not None}
    settings = settings.model_copy(update={"checkpoint_seconds": 0.0, **custom})
    folder = Path(deployment.out or f"fedpmt-{settings.method}-{run_id}").absolute()
    check_promise(folder, settings)
    open_folder(folder, settings, resume=deployment.resume)
    if is_finished(folder, settings):
        return
    largest = int(np.max(sizes_of(problem, settings)))
    limit = deployment.sample_limit or CLAIM * max(settings.samples, largest)
    classes, labels = problem.data.classes, method.traits.needs_labels
    roster = Roster(Limits(settings.devices, limit, classes, labels, base_digest(problem)))
    reported = replace(problem, data=ReportedData(problem.data, roster))
    grid, by_level = pull_one_by_one(grid), settings.assign == "level"
    with hold_folder(folder), assemble(settings, reported, method, folder) as simulator:
        start = begin(folder, deployment)
        there = start.devices or ()
        wanted = len(there) or deployment.min_nodes or settings.devices
        roster.wait(grid, wanted, deployment.wait_seconds, there)
        if start.devices is None:
            start = start.model_copy(update={"devices": tuple(roster.online()), "nodes": roster.stated()})
        # Nodes that have joined since are known now, and would change what tasks are fitted to.
        fleet = override(simulator.fleet, start.nodes, keep_levels=by_level)
        priced = add_nets(settings, reported, method)
        planner = plan(without_transport(settings, deployment), priced, fleet, method)
        if start.deadline is None:
            start = write_start(folder, start.model_copy(update={"deadline": planner.deadline}))
        else:
            planner = replace(planner, deadline=start.deadline)
        federation = replace(simulator, planner=planner, fleet=fleet, replays=start.starts - 1)
        if settings.clock == "events":
            inspector = Inspector(federation, deployment.update_limit)
            exchange = Exchange(federation, roster, InClear(inspector), start.run)
            network = Network(grid, exchange, deployment, simulator.fleet)
            federation = replace(federation, make_clock=partial(GridClock, network=network))
        with Journal(federation, folder) as journal:
            if settings.clock == "events":
                play_steps(journal)
            else:
                strategy = MethodStrategy(federation, journal, roster, simulator.fleet, start.run, deployment)
                left = settings.rounds - journal.progress.rounds
                strategy.start(grid, ArrayRecord(), num_rounds=left, timeout=strategy.deadline)
        journal.finish()


def check_problem(problem: Problem, settings: Settings, method: Method[Any, Any]) -> None:
    """Refuse a problem that does not fit the run's settings or its method."""
    data, name, traits = problem.data, settings.method, method.traits
    records.check_target(settings.target, problem.objective.score_name)
    if traits.needs_public and data.public is None:
        raise SettingError(f"method = '{name}' is refused: the server's data has no public samples")
    if data.devices != settings.devices:
        raise SettingError(f"the data is spread over {data.devices} devices, not {settings.devices}")
    if settings.optimizer == CUSTOM and problem.optimizer is None:
        raise SettingError(
            f"optimizer = '{CUSTOM}' is refused: the app's problem has no optimizer of its own "
            "(allowed: sgd, adam, adamw)"
        )
    if settings.schedule == CUSTOM and problem.rate is None:
        raise SettingError(
            f"schedule = '{CUSTOM}' is refused: the app's problem has no learning rate of its own"
        )
    if problem.model.structure.buffers and traits.finds_statistics and isinstance(data, NodeData):
        raise SettingError(
            f"{name}.norm = 'static' is refused: BatchNorm statistics would be found on data that only the nodes "
            f"have (set {name}.norm=averaged or frozen)"
        )


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock the folder. A ServerApp whose SuperLink was killed takes a while to release it, and is waited for."""
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
