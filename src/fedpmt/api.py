"""The one front door: run a method or compare several, on a paper task or on your own model and data.

The command line goes through the same functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from fedpmt import records
from fedpmt.data.registry import is_own, with_samples
from fedpmt.methods.registry import (
    METHODS,
    create,
    fields,
    method_class,
    method_names,
    name_of,
    short_name,
    typed_options,
)
from fedpmt.models.nets import NETS, PRETRAINED, RANDOM, TASKS, net
from fedpmt.progress import show_progress
from fedpmt.records import ACCURACY, RunRecord, check_target, step_word
from fedpmt.runs import Run, Runs, Scratch, read_run, resumable
from fedpmt.settings import (
    FINGERPRINT,
    OWN_TASK,
    RunSettings,
    Settings,
    check_privacy,
    resolve,
    unknown_setting,
)
from fedpmt.simulation.callbacks import OnRound, call_each
from fedpmt.simulation.runner import exclusive, is_finished, open_folder, simulate
from fedpmt.training.optimizers import Custom, Optimizer
from fedpmt.training.server import make_server, server_settings
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from torch import nn

    from fedpmt.data.clients import Collate, Source
    from fedpmt.data.datasets import LoadedDataset
    from fedpmt.methods.base import Method
    from fedpmt.models.axes.declared import Declared
    from fedpmt.simulation.problem import Problem
    from fedpmt.training.batches import Transform
    from fedpmt.training.objective import Loss, Objective
    from fedpmt.training.ready_made import Metrics, Score

OWN_DATA = "arrays"
CUSTOM = "custom"
SHARED = ("depths", "splitting", "plan", "mean", "server")
"""Fields of a method that are settings of the run: its value there, where it has such a field."""

Layers: TypeAlias = Sequence[str | Sequence[str]]
"""Layers in the order of the forward pass, by the paths of their modules; or one text with commas between them."""


Named: TypeAlias = "str | Method[Any, Any] | type[Method[Any, Any]]"
"""A method by its name, as a value, or as a class, which stands for its defaults."""


@dataclass(frozen=True)
class Request:
    """A run that has been checked and can be started: what it is, and how to get at its data."""

    settings: Settings
    method: Method[Any, Any]
    problem: Callable[[], Problem]


Watch = Callable[[Request, Path], AbstractContextManager[tuple[Callable[[], None] | None, OnRound]]]


def run(
    method: Named = "fedpmt",
    *,
    model: nn.Module | str | None = None,
    train: Source | None = None,
    test: Source | None = None,
    clients: Source | str | None = None,
    client: str | Sequence[Any] | None = None,
    label: str | None = None,
    collate: Collate | None = None,
    transform: Transform | None = None,
    layers: Layers | None = None,
    axes: Declared | None = None,
    loss: Loss | None = None,
    metric: Score | None = None,
    metrics: Metrics | None = None,
    maximize: bool | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | Sequence[OnRound] | None = None,
    progress: bool | None = None,
    **settings: Unpack[RunSettings],
) -> Run:
    """Run one method and return its record.

    Without `model` a paper task is run (`task=`, `data=`). All settings of the command line are keywords.

    Args:
        method: A method's name, or a value such as `fedpmt.FedPMT(server=fedpmt.Momentum(0.9, lr=0.3))`; a class stands
            for its defaults.
        model: Any `nn.Module`; its own weights are where training starts. Or the name of a function that returns it,
            as `package.module:function`, which is called with torch's generator set to the run's seed.
        train: The samples of all devices, which `partition=` splits: (inputs, targets), where inputs may be a dict of
            arrays, which the module gets as keywords; a dict of arrays with the targets in it; a pandas frame; a
            Hugging Face data set; or a torch data set with `len` and `[index]`, which is read batch by batch.
            Without them `data=` names a data set, or a function that returns both as `(train, test)`.
        test: The same for the test set; with `clients` also {client: its own test samples}. Not needed where devices
            keep a share of their own, `held_out=`.
        clients: Each client's own samples instead of `train`: {name: samples} or a list of samples, in any of the forms
            above and of any sizes, one device each. Or one set of samples, with `client`.
        client: The column that names the owner of each sample; or a list with the owner of each.
        label: The column, or key, of the targets. Default: the first of label, labels, target, targets, y.
        collate: Makes a batch, (inputs, targets) or a dict, of a list of items; for text and other ragged samples.
        transform: Augments the inputs of a training batch: `transform(inputs)` or `transform(inputs, generator)`, where
            the torch generator, and torch's global one, depend on seed, round and device alone; for a function of one
            sample, `fedpmt.PerSample(function)`. Outputs of frozen layers are then not kept.
        layers: The module's layers in the order of the forward pass, where they are not plain to see.
        axes: For methods that cut by width, where the channels can't be found: for each tensor that is cut, the name of
            a group of channels for each of its axes, or None where it stays whole.
        loss: `loss(outputs, targets)`, a mean over the batch, of what the model gave; default: that of the `objective`
            (classification, causal-lm, multi-label or regression), which finds the logits in a `ModelOutput`, dict,
            dataclass or tuple, and leaves out labels of -100.
        metric: The score: `metric(outputs, targets)`, a value for each sample or token, or (values, weights); an object
            with `update` and `compute`, as in torchmetrics; a name, e.g. "macro-f1"; or {"mse": any of these}.
            Default: that of the objective.
        metrics: More of them by name, recorded as `scores`; or a list of names.
        maximize: Whether a higher score is better, e.g. for `target`; default: yes, but for names like "mse".
        out: The folder of the records; default: a temporary folder, which is removed together with the returned value.
        resume: Whether to continue the run in that folder, if there is one; more `rounds` than it has extend it.
        on_round: A function, or several, called with the record of each round, which has the run's `folder` and the
            `weights`, too (`fedpmt.RoundEnd`). It may raise `fedpmt.Stop` to end the run after this round.
        progress: Whether to show progress; default: on a terminal and in a notebook.
        **settings: See `fedpmt run --help`. `optimizer` may also be a function `params -> torch.optim.Optimizer`, and
            `schedule` a function `round -> rate`. `fleet` may be a list of `fedpmt.Device` values, speeds or dicts, or
            a data frame; `availability_trace` and `speed_trace` a list of dicts or a data frame (docs/fleets.md).

    Returns:
        Settings, rounds and result of the run, with `frame()`, `plot()` and `model(module)`.

    Raises:
        SettingError: Where a setting or an input cannot be used; before anything is trained.

    Examples:
        >>> import fedpmt
        >>> record = fedpmt.run("fedpmt", rounds=1, devices=5, samples=10, cohort=5)
        >>> record.result.rounds
        1
    """
    own = Own(
        model=model,
        train=train,
        test=test,
        clients=clients,
        client=client,
        label=label,
        collate=collate,
        transform=transform,
        layers=layers,
        axes=axes,
        loss=loss,
        metric=metric,
        metrics=metrics,
        maximize=maximize,
    )
    request = make_request(method, with_kept_rounds(settings, out, resume=resume), own)
    scratch = Scratch() if out is None else None
    folder = scratch.folder / "run" if scratch is not None else Path(str(out))
    with resumable(folder, scratch), _watched(request, progress) as (_, watching):
        found = start(request, folder, resume=resume, on_round=call_each([watching, *_callbacks(on_round)]))
    return found.held_by(scratch)


def compare(
    methods: Named | Iterable[Named],
    *,
    seeds: Iterable[int] = (0,),
    model: nn.Module | str | None = None,
    train: Source | None = None,
    test: Source | None = None,
    clients: Source | str | None = None,
    client: str | Sequence[Any] | None = None,
    label: str | None = None,
    collate: Collate | None = None,
    transform: Transform | None = None,
    layers: Layers | None = None,
    axes: Declared | None = None,
    loss: Loss | None = None,
    metric: Score | None = None,
    metrics: Metrics | None = None,
    maximize: bool | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | Sequence[OnRound] | None = None,
    progress: bool | None = None,
    watch: Watch | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    **settings: Unpack[RunSettings],
) -> Runs:
    """Run several methods on the same data, fleet and seeds, and return their records.

    All runs are checked before the first one starts. Arguments are those of `run`; each run's folder lies in `out`.

    Args:
        methods: Names, values, or names with options such as "fedprox:mu=0.1"; or one of them.
        seeds: Each method is run once with each of them.
        watch: Called with each request and its folder; the context it gives lasts as long as the run, and yields
            two functions: one to call when the run really starts, and one for the record of each round. It takes the
            place of `progress`.
        sweep: Values of a setting or of a method's option, as {"lr": [0.01, 0.1]}: each method is run with each.

    Returns:
        A list of runs, with `frame()` and `plot()` of all of them.

    Examples:
        >>> import fedpmt
        >>> runs = fedpmt.compare(["fedpmt", "fedavg"], rounds=1, devices=5, samples=10, cohort=5)
        >>> [run.result.method for run in runs]
        ['fedpmt', 'fedavg']
    """
    own = Own(
        model=model,
        train=train,
        test=test,
        clients=clients,
        client=client,
        label=label,
        collate=collate,
        transform=transform,
        layers=layers,
        axes=axes,
        loss=loss,
        metric=metric,
        metrics=metrics,
        maximize=maximize,
    )
    kept = with_kept_rounds(settings, out, resume=resume)
    requests = compare_requests(methods, seeds, kept, own, sweep)
    scratch, runs = Scratch() if out is None else None, Runs()
    folder = scratch.folder if scratch is not None else Path(str(out))
    with resumable(folder, scratch):
        for name, request in requests:
            context = _watched(request, progress) if watch is None else watch(request, folder / name)
            with context as (on_start, watching):
                called = call_each([watching, *_callbacks(on_round)])
                found = start(
                    request,
                    folder / name,
                    resume=resume,
                    on_round=called,
                    on_start=on_start,
                    keep_idle=len(requests) > 1,
                )
            runs.append(found.held_by(scratch))
    return runs


@contextlib.contextmanager
def _watched(request: Request, progress: bool | None) -> Iterator[tuple[None, OnRound]]:
    settings = request.settings
    label, word = f"{settings.method}, seed {settings.seed}", step_word(settings.clock)
    with show_progress(label, settings.rounds, word, shown=progress) as show:
        yield None, show


def _callbacks(given: OnRound | Sequence[OnRound] | None) -> Sequence[OnRound]:
    listed = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    wrong = next((one for one in listed if not callable(one)), None)
    if wrong is not None:
        raise SettingError(f"on_round must be a function, or a list of functions (got {wrong!r})")
    return listed


def with_kept_rounds(
    settings: Mapping[str, Any], out: str | Path | None, *, resume: bool
) -> Mapping[str, Any]:
    """Settings with the rounds of the run that is resumed, or of the first of several, where none are given."""
    if not resume or out is None or settings.get("rounds") is not None:
        return settings
    configs = [Path(out) / records.CONFIG, *sorted(Path(out).glob(f"*/{records.CONFIG}"))]
    stored = next((records.read_config(path.parent) for path in configs if path.exists()), None)
    return settings if stored is None else {**settings, "rounds": stored.get("rounds")}


def compare_requests(
    methods: Named | Iterable[Named],
    seeds: Iterable[int],
    settings: Mapping[str, Any],
    own: Own | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
) -> list[tuple[str, Request]]:
    """Check all runs of a comparison; each with the name of its folder."""
    methods, seeds = _listed(methods), _seeds(seeds)
    variants = [split_variant(one) if isinstance(one, str) else (name_of(one), {}) for one in methods]
    names = [name for name, _ in variants]
    # What one method needs is held out for all: their devices hold the same data.
    given = with_public(settings, names)
    options = given.pop("options", None) or {}
    planned = [_has_plan(name) for name in names]
    found = []
    for seed, change, position in itertools.product(seeds, _changes(sweep), range(len(methods))):
        (name, own_options), method = variants[position], methods[position]
        changed, changed_options = _split_change(change)
        mine = {**given, **changed, "seed": seed}
        mine["options"] = {**options_for(name, {**options, **changed_options}, names), **own_options}
        if any(planned) and not planned[position]:
            # It is meant for those that have one.
            mine.pop("plan", None)
        request = make_request(method if not isinstance(method, str) else name, mine, own)
        values = [f"-{key}-{value}" for key, value in {**own_options, **change}.items()]
        same = names.count(name) > 1 and not own_options
        number = f"{position + 1}-" if same else ""
        found.append((f"{number}{slug(name + ''.join(values))}-seed{seed}", request))
    return found


def split_variant(text: str) -> tuple[str, dict[str, Any]]:
    """A method's name and the options written behind it.

    >>> split_variant("fedprox:mu=0.1,partial=false"), split_variant("my.methods:Mine")
    (('fedprox', {'mu': '0.1', 'partial': 'false'}), ('my.methods:Mine', {}))
    """
    name, colon, rest = text.rpartition(":")
    if not colon or "=" not in rest:
        return text, {}
    pairs = [one.partition("=") for one in rest.split(",")]
    if not name or not all(key.strip() and value.strip() for key, _, value in pairs):
        raise SettingError(f"method = '{text}' must be METHOD or METHOD:KEY=VALUE,KEY=VALUE")
    return name, {key.strip(): value.strip() for key, _, value in pairs}


def _changes(sweep: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """Each combination of the swept settings; one without changes where nothing is swept."""
    keys = list(sweep or {})
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(sweep or {}).values())]


def _split_change(change: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a run, and options of methods: what is no setting is an option."""
    names = {key: key.replace("-", "_") for key in change}
    settings = {names[key]: value for key, value in change.items() if names[key] in Settings.model_fields}
    return settings, {key: value for key, value in change.items() if names[key] not in settings}


