"""The runs that experiments are made of: found among the kept records, or played, several at a time.

Kept records are one archive per results page. A run that several pages need is kept once, in the archive of the page
that played it. While a page is being played its finished runs lie next to the archives as single files, so that a kill
loses none of them; `Library.pack` puts them into the archive.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedpmt import api, records
from fedpmt.cli.show import say
from fedpmt.settings import Settings
from fedpmt.types import SettingError
from reproduction import archive
from reproduction.archive import RUN_SUFFIX, thick, thin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from fedpmt.records import RunRecord


POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Status:
    """How far a batch of runs is."""

    runs: int
    done: int
    running: tuple[str, ...]
    share: float  # of all rounds, by what they cost
    seconds: float  # since the start

    @property
    def left(self) -> float | None:
        """Seconds still needed at this pace; None while nothing is known."""
        return self.seconds * (1 - self.share) / self.share if self.share > 0 else None


class Library:
    """Finished runs in archives in one folder, unfinished ones as run folders in another."""

    def __init__(self, kept: Path, work: Path, jobs: int | None = None) -> None:
        self._kept, self._work = kept, work
        self._jobs = jobs or os.cpu_count() or 1
        self._places: dict[str, Path] | None = None  # a run's name -> its archive
        self._unpacked: dict[Path, dict[str, bytes]] = {}

    def find(self, settings: Settings) -> RunRecord | None:
        """A run with these settings; None where it was never finished."""
        member = f"{name_of(settings)}{RUN_SUFFIX}"
        single = self._kept / member
        if single.exists():
            return thick(single.read_bytes(), single)
        place = self._archives().get(member)
        if place is None:
            return None
        if place not in self._unpacked:
            self._unpacked[place] = archive.read(place)
        return thick(self._unpacked[place][member], self._kept / member)

    def missing(self, wanted: Iterable[Settings]) -> list[Settings]:
        """Those that were never finished, each once."""
        unique = {f"{name_of(settings)}{RUN_SUFFIX}": settings for settings in wanted}
        there = self._archives()
        return [
            one
            for member, one in unique.items()
            if member not in there and not (self._kept / member).exists()
        ]

    def pack(self, page: str, wanted: Iterable[Settings]) -> Path | None:
        """Put those of these runs that are still single files into the archive of a page.

        Returns:
            The archive, or None where there was nothing to put into it.
        """
        files = {f"{name_of(settings)}{RUN_SUFFIX}" for settings in wanted}
        singles = [path for name in sorted(files) if (path := self._kept / name).exists()]
        if not singles:
            return None
        place = self._kept / f"{page}{archive.SUFFIX}"
        with _alone(self._kept):
            members = archive.read(place) if place.exists() else {}
            archive.write(place, members | {path.name: path.read_bytes() for path in singles})
        for path in singles:
            path.unlink(missing_ok=True)
        self._places, self._unpacked = None, {}
        return place

    def play(self, wanted: Iterable[Settings], report: Callable[[Status], None] | None = None) -> None:
        """Play what is missing, one run per core; what an interrupt leaves is continued by the next call."""
        waiting = self.missing(wanted)
        if not waiting:
            return
        self._kept.mkdir(parents=True, exist_ok=True)
        weights = {name_of(one): one.rounds * _round_weight(one) for one in waiting}
        # A spawned process has its own torch, set to one thread, and shares nothing with this one.
        context = multiprocessing.get_context("spawn")
        begun, done = time.monotonic(), 0
        running: dict[Future[None], Settings] = {}
        workers = min(self._jobs, len(waiting))
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < self._jobs:
                        settings = waiting.pop(0)
                        running[pool.submit(_play, settings, self._folder(settings))] = settings
                    finished, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in finished:
                        settings = running.pop(future)
                        future.result()
                        self._keep(settings)
                        done += 1
                    if report is not None:
                        parts = {name_of(one): self._played(one) for one in running.values()}
                        rest = sum(weights[name_of(one)] for one in waiting)
                        rest += sum(weights[name] * (1 - part) for name, part in parts.items())
                        share = 1 - rest / sum(weights.values())
                        seconds = time.monotonic() - begun
                        report(Status(len(weights), done, tuple(parts), share, seconds))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _archives(self) -> dict[str, Path]:
        if self._places is None:
            paths = sorted(self._kept.glob(f"*{archive.SUFFIX}"))
            self._places = {name: path for path in paths for name in archive.names(path)}
        return self._places

    def _folder(self, settings: Settings) -> Path:
        return self._work / name_of(settings)

    def _played(self, settings: Settings) -> float:
        path = self._folder(settings) / records.ROUNDS
        return path.read_bytes().count(b"\n") / settings.rounds if path.exists() else 0.0

    def _keep(self, settings: Settings) -> None:
        folder = self._folder(settings)
        run = records.read_run(folder)
        stored = {key: value for key, value in run.settings.items() if key not in records.EXECUTION}
        data = thin(run.model_copy(update={"settings": stored}))
        records.write_atomically(self._kept / f"{name_of(settings)}{RUN_SUFFIX}", data)
        shutil.rmtree(folder, ignore_errors=True)


def name_of(settings: Settings) -> str:
    """A name that tells runs apart: in words what matters most, and a fingerprint of what is not a default."""
    return stored_name(settings.identity())


def stored_name(settings: Mapping[str, Any]) -> str:
    """The name of a run, by the settings in its record."""
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    # Defaults are left out, so that a setting added later leaves old names as they are.
    told = {key: value for key, value in settings.items() if value != defaults[key]}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:10]
    words = "{method}-{task}-{data}-{partition}-seed{seed}".format_map(settings)
    return f"{re.sub(r'[^a-z0-9.]+', '-', words.lower())}-{digest}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process changes the archives of a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _end_with_parent() -> None:
    """A worker whose parent was killed ends too: nobody would keep what it plays, and it would hold the folder."""
    parent = multiprocessing.parent_process()

    def watch(sentinel: int) -> None:
        wait_for([sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()


def _play(settings: Settings, folder: Path) -> None:
    """One run in a process of its own, continued where it was left; one that diverges stops no other."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    alone = settings.model_copy(update={"workers": 1})
    api.start(api.request_of(alone), folder, resume=folder.exists(), keep_diverged=True, keep_idle=True)


