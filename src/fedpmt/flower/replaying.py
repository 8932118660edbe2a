"""Play a deployment on the clock of events once more, in the simulator, by its recorded order of arrivals."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedpmt.api import method_of, task_problem
from fedpmt.flower.deployment import Deployment, read_start, without_transport
from fedpmt.flower.events import play_steps
from fedpmt.flower.roster import override
from fedpmt.records import read_run
from fedpmt.settings import Settings
from fedpmt.simulation.assemble import add_nets, assemble, plan
from fedpmt.simulation.events import Replay
from fedpmt.simulation.runner import Journal, exclusive, open_folder
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fedpmt.records import RunRecord
    from fedpmt.simulation.problem import Problem


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    """Take the folder of a replay that is refused away again."""
    try:
        yield
    except SettingError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def replay(
    folder: str | Path, out: str | Path, problem: Callable[[Settings], Problem] = task_problem
) -> RunRecord:
    """Play the recorded arrivals of a finished deployment in the simulator, which ends with the same weights.

    Args:
        folder: The records of the deployment, `run/` of a folder that `fedpmt deploy` wrote.
        out: A new folder for the records of the replay.
        problem: Makes the problem, as for `apps`; here it must be able to load the samples of all devices.

    Returns:
        The replay's records.

    Raises:
        SettingError: The folder holds no such run, or a device would be asked for something else, or replies
            something else, than is recorded.
    """
    folder, out = Path(folder), Path(out)
    run = read_run(folder)
    settings, start = Settings.model_validate(run.settings), read_start(folder, None)
    if settings.clock != "events" or start is None:
        raise SettingError(
            f"'{folder}' is not a deployment with clock = 'events', so it has no arrivals to replay"
        )
    if run.result is None:
        raise SettingError(f"'{folder}' is not finished; continue it with --resume")
    deployment = Deployment.model_validate(start.held)
    made, method = problem(settings), method_of(settings)
    open_folder(out, settings, resume=False)
    with removed_on_error(out), exclusive(out), assemble(settings, made, method, out) as simulator:
        fleet = override(simulator.fleet, start.nodes, keep_levels=settings.assign == "level")
        planner = plan(
            without_transport(settings, deployment), add_nets(settings, made, method), fleet, method
        )
        if start.deadline is not None:
            planner = replace(planner, deadline=start.deadline)
        clock = partial(Replay, steps=run.rounds, transport=deployment.transport_seconds)
        federation = replace(simulator, fleet=fleet, planner=planner, make_clock=clock)
        with Journal(federation, out) as journal:
            play_steps(journal)
        journal.finish()
    return read_run(out)
