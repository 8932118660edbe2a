"""A ServerApp and a ClientApp from one function that makes the problem."""

from __future__ import annotations

import json
import re
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedpmt import records
from fedpmt.api import check, method_of, paper_problem_of
from fedpmt.flower.client import Worker
from fedpmt.flower.deployment import read_config, refuse_uncarried, refuse_unsummed
from fedpmt.flower.node_data import HeardData
from fedpmt.flower.roster import Limits, Roster
from fedpmt.flower.secure_node import KEYS, OPEN, SHARES, hand_out_shares, offer_keys, share_secrets
from fedpmt.flower.strategy import MethodStrategy
from fedpmt.flower.wire import NODE
from fedpmt.records import write_atomically
from fedpmt.simulation.assemble import assembled, plan
from fedpmt.simulation.runner import Journal, exclusive, open_folder
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flwr.app import Context
    from flwr.serverapp import Grid

    from fedpmt.flower.deployment import Deployment
    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem

RUN = "deployment.json"
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
    check(settings)
    method = method_of(settings)
    refuse_uncarried(method, settings.method)
    refuse_unsummed(method, settings, deployment)
    # On a device's time a round's checkpoint costs nothing.
    settings = settings.model_copy(update={"checkpoint_seconds": 0.0})
    folder = Path(deployment.out or f"fedpmt-{settings.method}-{run_id}").absolute()
    open_folder(folder, settings, resume=deployment.resume)
    if (folder / records.RESULT).exists():
        return
    problem = make(settings)
    if method.needs_public and problem.data.public is None:
        raise SettingError(
            f"method = '{settings.method}' is refused: the server's data has no public samples"
        )
    if problem.data.devices != settings.devices:
        raise SettingError(f"the data is spread over {problem.data.devices} devices, not {settings.devices}")
    limit = deployment.sample_limit or CLAIM * settings.samples
    roster = Roster(Limits(settings.devices, limit, problem.data.classes, method.needs_labels))
    heard = replace(problem, data=HeardData(problem.data, roster))
    with held(folder), assembled(settings, heard, method, folder) as simulator:
        roster.wait(grid, deployment.min_nodes or settings.devices, deployment.wait_seconds)
        told = roster.fleet(simulator.fleet)
        federation = replace(simulator, planner=plan(planned(settings, deployment), heard, told), fleet=told)
        with Journal(federation, folder) as journal:
            strategy = MethodStrategy(
                federation,
                journal,
                roster,
                simulator.fleet,
                run_name(folder, secagg=deployment.secagg),
                deployment,
            )
            left = settings.rounds - journal.progress.rounds
            strategy.start(grid, ArrayRecord(), num_rounds=left, timeout=strategy.deadline)
        journal.finish()


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
    """The settings that widths are fitted to: what of a real deadline is left for training."""
    if settings.deadline is None or not deployment.transport_seconds:
        return settings
    left = settings.deadline - deployment.transport_seconds
    if left <= 0:
        raise SettingError(
            f"deadline = {settings.deadline:g} is refused: transport-seconds = {deployment.transport_seconds:g} "
            "leaves nothing of it"
        )
    return settings.model_copy(update={"deadline": left})


def run_name(folder: Path, *, secagg: bool = False) -> str:
    """What this run is called on every node, the same after a resume and unlike any other."""
    path = folder / RUN
    if not path.exists():
        # It becomes a folder's name on nodes, which take nothing but plain ones.
        stem = re.sub(r"[^A-Za-z0-9]+", "-", folder.name).strip("-")[:60] or "run"
        kept = {"run": f"{stem}-{uuid.uuid4().hex[:12]}", "secagg": secagg}
        write_atomically(path, json.dumps(kept).encode())
    found = json.loads(path.read_bytes())
    if found.get("secagg", False) != secagg:
        begun = "with" if not secagg else "without"
        raise SettingError(f"secagg = {str(secagg).lower()} is refused: this run was begun {begun} it")
    name: str = found["run"]
    return name