OTHER_NETS = 1e6
"""Multiply-adds of a sample that are assumed of nets other than the paper's, so that both can stand in one batch."""


def _round_weight(settings: Settings) -> float:
    """What a round takes in proportion to others: enough for telling the time left."""
    from fedpmt.models.nets import NETS, net

    if settings.task not in NETS:
        return float(settings.cohort * settings.samples * settings.epochs * OTHER_NETS)
    shape = net(settings.task)
    work: Any = 1.0
    size, channels = shape.input_shape[1], shape.input_shape[0]
    for filters in shape.filters:
        size -= 4
        work += channels * filters * 25 * size**2
        size, channels = size // 2, filters
    features = channels * size**2
    for units in (*shape.hidden, shape.classes):
        work += features * units
        features = units
    return float(settings.cohort * settings.samples * settings.epochs * work)


LINE_SECONDS = 30.0
"""Without a terminal a line is printed this often."""


@contextmanager
def progress(runs: int) -> Iterator[Callable[[Status], None]]:
    """Show runs as they are played: done, running, time left."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]} of {task.fields[runs]} runs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0, done=0, runs=runs, left="")

        def report(standing: Status) -> None:
            running = ", ".join(standing.running)
            bar.update(
                task,
                completed=standing.share,
                description=running if len(running) < 60 else f"{len(standing.running)} running",
                done=standing.done,
                left=_left(standing.left),
            )

        yield report


def _lines() -> Callable[[Status], None]:
    last = -LINE_SECONDS

    def report(standing: Status) -> None:
        nonlocal last
        if standing.seconds - last < LINE_SECONDS and standing.done < standing.runs:
            return
        last = standing.seconds
        parts = [
            f"{standing.done} of {standing.runs} runs",
            f"{standing.seconds:.0f} s",
            _left(standing.left),
        ]
        parts += [f"running {', '.join(standing.running)}"] if standing.running else []
        say(", ".join(filter(None, parts)))

    return report


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"about {_clock(seconds)} left"


def _clock(seconds: float) -> str:
    """A time a person waits.

    >>> _clock(59), _clock(3700)
    ('59 s', '62 min')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


SETTINGS = {"widths": "depths"}
"""Settings that were renamed, old name to new. Whoever renames a setting or a field of a record adds it here, runs
`python -m reproduction migrate` once, and commits the archives."""

OPTIONS = {
    "fedgkt": {"epochs": "server_epochs", "weight_decay": "adam_decay", "optimizer": "device_optimizer"},
    "fedgen": {"weight_decay": "adam_decay"},
    "feddf": {"optimizer": "student_optimizer"},
}
"""Options that were renamed, by method, old name to new."""

FORMER: dict[str, dict[str, Any]] = {"fedgkt": {"rate": 0.001}}
"""Defaults that have changed, by method: a record that does not name them was made with these."""

SCORED = ("result", "rounds", "last")
"""The parts of a kept record in which a score stands."""

LABELS = {"fedpmt": ("width ", "depth ")}
"""Labels of parts that were renamed, by method: how they began, and how they begin now."""


def migrate(kept: dict[str, Any]) -> dict[str, Any]:
    """Give a kept record (the JSON of `reproduction.archive`) today's names.

    >>> devices = {"part": [["width 2", "width 1"]]}
    >>> migrate({"settings": {"method": "fedpmt", "widths": 4}, "devices": devices})
    {'settings': {'method': 'fedpmt', 'depths': 4}, 'devices': {'part': [['depth 2', 'depth 1']]}}
    """
    kept = {key: records.migrate(value) if key in SCORED else value for key, value in kept.items()}
    settings = {SETTINGS.get(key, key): value for key, value in kept["settings"].items()}
    if "options" in settings:
        renamed = OPTIONS.get(settings["method"], {})
        given = {renamed.get(key, key): value for key, value in settings["options"].items()}
        settings["options"] = {**FORMER.get(settings["method"], {}), **given}
    devices = dict(kept["devices"])
    old, new = LABELS.get(settings["method"], ("", ""))
    devices["part"] = [
        [new + label.removeprefix(old) if label.startswith(old) else label for label in labels]
        for labels in devices["part"]
    ]
    return {**kept, "settings": settings, "devices": devices}


def migrate_archives(folder: Path) -> list[Path]:
    """Rewrite the archives of a folder; those that changed."""
    changed = []
    for path in sorted(folder.glob(f"*{archive.SUFFIX}")):
        before = archive.read(path)
        after: dict[str, bytes] = {}
        for name, data in before.items():
            kept = migrate(json.loads(data))
            member = f"{stored_name(kept['settings'])}{RUN_SUFFIX}"
            if member in after:
                raise SettingError(
                    f"{path} holds two runs that would both be called {member}, one of them {name}"
                )
            after[member] = archive.to_bytes(kept)
        if after != before:
            archive.write(path, after)
            changed.append(path)
    return changed
