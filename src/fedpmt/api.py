"""The public functions: run one method, or compare several, on a paper task or on your own model and data."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt import records
from fedpmt.methods.registry import METHODS, create, fields, method_class
from fedpmt.records import RoundRecord, RunRecord, read_run
from fedpmt.settings import Settings, resolve
from fedpmt.simulation.runner import exclusive, open_folder, simulate
from fedpmt.training.server import REPLACE, make_server, server_settings
from fedpmt.types import Arrays, SettingError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedpmt.methods.base import Method
    from fedpmt.simulation.problem import Problem

OWN_DATA, OWN_TASK = "arrays", "own"
SERVER = "server"
"""The field of a method that holds the server's optimizer; methods that do not average parts have none."""

OnRound = Callable[[RoundRecord], None]


def run(
    method: str | Method[Any, Any] = "fedpmt",
    *,
    model: nn.Module | None = None,
    train: tuple[Arrays, Arrays] | None = None,
    test: tuple[Arrays, Arrays] | None = None,
    layers: Sequence[str] | None = None,
    loss: Callable[[Tensor, Arrays], Tensor] | None = None,
    metric: Callable[[Tensor, Arrays], Tensor] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    **settings: Any,
) -> RunRecord:
    """Run one method and return its record.

    Without `model` a paper task is run (`task=`, `data=`). With `model`, any `nn.Module` whose own weights
    are where training starts, `train` and `test` are (inputs, targets) pairs of arrays; inputs may be a dict
    of arrays, which the module gets as keywords. `layers` names the module's layers where they are not
    plain to see; `loss(outputs, targets)` is a mean, `metric(outputs, targets)` a score per sample.
    All settings of the command line are keywords. Records go to `out`, else to a temporary folder.
    """
    if (model is None) != (train is None) or (model is None) != (test is None):
        raise SettingError("model, train and test go together: give all three, or none for a paper task")
    chosen, given = _named(method, settings)
    given = with_public(given, [type(chosen) if chosen is not None else given["method"]])
    if model is not None:
        given = {**given, "task": OWN_TASK, "data": OWN_DATA}
    resolved = settings_of(given)
    if model is not None and train is not None and test is not None:
        digest = resolved.digest + _digest(model, *train, *test)
        resolved = resolved.model_copy(update={"digest": digest})
    if chosen is not None:
        names = {field.name for field in dataclasses.fields(chosen)}  # type: ignore[arg-type]
        shared = {key: value for key, value in shared_of(resolved).items() if key in names}
        chosen = dataclasses.replace(chosen, **shared)  # type: ignore[type-var]
    folder = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="fedpmt-")) / "run"

    def problem() -> Problem:
        if model is None or train is None or test is None:
            return paper_problem_of(resolved)
        return own_problem(resolved, model, train, test, layers, loss, metric)

    return run_in(folder, resolved, problem, method=chosen, resume=resume, on_round=on_round)


def compare(
    methods: Sequence[str | Method[Any, Any]],
    *,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    **arguments: Any,
) -> list[RunRecord]:
    """Run several methods on the same data, fleet and seeds; arguments are those of `run`."""
    folder = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="fedpmt-"))
    # What one method needs is held out for all: their devices hold the same data.
    arguments = with_public(arguments, [one if isinstance(one, str) else type(one) for one in methods])
    runs = []
    for seed in seeds:
        for position, method in enumerate(methods):
            name = f"{position + 1}-{method if isinstance(method, str) else type(method).__name__.lower()}-seed{seed}"
            runs.append(run(method, out=folder / name, seed=seed, **arguments))
    return runs


def _named(
    method: str | Method[Any, Any], settings: Mapping[str, Any]
) -> tuple[Method[Any, Any] | None, dict[str, Any]]:
    """The settings of a method given by name, or as a value whose fields then stand in the settings."""
    if isinstance(method, str):
        return None, {**settings, "method": method}
    if settings.get("budget") is not None:
        method = _under_budget(method)
    given: dict[str, Any] = {**settings, "method": type(method).__name__.lower(), "options": {}}
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if field.name == SERVER:
            given |= {} if value == REPLACE else server_settings(value)
        elif field.name not in Settings.model_fields:
            if isinstance(value, str | int | float):
                given["options"][field.name] = value
        elif settings.get(field.name) is None:
            given[field.name] = value
        elif value not in (field.default, settings[field.name]):
            name = type(method).__name__
            raise SettingError(
                f"{field.name} = '{settings[field.name]}' is refused: {name} was made with '{value}'"
            )
    return method, given


