"""Start one peer in its own environment and process, listen to it, and cut it off when a round takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from platformdirs import user_cache_dir

from benchmarks.results import cores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.peers.common import Job
    from benchmarks.results import Measurement


def cache_folder() -> Path:
    """Find the folder of environments and exported arrays, which is outside the repository."""
    return Path(user_cache_dir("fedpmt")) / "benchmarks"


def requirements(peer: str) -> list[str]:
    """List what pip installs. Peers that use PyTorch and transformers get the versions that ours runs on."""
    torch = f"torch=={version('torch').partition('+')[0]}"
    numpy = f"numpy=={version('numpy')}"
    transformers = f"transformers=={version('transformers')}"
    return {
        "plain": [torch, numpy, transformers],
        "flower": [torch, transformers, "flwr[simulation]==1.41.0"],
        "pfl": [torch, transformers, "pfl[pytorch]==0.6.0"],
        "fedjax": ["fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2"],
        "blazefl": [torch, numpy, transformers, "tqdm"],
        "appfl": [torch, numpy, transformers, *APPFL_NEEDS],
    }[peer]


APPFL_NEEDS = (
    "omegaconf", "wandb", "opacus", "colorama", "pandas", "scikit-learn", "matplotlib", "seaborn", "lz4", "zstd",
    "blosc", "python-xz", "pyyaml", "requests",
)  # fmt: skip
"""What the parts of APPFL that are measured import; all that it asks for would be 150 packages."""


def alone(peer: str) -> list[str]:
    """List what pip installs afterwards without its requirements, and why it cannot be asked for with them."""
    return {
        # 1.42.0 asks for certifi >= 2026.10.19, which not every index has. The requirements of 1.41.0 are
        # otherwise the same but for uv, which installs apps' requirements and is not used here.
        "flower": ["flwr==1.42.0"],
        # It says that it needs Python 3.12, which PyTorch's CPU build is not at hand for; its code runs on 3.11.
        "blazefl": ["--ignore-requires-python", "blazefl==2.0.3"],
        # Its requirements bring a torchvision that does not load next to every build of PyTorch.
        "appfl": ["appfl==1.12.0"],
    }.get(peer, [])


class CannotInstallError(RuntimeError):
    """An environment that could not be made; its text says which and why."""


def python_of(peer: str, folder: Path | None = None) -> Path:
    """Find the peer's python, in an environment made now or by an earlier run; ours is this one."""
    if peer == "ours":
        return Path(sys.executable)
    home = (folder or cache_folder()) / "environments" / peer
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = home / "requirements.json"
    wanted = json.dumps([requirements(peer), alone(peer)])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making an environment for {peer}: {', '.join(requirements(peer) + alone(peer))}", flush=True)
    _run(peer, [sys.executable, "-m", "venv", "--clear", str(home)])
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # All in one request, so that nothing that follows can bring in another PyTorch.
    _run(peer, [*install, *requirements(peer)])
    if alone(peer):
        _run(peer, [*install, "--no-deps", *alone(peer)])
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(peer: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise CannotInstallError(f"{peer} cannot be installed: {errors[-1] if errors else done.returncode}")


ROOT = Path(__file__).resolve().parent.parent
START_LIMIT = 300.0
"""Seconds until the first round must have ended: environments start slowly, and compilers compile in it."""
FAREWELL = 30.0
"""Seconds that a peer which has reported may take to end its workers."""

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "XLA_FLAGS", "NPROC")


