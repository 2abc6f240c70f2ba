"""Run the project's commands as a user does, in a clean environment."""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from assets import REPOSITORY
from ranks import fork, free_port, join_ranks, kill, rank_variables

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


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


def environment(**more):
    """Return an environment that owes nothing to that of the tests, and never asks the hub."""
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
    """Return the command that starts one rank of a file in launch/, or of a command's name."""
    return [sys.executable, *_words(program, arguments)]


def _words(program, arguments):
    is_file = str(program).endswith(".py")
    start = [REPOSITORY / "launch" / program] if is_file else ["-m", "lezo_ds", program]
    return [str(word) for word in (*start, *arguments)]


def run(command, timeout=TIMEOUT_SECONDS, **variables):
    with start(command, **variables) as process:
        out, err = process.communicate(timeout=timeout)
    return Finished(process.returncode, out, err)


def run_well(command, **variables):
    finished = run(command, **variables)
    assert finished.code == 0, finished.err[-5000:]
    return finished


def assert_one_error(finished, code, *fragments):
    """Assert that a command ended with one error line, which holds the fragments and a fix."""
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


def wait_until(condition, process=None, seconds=PATIENCE_SECONDS):
    """Wait until the condition holds; fail if the process ends first, or if it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if isinstance(process, subprocess.Popen):
            assert process.poll() is None, process.communicate()[1][-5000:]
        elif process is not None:
            assert process.is_alive(), f"the process ended with code {process.exitcode}"
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.002 if process else 0.1)


def start_ranks(
    arguments, program, num_ranks, outputs, directory=REPOSITORY, input_bytes=b"", **variables
):
    """Start a command, or a file (of launch/), on forked ranks; return their processes.

    A rank writes to out-RANK and err-RANK in `outputs`. Rank 0 reads `input_bytes`, and the others
    read nothing; with None, its input is closed.
    """
    shared = environment(**variables)
    command = _words(program, arguments)
    ranks = []
    for rank in range(num_ranks):
        own = shared | rank_variables(rank, num_ranks, shared["MASTER_PORT"])
        files = [Path(outputs, f"{kind}-{rank}") for kind in ("in", "out", "err")]
        if rank > 0 or input_bytes is not None:
            files[0].write_bytes(b"" if rank > 0 else input_bytes)
        ranks.append(fork(_run_program, command, own, directory, files))
    return ranks


def run_forked(
    arguments, program="train.py", num_ranks=1, meanwhile=lambda ranks: None, grace=0, **options
):
    """Run a command on forked ranks (see `start_ranks`) to its end.

    `meanwhile` is called with the processes of all ranks as soon as they are started. When a rank
    fails, the others have `grace` seconds to end; with 0 they are killed, as launchers kill them.
    """
    with tempfile.TemporaryDirectory() as outputs:
        ranks = start_ranks(arguments, program, num_ranks, outputs, **options)
        try:
            meanwhile(ranks)
            code, hung = join_ranks(ranks, TIMEOUT_SECONDS, grace)
            assert not hung or (code != 0 and grace == 0), f"ranks {hung} hung"
        except AssertionError:
            print(_read_all(outputs, "err")[-5000:])
            raise
        finally:
            kill(ranks)
        return Finished(code, _read_all(outputs, "out"), _read_all(outputs, "err"))


def run_forked_well(arguments, **options):
    finished = run_forked(arguments, **options)
    assert finished.code == 0, finished.err[-5000:]
    return finished


def lezo(name, *words, **options):
    """Run a command by its name, such as predict, to its good end."""
    return run_forked_well(words, program=name, **options)


def run_words(recipe, run_dir, *keys):
    return ["--config", recipe, f"run_dir={run_dir}", *keys]


def train(recipe, run_dir, *keys, **options):
    return lezo("train", *run_words(recipe, run_dir, *keys), **options)


def scores_of(*words, **options):
    """Return the numbers that evaluate prints."""
    return json.loads(lezo("evaluate", *words, "--json", **options).out)


def assert_refused(name, words, *fragments, code=2, **options):
    """Assert that a command ends with one error line that holds the fragments; return its end."""
    finished = run_forked(words, program=name, **options)
    assert_one_error(finished, code, *fragments)
    return finished


def _read_all(directory, kind):
    # A rank that was killed may have no file, or have written half a character.
    files = sorted(Path(directory).glob(f"{kind}-*"))
    return "".join(file.read_text(errors="replace") for file in files)


def _run_program(command, own_variables, directory, files):
    os.environ.clear()
    os.environ.update(own_variables)
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