def _value(method: Named) -> str | Method[Any, Any]:
    """The name of a method, or its value."""
    from fedpmt.methods.base import Method

    found = method() if isinstance(method, type) and issubclass(method, Method) else method
    if not isinstance(found, str | Method):
        raise SettingError(f"method must be a name or a value such as fedpmt.FedPMT() (got {method!r})")
    return found


def _listed(methods: Named | Iterable[Named]) -> list[str | Method[Any, Any]]:
    """The methods of a comparison; one alone need not be in a list."""
    alone = isinstance(methods, str | type) or not isinstance(methods, Iterable)
    several: Iterable[Any] = [methods] if alone else methods  # type: ignore[assignment]
    found = [_value(one) for one in several]
    if not found:
        raise SettingError("methods must name at least one method (got none)")
    return found


def _seeds(seeds: Iterable[int]) -> list[int]:
    if not isinstance(seeds, Iterable) or isinstance(seeds, str):
        raise SettingError(f"seeds must be a list, e.g. [0, 1, 2] or range(3) (got {seeds!r})")
    found = list(seeds)
    if not found or len(set(found)) < len(found):
        raise SettingError(f"seeds must name at least one seed, and none twice (got {found})")
    return found


def _has_plan(name: str) -> bool:
    return any(field.name == "plan" for field in dataclasses.fields(method_class(name)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Own:
    """What a user brings along, as arguments of `run`."""

    model: nn.Module | str | None = None
    train: Source | None = None
    test: Source | None = None
    clients: Source | str | None = None
    client: str | Sequence[Any] | None = None
    label: str | None = None
    collate: Collate | None = None
    transform: Transform | None = None
    layers: Layers | None = None
    axes: Declared | None = None
    loss: Loss | None = None
    metric: Score | None = None
    metrics: Metrics | None = None
    maximize: bool | None = None

    @cached_property
    def samples(self) -> LoadedDataset | None:
        """The samples, read once for all runs of a comparison; None where there are none."""
        from fedpmt.data.clients import Reader, read_clients, read_dataset

        reader = Reader(self.client, self.label, self.collate)
        if self.clients is not None:
            return read_clients(self.clients, self.test, reader)
        return None if self.train is None else read_dataset(self.train, self.test, reader)


def make_request(method: Named, settings: Mapping[str, Any], own: Own | None = None) -> Request:
    """Resolve and check everything that can be known before torch or data is loaded, then look at a user's model."""
    method, own = _value(method), own or Own()
    if FINGERPRINT in settings:
        raise unknown_setting(FINGERPRINT)
    check_privacy(settings)
    given, model = with_model(settings, own.model, own.layers)
    given, own = _with_samples(given, model, own)
    given, optimizer, rate = own_training(given)
    given["objective"] = _objective_of(given.get("objective"), own.loss)
    given = _with_transform(given, own)
    scored = (own.metric, own.metrics, own.maximize) != (None, None, None)
    of_paper = model is None and str(given.get("task")) not in TASKS
    if of_paper and own.axes is not None:
        raise SettingError("axes needs a model of your own: those of a paper task are known")
    if of_paper and (scored or given["objective"] != "classification"):
        raise SettingError(
            "loss, metric, metrics, maximize and objective need a model of your own: "
            "a paper task is scored by accuracy"
        )
    if not isinstance(method, str):
        method = method if given.get("budget") is None else _under_budget(method)
        given = {**given, **_settings_of_value(method, given)}
    else:
        given["method"] = method
    resolved = settings_of(given)
    chosen = method_of(resolved)
    if not isinstance(method, str):
        chosen = dataclasses.replace(method, **_shared_fields(resolved, method))  # type: ignore[type-var]
    brought: dict[str, Any] = {"optimizer": optimizer, "rate": rate, "transform": own.transform}
    if of_paper:
        check(resolved, method=chosen)
        return Request(resolved, chosen, lambda: dataclasses.replace(paper_problem_of(resolved), **brought))
    from fedpmt.own import fingerprint, load_module, load_task, warn_of_one_layer
    from fedpmt.training.ready_made import make_objective

    objective = make_objective(
        own.loss, own.metric, maximize=own.maximize, metrics=own.metrics, objective=resolved.objective
    )
    check(resolved, method=chosen, score_name=objective.score_name)
    digest = resolved.digest
    if model is None:
        load_task(resolved)  # weights that are missing are refused before anything is written
    else:
        # Weights that a function draws are the seed's; runs that differ in nothing else belong together.
        digest += fingerprint(load_module(model, 0) if isinstance(model, str) else model)
    if own.samples is not None:
        from fedpmt.data.clients import fingerprint as samples_fingerprint

        digest += samples_fingerprint(own.samples)
    if objective.score_name != ACCURACY or objective.metrics:
        # A resumed run goes on with the same scores.
        names = " ".join((objective.score_name, *objective.metrics))
        digest += f" {names} {'max' if objective.maximize else 'min'}"
    if own.axes is not None:
        digest += f" axes={sorted(own.axes.items())!r}"
    resolved = resolved.model_copy(update={"digest": digest})

    def problem() -> Problem:
        found = own_problem(resolved, _module_of(model, resolved), own.samples, objective, own.axes)
        if hasattr(getattr(chosen, "parts", chosen), "depths"):
            warn_of_one_layer(found.model)
        return dataclasses.replace(found, **brought)

    return Request(resolved, chosen, problem)


def _module_of(model: nn.Module | str | None, settings: Settings) -> nn.Module:
    """The module that a run trains: a ready task's, what a user's function returns, or the user's own."""
    from fedpmt.own import load_module, load_task

    if model is None:
        return load_task(settings)
    return load_module(model, settings.seed) if isinstance(model, str) else model


def with_model(
    settings: Mapping[str, Any], model: nn.Module | str | None, layers: Layers | None
) -> tuple[dict[str, Any], nn.Module | str | None]:
    """Settings that name a user's model and layers, and the model; None for a net of the paper or a ready task."""
    given = dict(settings)
    named, listed = given.pop("model", None) or None, given.pop("layers", None) or None
    model, layers = named if model is None else model, listed if layers is None else layers
    if model is None:
        if given.get("task") == OWN_TASK:
            raise SettingError(
                "this run's model was given in Python: continue it there, fedpmt.run(..., resume=True)"
            )
        own_only = {
            "layers": layers,
            "data": given.get("data") if is_own(str(given.get("data"))) else None,
        }
        for key, value in own_only.items():
            if value is not None:
                raise SettingError(
                    f"{key} = '{value}' needs a model of your own, model = package.module:function"
                )
        return given, None
    if given.get("task") not in (None, OWN_TASK):
        raise SettingError(f"task = '{given['task']}' is a net of its own; drop it, or drop the model")
    from fedpmt.own import check_model, write_layers

    check_model(model)

    given |= {"task": OWN_TASK, "layers": write_layers(layers)}
    return given | ({"model": model} if isinstance(model, str) else {}), model


def _with_samples(
    given: dict[str, Any], model: nn.Module | str | None, own: Own
) -> tuple[dict[str, Any], Own]:
    """Settings that say where a user's samples come from, and the samples; functions that are named are called."""
    named = given.get("clients") or None
    own = own if named is None or own.clients is not None else dataclasses.replace(own, clients=named)
    brought = {"clients": own.clients, "train": own.train, "test": own.test}
    if model is None:
        more = {**brought, "client": own.client, "label": own.label, "collate": own.collate}
        key = next((key for key, value in more.items() if value is not None), None)
        if key is not None:
            raise SettingError(f"{key} needs a model of your own: a paper task has its own samples")
        return given, own
    data = given.get("data") if given.get("data") not in (None, OWN_DATA) else None
    sources = [key for key, value in {**brought, "data": data}.items() if value is not None and key != "test"]
    if len(sources) != 1:
        there = f"there are {' and '.join(sources)}" if sources else "there is none"
        raise SettingError(
            "a model of your own needs one of train, clients, or data "
            f"(a data set or package.module:function): {there}"
        )
    from fedpmt.own import load_samples

    if isinstance(own.clients, str):
        given["clients"] = own.clients
        own = dataclasses.replace(own, **load_samples("clients", own.clients, own.test))
    elif data is not None:
        if own.test is not None:
            raise SettingError(f"test cannot be combined with data = '{data}', which has its own")
        if not is_own(str(data)):
            return given, own
        own = dataclasses.replace(own, **load_samples("train", str(data), data_dir=given.get("data_dir")))
    samples = own.samples
    assert samples is not None
    if data is None:
        given["data"] = OWN_DATA
    if not len(samples.test) and not given.get("held_out"):
        raise SettingError("test: there is no test set; give test, or let devices keep a share with held_out")
    return with_sizes(given, samples), own


def with_sizes(given: Mapping[str, Any], samples: LoadedDataset) -> dict[str, Any]:
    """Settings with a device for each owner of samples and their mean number, where nothing else is said."""
    if samples.owners is None or given.get("partition") not in (None, "natural"):
        return dict(given)
    from fedpmt.data.clients import mean_size

    share = float(given.get("held_out") or 0)
    usual = {"devices": len(samples.owners.names), "samples": mean_size(samples, share)}
    unsaid = {key: value for key, value in usual.items() if given.get(key) is None}
    return {**given, "partition": "natural", **unsaid}


def _with_transform(given: dict[str, Any], own: Own) -> dict[str, Any]:
    """Settings under which outputs of frozen layers are not kept, where each batch is another one or must be read."""
    from fedpmt.data.lazy import is_read

    read = own.samples is not None and is_read(own.samples.train)
    why = (
        "transform makes another batch each time"
        if own.transform is not None
        else "samples are read batch by batch"
    )
    if own.transform is None and not read:
        return given
    for key, wanted in (("prefix", ("cache", "streamed")), ("prefix_tolerance", None)):
        value = given.get(key)
        if value is not None and (wanted is None or value in wanted):
            raise SettingError(
                f"{key.replace('_', '-')} = '{value}' is refused: {why}, "
                "so outputs of frozen layers cannot be kept"
            )
    named = getattr(own.transform, "__qualname__", own.transform)
    digest = given.get("digest", "") + ("" if own.transform is None else f"transform={named};")
    return {**given, "prefix": "recompute", "digest": digest}


def own_training(
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], Optimizer | None, Callable[[int], float] | None]:
    """Settings in which a user's own optimizer and schedule are words, and these two."""
    given, optimizer, rate = dict(settings), settings.get("optimizer"), settings.get("schedule")
    for key, value in (("optimizer", optimizer), ("schedule", rate)):
        if value == CUSTOM:
            raise SettingError(f"{key} = '{CUSTOM}' stands for a function, which only Python can give")
        if value is not None and not isinstance(value, str):
            given[key] = CUSTOM
            given["digest"] = f"{given.get('digest', '')}{key}={getattr(value, '__qualname__', value)};"
    found = None if optimizer is None or isinstance(optimizer, str) else optimizer
    if found is not None and not isinstance(found, Optimizer):
        found = Custom(found)
    return given, found, None if rate is None or isinstance(rate, str) else rate


def _objective_of(named: str | None, loss: Loss | None) -> str:
    """What the settings call the objective: a loss alone is the user's own."""
    if named == CUSTOM and loss is None:
        raise SettingError(f"objective = '{CUSTOM}' stands for a loss, which only Python can give")
    return named or ("classification" if loss is None else CUSTOM)


def _settings_of_value(method: Method[Any, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a method given as a value stands for: its name, its own options, and what it shares."""
    given: dict[str, Any] = {"method": name_of(method), "options": {}}
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if field.name == "server":
            theirs = {key: one for key, one in settings.items() if key.startswith("server_o")}
            if value != field.default and theirs:
                raise SettingError(
                    f"{type(method).__name__} was made with server={value}; drop server_optimizer"
                )
            given |= server_settings(value) if value != field.default else {}
        elif field.name not in SHARED:
            if value == field.default:
                continue
            if isinstance(value, str | int | float):
                given["options"][field.name] = value
            else:
                # It has no name that a file could hold: the run is only ever resumed with its like.
                given["digest"] = f"{settings.get('digest', '')}{field.name}={value!r};"
        elif settings.get(field.name) is None:
            given[field.name] = value
        elif value not in (field.default, settings[field.name]):
            raise SettingError(
                f"{field.name} = '{settings[field.name]}', but {type(method).__name__} was made with '{value}'"
            )
    return given


def _shared_fields(settings: Settings, method: Method[Any, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    return {key: value for key, value in shared_of(settings).items() if key in names}


def _under_budget(method: Method[Any, Any]) -> Method[Any, Any]:
    """The method with those of its settings on which a budget can act, where it has defaults there."""
    defaults = {field.name: field.default for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    changed = {
        name: value
        for name, value in method.traits.under_budget.items()
        if getattr(method, name) == defaults[name]
    }
    return dataclasses.replace(method, **changed)  # type: ignore[type-var]


def options_for(method: str, options: Mapping[str, Any], others: Sequence[str] = ()) -> dict[str, Any]:
    """The options meant for one method: METHOD.KEY, `method.KEY`, or a bare KEY; a class is also called class.KEY.

    >>> options_for("feddrop", {"feddrop.scope": "all", "scaling": "true"})
    {'scope': 'all', 'scaling': 'true'}
    """
    chosen = {}
    for key, value in options.items():
        owner, dot, name = key.rpartition(".")
        if not dot and name not in fields(method) and any(name in fields(other) for other in others):
            continue  # meant for another of the methods that are compared
        if not dot or owner in (method, "method", short_name(method)):
            chosen[name] = value
        elif owner not in others and owner not in map(short_name, others):
            known = [method, *others] if owner in METHODS else method_names()
            raise SettingError.unknown("set: method", owner, known)
    return chosen


def slug(text: str) -> str:
    """A name for a folder.

    >>> slug("my.methods:Blocks"), slug("compare-fcnn-mnist-classes:2")
    ('my.methods-Blocks', 'compare-fcnn-mnist-classes-2')
    """
    return re.sub(r"[^\w.]+", "-", text).strip("-")


HELD_OUT = {"public": "holdout:0.1", "validation": 0.01}
"""What is held out for methods that need it, where nothing is said."""


def with_public(given: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Settings with the public and validation data that these methods need; what is said stays."""
    filled, traits = dict(given), [method_class(name)().traits for name in methods]
    if filled.get("public") is None and any(one.needs_public for one in traits):
        filled["public"] = HELD_OUT["public"]
    if filled.get("validation") is None and any(one.needs_validation for one in traits):
        filled["validation"] = HELD_OUT["validation"]
    return filled


def with_events(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the clock of events for a method that usually runs on it; what is said stays."""
    events = method_class(str(given.get("method") or "fedpmt"))().traits.events
    if not events or given.get("clock") not in (None, "events"):
        return dict(given)
    said = {key: value for key, value in given.items() if value is not None}
    rules = {"buffer", "step_every"}
    return {
        "clock": "events",
        **{key: value for key, value in events.items() if not (key in rules and rules & set(said))},
        **said,
    }


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Resolve settings; a fleet says how many devices there are."""
    given = _with_tables(given)
    given = with_public(given, [str(given.get("method") or "fedpmt")])
    given = with_events(given)
    if given.get("weights") not in (None, "", PRETRAINED, RANDOM):
        given |= _with_weights(given)
    settings = resolve(given)
    settings = settings.model_copy(update={"options": typed_options(settings.method, settings.options)})
    if given.get("samples") is None:
        settings = _with_samples_for_split(settings)
    if settings.budget is None:
        return settings
    # In the record, so that it says what ran.
    options = {**method_class(settings.method)().traits.under_budget, **settings.options}
    return settings.model_copy(update={"options": options})


def _with_tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which the fleet and the traces are files, remembered by their content, or the text of a CSV."""
    given = dict(settings)
    tables = [key for key in ("fleet", "availability_trace", "speed_trace") if given.get(key) is not None]
    if not tables:
        return given
    from fedpmt.devices.rows import read_devices, write_devices
    from fedpmt.devices.tables import is_file
    from fedpmt.devices.traces import write_trace

    for key in tables:
        source = given[key]
        if key == "fleet":
            devices = read_devices(source)
            text = write_devices(devices)
            if given.get("devices") is None:
                given["devices"] = sum(device.count for device in devices)
        else:
            text = write_trace(key, source)
        given[key] = str(Path(source).absolute()) if is_file(source) else text
        if is_file(source):
            content = hashlib.sha256(Path(source).read_bytes()).hexdigest()
            before = str(given.get("digest", ""))
            given["digest"] = before if content in before else before + content
    return given


def _with_weights(given: Mapping[str, Any]) -> dict[str, str]:
    """The path of a weights file, and the digest with its content in it."""
    path = Path(str(given["weights"])).expanduser().absolute()
    try:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise SettingError(f"weights = '{given['weights']}' cannot be read: {error.strerror}") from error
    before = str(given.get("digest", ""))
    return {"weights": str(path), "digest": before if content in before else before + content}


def _with_samples_for_split(settings: Settings) -> Settings:
    """Lower the default number of samples per device until the split can be met.

    What is held out is not an equal part of all classes, and a split by classes needs enough of each. The number stands
    in the settings, and so in the record.
    """
    held_out = settings.public.startswith("holdout") or settings.validation > 0
    if not (held_out and settings.partition.startswith("classes") and settings.data in with_samples()):
        return settings
    from fedpmt.data.datasets import load
    from fedpmt.data.partition import most_samples
    from fedpmt.data.public import hold_out

    targets = load(settings.data, settings.data_dir).train.targets
    rows = hold_out(settings.public, settings.validation, len(targets), settings.partition_seed)
    kept = targets if rows is None else targets[rows.kept]
    most = most_samples(settings.partition, kept, settings.devices, settings.samples)
    return settings.model_copy(update={"samples": most})


def shared_of(settings: Settings) -> dict[str, Any]:
    """What a method takes from the run where it has a field of that name."""
    shared: dict[str, Any] = {
        "depths": settings.depths,
        "splitting": settings.splitting,
        "plan": settings.plan,
        "mean": settings.mean,
        "server": make_server(
            settings.server_optimizer,
            settings.server_lr,
            settings.server_momentum,
            settings.server_nesterov,
            settings.server_beta2,
            settings.server_tau,
        ),
    }
    if settings.depths is None and settings.task in NETS:
        shared["depths"] = net(settings.task).depths[0]
    return shared


def method_of(settings: Settings) -> Method[Any, Any]:
    """The method that settings name; fields it shares with the run take the run's values."""
    return create(settings.method, settings.options, shared_of(settings))


def _check_method(settings: Settings, chosen: Method[Any, Any]) -> None:
    """Refuse settings that the method cannot be combined with."""
    used, name = chosen.traits, settings.method
    if settings.splitting == "device" and used.needs_speeds:
        raise SettingError(f"splitting = 'device': {name} needs speeds that the server does not know then")
    if used.fitted_net and settings.level_draw == "round":
        raise SettingError(
            f"level-draw = 'round': {name} keeps a net on each device that fits its level (allowed: fixed)"
        )
    if used.fitted_net and settings.speeds == "measured":
        raise SettingError(
            f"speeds = 'measured': {name} keeps a net on each device that fits its stated speed (allowed: stated)"
        )
    if settings.dp_clip is not None and (used.needs_losses or used.sends_more):
        why = (
            "learns from losses, which would travel too"
            if used.needs_losses
            else "sends more than its update"
        )
        raise SettingError(f"dp-clip = {settings.dp_clip:g}: {name} {why}")
    if used.optimizers is not None and settings.optimizer not in used.optimizers:
        raise SettingError(
            f"optimizer = '{settings.optimizer}' cannot be combined with {name} as it is set "
            f"(allowed: {', '.join(used.optimizers)})"
        )
    _check_clock(settings, chosen)
    _check_shared(settings, chosen)
    if used.needs_public and settings.public == "none":
        raise SettingError(f"public = 'none': {name} needs public data (e.g. {HELD_OUT['public']})")
    if used.needs_validation and settings.score_on == "validation":
        raise SettingError(f"score-on = 'validation': {name} trains with these samples (allowed: test)")


def check(
    settings: Settings, *, method: Method[Any, Any] | None = None, score_name: str | None = ACCURACY
) -> None:
    """Refuse what can be known to be wrong before torch or data is loaded.

    A method may be given as a value; `score_name` is None where it is not known yet what a target is of.
    """
    from fedpmt.data.partition import check_spec
    from fedpmt.data.public import check_public
    from fedpmt.devices.fleet import make_fleet
    from fedpmt.devices.traces import check_traces

    _check_method(settings, method or method_of(settings))
    check_spec(settings.partition, settings.amounts)
    check_public(settings.public, settings.data)
    fleet = make_fleet(settings)
    check_traces(settings)
    if settings.limits is not None:
        settings.limits.check_levels(str(settings.budget), len(fleet.level_speeds))
        settings.limits.check_watts(str(settings.budget), stated=fleet.watts is not None)
    if score_name is not None:
        check_target(settings.target, score_name)
    if settings.task in NETS:
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


def _check_clock(settings: Settings, method: Method[Any, Any]) -> None:
    """Refuse methods that need an interval without one, and those that need rounds on the clock of events."""
    from fedpmt.methods.averaging import why_rounds

    name = settings.method
    if "step_every" in method.traits.events and settings.step_every is None:
        raise SettingError(f"{name} needs clock = 'events' and an interval (e.g. step-every = 30)")
    why = why_rounds(method)
    if why and settings.clock == "events":
        raise SettingError(f"clock = 'events' cannot be combined with {name}: {why}")


def _check_shared(settings: Settings, method: Method[Any, Any]) -> None:
    """Refuse settings of a method's fields where it has none of that name."""
    from fedpmt.methods.averaging import PLAIN

    name, taken = settings.method, _shared_fields(settings, method)
    if settings.server_optimizer != "none" and "server" not in taken:
        raise SettingError(
            f"server-optimizer = '{settings.server_optimizer}' cannot be combined with {name}: "
            "it does not average parts"
        )
    if settings.mean != PLAIN and "mean" not in taken:
        raise SettingError(
            f"mean = '{settings.mean}' cannot be combined with {name}: its server does not only average parts"
        )
    normalise = getattr(method, "normalise", "none")
    if settings.mean != PLAIN and normalise != "none":
        raise SettingError(f"mean = '{settings.mean}' cannot be combined with {name}.normalise = {normalise}")
    if settings.plan != "paper" and "plan" not in taken:
        raise SettingError(f"plan = '{settings.plan}' is FedPMT's; {name} has no plan to choose")


def task_problem(settings: Settings) -> Problem:
    """A net of the paper or a ready task, with its data loaded and spread."""
    if settings.task in NETS:
        return paper_problem_of(settings)
    from fedpmt.own import load_task
    from fedpmt.training.objective import CLASSIFICATION

    return own_problem(settings, load_task(settings), None, CLASSIFICATION)


def paper_problem_of(settings: Settings) -> Problem:
    """One of the paper's tasks, with its data loaded and spread."""
    from fedpmt.data.federated import federate
    from fedpmt.simulation.problem import paper_problem

    shape = net(settings.task).input_shape
    data = federate(settings.data, input_shape=shape, **spread_of(settings))
    return paper_problem(settings, data)


def spread_of(settings: Settings) -> dict[str, Any]:
    """How samples are spread over the fleet, as arguments of `federate`."""
    keys = ("partition", "partition_seed", "devices", "samples", "data_dir", "public", "validation")
    return {key: getattr(settings, key) for key in (*keys, "amounts", "held_out")}


def own_problem(
    settings: Settings,
    model: nn.Module,
    samples: LoadedDataset | None,
    objective: Objective,
    axes: Declared | None = None,
) -> Problem:
    """A user's own module, on samples of the user's or on the data set that the settings name."""
    import numpy as np

    from fedpmt.data.federated import federate, federate_dataset
    from fedpmt.own import find_layers
    from fedpmt.simulation.problem import Problem, try_out
    from fedpmt.training.batches import placed

    if samples is None:
        data = federate(settings.data, **spread_of(settings))
    else:
        if settings.objective == "regression":
            samples = dataclasses.replace(samples, classes=None)  # whole numbers are values
        data = federate_dataset(samples, **spread_of(settings))
    example = placed(data.test.take(np.arange(2) % len(data.test))).inputs
    problem = Problem(find_layers(model, example, settings, axes), data, objective)
    try_out(problem, settings)
    return problem


def start(
    request: Request,
    folder: Path,
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    on_start: Callable[[], None] | None = None,
    keep_diverged: bool = False,
    keep_idle: bool = False,
) -> Run:
    """Run in this folder. It is written first; what turns out to be impossible takes a new one away again.

    Args:
        request: What to run.
        folder: Where its records go.
        resume: Whether to continue the run that is there.
        on_round: Called with the record of each round, as by `run`.
        on_start: Called when nothing stands in the way of the first round any more.
        keep_diverged: Whether a run that diverges is finished as what it is, instead of raising `DivergedError`.
        keep_idle: Whether a method that no device can keep the deadline with is run all the same, to be compared.
    """
    missing = [parent for parent in folder.absolute().parents if not parent.exists()]
    made = open_folder(folder, request.settings, resume=resume)
    if not is_finished(folder, request.settings):
        with exclusive(folder):
            try:
                simulate(
                    request.settings,
                    request.problem(),
                    request.method,
                    folder,
                    on_round,
                    on_start,
                    keep_diverged=keep_diverged,
                    keep_idle=keep_idle,
                )
            except SettingError:
                if made:
                    shutil.rmtree(folder, ignore_errors=True)
                    for parent in missing:
                        with contextlib.suppress(OSError):
                            parent.rmdir()
                raise
    return read_run(folder)


def request_of(settings: Settings) -> Request:
    """A run of a net of the paper or of a ready task, from settings that are resolved already."""
    check(settings)
    return Request(settings, method_of(settings), lambda: task_problem(settings))


def restamp(run: RunRecord, settings: Settings) -> RunRecord | None:
    """A finished run of a task of the library under another clock; None where it would have to be trained again."""
    from fedpmt.simulation.predict import restamp_run

    return restamp_run(run, settings, unfilled_problem(settings), method_of(settings))


def predict(request: Request, out: str | Path = ".") -> dict[str, Any]:
    """What a run in this folder will cost, without training; nothing is written there."""
    from fedpmt.simulation.predict import predict as predicted

    return predicted(request.settings, request.problem(), request.method, Path(out))


_UNFILLED = {"data": "synthetic", "partition": "iid", "public": "none", "validation": 0.0}


def unfilled_problem(settings: Settings) -> Problem:
    """One of the library's tasks on made-up samples: prices and times do not depend on what is learned."""
    if settings.task in TASKS:
        from fedpmt.own import example_problem, load_example, load_task

        untrained = settings.model_copy(update={"weights": RANDOM})
        example = load_example(settings.data)
        return example_problem(load_task(untrained), example, settings, settings.samples)
    return paper_problem_of(settings.model_copy(update={**_UNFILLED, "devices": 1}))