@dataclass(frozen=True)
class Way:
    """One way of using the machine's cores."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)  # of the peer's script
    environment: dict[str, str] = field(default_factory=dict)
    processes: int = 1


def ways(peer: str, count: int | None = None) -> list[Way]:
    """The ways to try for a peer, the one most likely to be best first."""
    count = count or cores()
    torch_threads = [_torch(threads) for threads in sorted({1, count})]
    single = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1"}
    found = {
        "ours": [
            Way(f"{workers} workers", {"workers": workers}) for workers in sorted({count, 1}, reverse=True)
        ],
        "plain": torch_threads,
        "appfl": torch_threads,
        "pfl": [
            *(
                [Way(f"{count} processes of 1 thread", {"threads": 1}, {"OMP_NUM_THREADS": "1"}, count)]
                if count > 1
                else []
            ),
            *torch_threads,
        ],
        "flower": [
            Way(
                f"{count // cpus} clients of {cpus} CPU at a time",
                {"cpus": cpus},
                {"OMP_NUM_THREADS": str(cpus)},
            )
            for cpus in sorted({1, count})
        ],
        # Threads take turns in Python and run side by side in PyTorch; BlazeFL means them for free-threaded Python.
        "blazefl": [
            *(
                [
                    Way(
                        f"{count} {mode} of 1 thread",
                        {"mode": mode, "parallel": count, "threads": 1},
                        _omp(1),
                    )
                    for mode in ("processes", "threads")
                ]
                if count > 1
                else []
            ),
            *(
                Way(
                    f"1 client of {threads} threads at a time",
                    {"mode": "serial", "parallel": 1, "threads": threads},
                    _omp(threads),
                )
                for threads in sorted({1, count})
            ),
        ],
        # Its pmap backend calls functions that jax 0.10 no longer has.
        "fedjax": [Way("jit, XLA's own threads"), *([Way("jit, 1 thread", {}, single)] if count > 1 else [])],
    }
    return found[peer]


def _omp(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads)}


def _torch(threads: int) -> Way:
    return Way(f"{threads} threads", {"threads": threads}, _omp(threads))


def environment(way: Way, folder: str) -> dict[str, str]:
    """The variables of a peer's process: nothing of the caller's thread settings, nothing that goes online."""
    kept = {key: value for key, value in os.environ.items() if key not in THREAD_VARIABLES}
    return {
        **kept,
        **OFFLINE,
        **way.environment,
        "FLWR_HOME": folder,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "PYTHONWARNINGS": "ignore",
    }


def command(peer: str, python: Path, way: Way, job_file: Path) -> list[str]:
    """How a peer's script is started; `-P` keeps its folder, which has files named like packages, off the path."""
    module = f"benchmarks.peers.{peer}"
    if way.processes == 1:
        return [str(python), "-P", "-m", module, str(job_file)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={way.processes}"]
    return [str(python), "-P", *torchrun, "-m", module, str(job_file)]


def measure(
    peer: str,
    python: Path,
    way: Way,
    job: Job,
    blank: Measurement,
    limit: float,
    start_limit: float = START_LIMIT,
) -> Measurement:
    """Run one job of a peer; what goes wrong is in the measurement, not raised."""
    with (
        tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as folder,
        tempfile.TemporaryFile("w+") as errors,
    ):
        job_file = Path(folder) / "job.json"
        job_file.write_text(job.dump(), encoding="utf-8")
        process = subprocess.Popen(
            command(peer, python, way, job_file),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(way, folder),
            cwd=folder,
            start_new_session=True,
        )
        listener = Listener(cast("IO[str]", process.stdout))
        seconds: list[float] = []
        final: dict[str, Any] = {}
        cut_off = False
        try:
            for said in listener.lines(limit, max(limit, start_limit)):
                if said.get("round", 0) > 0:
                    seconds.append(said["seconds"])
                elif "steps" in said:
                    final = said
                    break
        except TimeoutError:
            cut_off = True
        finally:
            _end(process, patience=FAREWELL if final else 1)
            listener.close()
        failed = None
        if not final and not cut_off:
            errors.seek(0)
            failed = _last_error(errors.read()) or f"ended with code {process.returncode} and said nothing"
    update = {"seconds": seconds, "rounds": job.rounds, "cut_off": cut_off, "error": failed, **final}
    return blank.model_copy(update=update)


class Listener:
    """A peer's own lines, read by a thread of their own as they come."""

    def __init__(self, stream: IO[str]) -> None:
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._listen, args=(stream,), daemon=True)
        self._thread.start()

    def _listen(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if said := _parse(line):
                    self._said.put(said)
        self._said.put(None)

    def lines(self, limit: float, start_limit: float) -> Iterator[dict[str, Any]]:
        """What is said until the peer falls silent for good; TimeoutError when it does so for too long."""
        patience = start_limit
        while True:
            try:
                said = self._said.get(timeout=patience)
            except queue.Empty:
                raise TimeoutError from None
            if said is None:
                return
            patience = limit
            yield said

    def close(self) -> None:
        """Wait for the stream to end, which it does with the processes that hold it."""
        self._thread.join(timeout=5)


def _parse(line: str) -> dict[str, Any]:
    """A peer's line; other output on the same stream is not ours to read."""
    if not line.startswith("{"):
        return {}
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and ("round" in said or "steps" in said) else {}


def _end(process: subprocess.Popen[str], patience: float) -> None:
    """Give a process the time to end by itself, then end it with the processes it has started."""
    for request, wait in ((None, patience), (signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        if request is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, request)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=wait)
            return


def _last_error(text: str) -> str:
    """The last line that looks like an exception, without the folders of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return re.sub(r"(?<![\w.])/[^\s'\",)]+", "...", (named or lines or [""])[-1])[:300]
