"""Processes that train devices by autograd, which in threads would wait for the interpreter's lock.

They are forked once. So they have the model, the data and every function of the user's without a pickle, and
what the server sends to its devices lies in memory that all of them see.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import traceback
import warnings
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedpmt.simulation.parcels import Arena, Outbox, Parcel, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkProcess

    from fedpmt.simulation.executors import PathsTaken, Unit
    from fedpmt.training.messages import Reply

MESSAGE = struct.Struct("<4q")
"""The unit's number, its outbox, and the parcel: small enough for a pipe to pass on whole, to any reader."""

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
KEEP = ((-1, 2**30), (-3, 2**25))
"""Of mallopt(3): the most free memory to keep, and the largest tensors to take from it (glibc allows no more)."""

HUGE_PAGES = 14  # MADV_HUGEPAGE of madvise(2)
RESERVED, CHUNK = (
    2**28,
    2**24,
)  # bytes of the heap that may lie in huge pages; those never touched take no memory

Answer = tuple["Reply", Any, "PathsTaken"]


def can_fork(device: torch.device) -> bool:
    """Whether local training may run in forked processes here.

    Only Linux forks safely. Autograd refuses to run in a fork where there is an accelerator, and Python does in a
    daemonic process, such as one of a `multiprocessing.Pool`.
    """
    return (
        sys.platform == "linux"
        and device.type == "cpu"
        and not torch.cuda.is_available()
        and not multiprocessing.current_process().daemon
    )


class Workers:
    """Forked processes that take units from one pipe, each when it is free, and answer through another."""

    def __init__(self, compute: Callable[[Unit], Answer], count: int, known: tuple[object, ...] = ()) -> None:
        """Fork them; objects that are `known` are not sent with the units that hold them."""
        self._compute, self._known = compute, known
        self._inbox = Outbox(Arena())
        self._answers = [Arena() for _ in range(2 * count)]
        self._idle = list(range(2 * count))  # of these arenas
        self._sent: dict[int, tuple[Unit, Parcel]] = {}
        self._done: dict[int, Answer | BaseException] = {}
        self._numbers = iter(range(sys.maxsize))
        (tasks, sending), (receiving, replies) = os.pipe(), os.pipe()
        self._tasks, self._replies = _read(tasks), _write(replies)  # the workers' ends
        self._sending, self._receiving = _write(sending), _read(receiving)  # ours
        self._processes: list[ForkProcess] = []
        self.closed = False
        try:
            self._start(count)
        except BaseException:
            self.close()
            raise

    def submit(self, unit: Unit) -> int:
        """Send a unit, once there is room for its answer; two per worker may be on their way."""
        with self._closing():
            while not self._idle:
                self._receive()
            return self._send(unit)

    def take(self, number: int) -> Answer:
        """The answer to the unit of this number, once."""
        with self._closing():
            while number not in self._done:
                self._receive()
            if not self._sent:
                self._inbox.clear()
            found = self._done.pop(number)
            if isinstance(found, BaseException):
                raise found
            return found

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Whatever goes wrong, also Ctrl-C, may have left half a message."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all workers at once; they hold nothing that anybody misses."""
        if self.closed:
            return
        self.closed = True
        for process in self._processes:
            process.kill()
        for end in (self._tasks, self._replies, self._sending, self._receiving):
            end.close()
        for process in self._processes:
            process.join()
            process.close()
        for arena in (self._inbox.arena, *self._answers):
            arena.close()

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("fork")
        with warnings.catch_warnings(), _uninterrupted():
            # Python warns where there are threads. Those of torch and of the executor are at rest.
            warnings.simplefilter("ignore", DeprecationWarning)
            for index in range(count):
                process = context.Process(target=self._serve, name=f"device-{index}", daemon=True)
                process.start()
                self._processes.append(process)
        self._tasks.close()
        self._replies.close()

    def _send(self, unit: Unit) -> int:
        number, parcel = next(self._numbers), self._inbox.pack(unit, self._known)
        self._sent[number] = unit, parcel
        try:
            self._sending.write(MESSAGE.pack(number, self._idle.pop(), *parcel))
        except BrokenPipeError:
            raise self._death() from None
        return number

    def _receive(self) -> None:
        replies = self._receiving.fileno()
        ready = wait([replies, *(process.sentinel for process in self._processes)])
        message = self._receiving.read(MESSAGE.size) if replies in ready else None
        if not message:
            raise self._death()
        number, index, *place = MESSAGE.unpack(message)
        unit, parcel = self._sent.pop(number)
        self._inbox.forget(parcel)
        self._done[number] = unpack(self._answers[index], Parcel(*place), (unit.part,), own=True)
        self._idle.append(index)

    def _death(self) -> ChildProcessError:
        """Say how a worker ended that should still be there."""
        ended = wait([process.sentinel for process in self._processes])
        dead = next(process for process in self._processes if process.sentinel in ended)
        dead.join()
        code = dead.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "; often memory has run out: fewer workers need less" if code == -signal.SIGKILL else ""
        return ChildProcessError(f"a worker process {how}{hint}")

    def _serve(self) -> None:
        """Compute units, in a process of one's own, for as long as there is a parent."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if hasattr(libc, "mallopt"):
            _hold_memory(libc)
        self._sending.close()
        self._receiving.close()
        torch.set_num_threads(1)
        while message := self._tasks.read(MESSAGE.size):
            number, index, *place = MESSAGE.unpack(message)
            parcel = self._answer(Parcel(*place), Outbox(self._answers[index]))
            sys.stdout.flush()
            self._replies.write(MESSAGE.pack(number, index, *parcel))

    def _answer(self, parcel: Parcel, outbox: Outbox) -> Parcel:
        outbox.clear()
        try:
            unit: Unit = unpack(self._inbox.arena, parcel, self._known, own=False)
            return outbox.pack(self._compute(unit), (unit.part,))
        except BaseException as error:
            return outbox.pack(_portable(error))


def _hold_memory(libc: ctypes.CDLL) -> None:
    """Keep the memory of one step for the next, which saves a tenth of a ResNet's step, and let it lie in huge pages.

    The latter saves another twentieth. Where the kernel has none to give, nothing changes.
    """
    for option, value in KEEP:
        libc.mallopt(option, value)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    for piece in [libc.malloc(CHUNK) for _ in range(RESERVED // CHUNK)]:
        libc.free(piece)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), HUGE_PAGES)


def _read(end: int) -> FileIO:
    return FileIO(end, "r")


def _write(end: int) -> FileIO:
    return FileIO(end, "w")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block Ctrl-C: for good in processes that are forked meanwhile, as the parent is the one to end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _portable(error: BaseException) -> BaseException:
    """The error with the worker's traceback as a note; one that cannot be pickled becomes a RuntimeError."""
    note = "In a worker process:\n" + "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was made here
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error