def _under_budget(method: Method[Any, Any]) -> Method[Any, Any]:
    """The method with those of its settings on which a budget can act, where it has defaults there."""
    defaults = {field.name: field.default for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    changed = {
        name: value for name, value in method.traits.under_budget.items() if getattr(method, name) == defaults[name]
    }
    return dataclasses.replace(method, **changed)  # type: ignore[type-var]


HELD_OUT = {"public": "holdout:0.1", "validation": 0.01}
"""What is held out for methods that need it, where nothing is said."""


def with_public(given: Mapping[str, Any], methods: Sequence[str | type[Method[Any, Any]]]) -> dict[str, Any]:
    """Settings with the public and validation data that these methods need; what is said stays."""
    filled = dict(given)
    classes = [one if isinstance(one, type) else method_class(one) for one in methods]
    if filled.get("public") is None and any(one().traits.needs_public for one in classes):
        filled["public"] = HELD_OUT["public"]
    if filled.get("validation") is None and any(one().traits.needs_validation for one in classes):
        filled["validation"] = HELD_OUT["validation"]
    return filled


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Resolve settings; a fleet file says how many devices there are, and is remembered by its content."""
    given = dict(given)
    if str(given.get("method")) in METHODS:
        given = with_public(given, [str(given["method"])])
    if given.get("fleet") is not None:
        from fedpmt.devices.fleet import read_fleet

        path = Path(str(given["fleet"])).absolute()
        given["fleet"] = str(path)
        size = len(read_fleet(path))
        given["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()
        if given.get("devices") is None:
            given["devices"] = size
    settings = resolve(given)
    if settings.budget is None or settings.method not in METHODS:
        return settings
    # In the record, so that it says what ran.
    options = {**method_class(settings.method)().traits.under_budget, **settings.options}
    return settings.model_copy(update={"options": options})


def _digest(model: nn.Module, *arrays: Arrays) -> str:
    """A fingerprint of a model's weights and of arrays, so that a run is only ever resumed with its own."""
    import numpy as np

    from fedpmt.models.layered import check_shapes

    check_shapes(model)
    digest = hashlib.sha256()
    named: list[tuple[str, Any]] = list(model.state_dict().items())
    for number, group in enumerate(arrays):
        parts = group.items() if isinstance(group, Mapping) else [("", group)]
        named += [(f"{number}{name}", array) for name, array in parts]
    for name, array in named:
        plain = np.ascontiguousarray(array.detach().cpu().numpy() if hasattr(array, "detach") else array)
        digest.update(f"{name} {plain.shape} {plain.dtype}".encode())
        digest.update(plain.tobytes())
    return digest.hexdigest()


def shared_of(settings: Settings) -> dict[str, Any]:
    """What a method takes from the run where it has a field of that name."""
    shared: dict[str, Any] = {"depths": settings.depths, "splitting": settings.splitting}
    if settings.depths is None and settings.task != OWN_TASK:
        from fedpmt.models.nets import net

        shared["depths"] = net(settings.task).depths[0]
    shared[SERVER] = make_server(
        settings.server_optimizer,
        settings.server_lr,
        settings.server_momentum,
        settings.server_nesterov,
        settings.server_beta2,
        settings.server_tau,
    )
    return shared


def method_of(settings: Settings) -> Method[Any, Any]:
    """The method that settings name; fields it shares with the run take the run's values."""
    if settings.server_optimizer != "none" and SERVER not in fields(settings.method):
        raise SettingError(
            f"server-optimizer = '{settings.server_optimizer}' is refused: {settings.method} has no server step"
        )
    return create(settings.method, settings.options, shared_of(settings))


def check(settings: Settings, *, method: Method[Any, Any] | None = None) -> None:
    """Refuse what can be known to be wrong before torch or data is loaded; a method may be given as a value."""
    from fedpmt.data.partition import check_spec
    from fedpmt.data.public import check_public
    from fedpmt.devices.fleet import make_fleet
    from fedpmt.models.nets import net

    used = (method or method_of(settings)).traits
    if settings.splitting == "device" and used.needs_speeds:
        raise SettingError(
            f"splitting = 'device' is refused: {settings.method} needs speeds that the server does not know then"
        )
    if used.fitted_net and settings.level_draw == "round":
        raise SettingError(
            f"level-draw = 'round' is refused: {settings.method} keeps a net on each device that fits its level "
            "(allowed: fixed)"
        )
    if used.fitted_net and settings.speeds == "measured":
        raise SettingError(
            f"speeds = 'measured' is refused: {settings.method} keeps a net on each device that fits its stated speed "
            "(allowed: stated)"
        )
    if settings.dp_clip is not None and used.needs_losses:
        raise SettingError(
            f"dp-clip = {settings.dp_clip:g} is refused: {settings.method} learns from losses, which would travel too"
        )
    if settings.dp_clip is not None and used.sends_more:
        raise SettingError(
            f"dp-clip = {settings.dp_clip:g} is refused: {settings.method} sends more than trained tensors"
        )
    check_spec(settings.partition)
    check_public(settings.public, settings.data)
    if used.needs_public and settings.public == "none":
        raise SettingError(
            f"public = 'none' is refused: {settings.method} needs some (e.g. {HELD_OUT['public']})"
        )
    fleet = make_fleet(settings)
    if settings.limits is not None:
        settings.limits.check_levels(str(settings.budget), len(fleet.level_speeds))
    if settings.task != OWN_TASK:
        layers = net(settings.task).layers
        count = settings.depths or net(settings.task).depths[0]
        if count > layers:
            raise SettingError(
                f"depths = {count} is refused: {settings.task} has {layers} layers, so 1 to {layers} depths"
            )
        if settings.assign == "level" and len(fleet.level_speeds) != count:
            raise SettingError(
                f"assign = 'level' needs as many depths as levels: there are {count} depths and "
                f"{len(fleet.level_speeds)} levels (set --depths or --levels, or use --assign deadline)"
            )


def paper_problem_of(settings: Settings) -> Problem:
    """One of the paper's tasks, with its data loaded and spread."""
    from fedpmt.data.federated import federate
    from fedpmt.models.nets import net
    from fedpmt.simulation.problem import paper_problem

    data = federate(
        settings.data,
        partition=settings.partition,
        partition_seed=settings.partition_seed,
        devices=settings.devices,
        samples=settings.samples,
        data_dir=settings.data_dir,
        input_shape=net(settings.task).input_shape,
        public=settings.public,
        validation=settings.validation,
    )
    return paper_problem(settings, data)


def own_problem(
    settings: Settings,
    model: nn.Module,
    train: tuple[Arrays, Arrays],
    test: tuple[Arrays, Arrays],
    layers: Sequence[str] | None,
    loss: Callable[[Tensor, Arrays], Tensor] | None,
    metric: Callable[[Tensor, Arrays], Tensor] | None,
) -> Problem:
    """A user's own module and arrays."""
    import numpy as np

    from fedpmt.data.datasets import from_arrays
    from fedpmt.data.federated import federate_dataset
    from fedpmt.models.layered import layered
    from fedpmt.simulation.problem import Problem, try_out
    from fedpmt.training.batches import placed
    from fedpmt.training.objective import CLASSIFICATION, Objective

    data = federate_dataset(
        from_arrays(train, test),
        partition=settings.partition,
        partition_seed=settings.partition_seed,
        devices=settings.devices,
        samples=settings.samples,
        data_dir=settings.data_dir,
        public=settings.public,
        validation=settings.validation,
    )
    example = placed(data.test.take(np.arange(2) % len(data.test))).inputs
    objective = Objective(loss or CLASSIFICATION.loss, metric or CLASSIFICATION.score)
    problem = Problem(layered(model, layers=layers, example=example), data, objective)
    try_out(problem, settings)
    return problem


def run_in(
    folder: Path,
    settings: Settings,
    problem: Callable[[], Problem],
    *,
    method: Method[Any, Any] | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    on_start: Callable[[], None] | None = None,
    keep_diverged: bool = False,
) -> RunRecord:
    """Run in this folder. It is written first; what turns out to be impossible takes a new one away again.

    `on_start` is called when nothing stands in the way of the first round any more. A run that diverges raises
    `DivergedError`, or with `keep_diverged` is finished as what it is.
    """
    check(settings, method=method)
    missing = [parent for parent in folder.absolute().parents if not parent.exists()]
    made = open_folder(folder, settings, resume=resume)
    if not (folder / records.RESULT).exists():
        with exclusive(folder):
            try:
                simulate(
                    settings,
                    problem(),
                    method or method_of(settings),
                    folder,
                    on_round,
                    on_start,
                    keep_diverged=keep_diverged,
                )
            except SettingError:
                if made:
                    shutil.rmtree(folder, ignore_errors=True)
                    for parent in missing:
                        with contextlib.suppress(OSError):
                            parent.rmdir()
                raise
    return read_run(folder)


def restamp(run: RunRecord, settings: Settings) -> RunRecord | None:
    """A finished run of a paper task under another clock; None where it would have to be trained again."""
    from fedpmt.simulation.restamp import restamped

    return restamped(run, settings, _unfilled_problem(settings), method_of(settings))


def predict(settings: Settings, out: str | Path = ".") -> dict[str, Any]:
    """What a run of a paper task in this folder will cost, without training; nothing is written there."""
    from fedpmt.simulation.predict import predict as predicted

    return predicted(settings, paper_problem_of(settings), method_of(settings), Path(out))


def plan_table(settings: Settings) -> dict[str, Any]:
    """What each device of a fleet would train of a paper task, and how long it would take."""
    from fedpmt.devices.fleet import make_fleet
    from fedpmt.pricing import plan_table as table
    from fedpmt.simulation.assemble import plan

    fleet = make_fleet(settings)
    planner = plan(settings, _unfilled_problem(settings), fleet)
    return {"task": settings.task, **table.plan_table(planner, fleet, settings.samples, settings.deadline)}


def profile(settings: Settings, name: str = "this-machine", repeat: int = 5) -> dict[str, Any]:
    """Measure this machine on a paper task."""
    from fedpmt.simulation.profile import profile as measured
    from fedpmt.training.batches import placed

    problem = _unfilled_problem(settings)
    return measured(settings, problem, placed(problem.data.shard(0)), name, repeat)


_UNFILLED = {"data": "synthetic", "partition": "iid", "public": "none", "validation": 0.0}


def _unfilled_problem(settings: Settings) -> Problem:
    """A paper task on made-up samples: prices and times do not depend on what is learned."""
    return paper_problem_of(settings.model_copy(update={**_UNFILLED, "devices": 1}))
