"""A virtual environment for each peer, made once and kept in the user's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_dir


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
    }[peer]


class CannotInstallError(RuntimeError):
    """An environment that could not be made; its text says which and why."""


def python_of(peer: str, folder: Path | None = None) -> Path:
    """Find the peer's python, in an environment made now or by an earlier run; ours is this one."""
    if peer == "ours":
        return Path(sys.executable)
    home = (folder or cache_folder()) / "environments" / peer
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = home / "requirements.json"
    wanted = json.dumps(requirements(peer))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making an environment for {peer}: {', '.join(requirements(peer))}", flush=True)
    _run(peer, [sys.executable, "-m", "venv", "--clear", str(home)])
    # All in one request, so that nothing that follows can bring in another PyTorch.
    _run(
        peer,
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements(peer)],
    )
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(peer: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise CannotInstallError(f"{peer} cannot be installed: {errors[-1] if errors else done.returncode}")
