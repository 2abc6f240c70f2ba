"""Runs with faults: killed inside a file operation, refused by the disk, under any launcher or forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from commands import TRAIN, Finished, free_port
from ranks import context

from lezo_ds.journal import StepRecord, read_journal
from lezo_ds.model.snapshots import read_manifest, snapshot_path, snapshot_steps

FAULTY_TRAIN = str(Path(__file__).with_name("faulty_train.py"))
VARIABLE = "LEZO_TEST_FAULT"
TIMEOUT_SECONDS = 300
_GRACE_SECONDS = 60


@dataclass(frozen=True)
class Fault:
    """What goes wrong, at the `number`-th operation on the run's directory that both patterns match.

    Attributes:
        operation: pattern of the operation's name: write, fsync, ftruncate, replace, rename, unlink, rmdir,
            mkdir, or save (a safetensors file); of a rename the new path counts.
        path: pattern of the path within the run's directory.
        number: which of them, from 1.
        moment: before the operation, after it, or within: half of what is written stays.
        effect: "kill" (SIGKILL to this rank), "kill all" (to its process group), or the name of an errno.
        rank: in whose process.
        lasts: whether all later operations fail, too, whatever they are.
    """

    operation: str = ".*"
    path: str = ".*"
    number: int = 1
    moment: str = "before"
    effect: str = "kill"
    rank: int = 0
    lasts: bool = False


NO_FAULT = Fault(number=0)


def variables(fault, run_dir, log=None):
    """Return the environment variable that tells tests/faulty_train.py of a fault."""
    return {VARIABLE: json.dumps({**asdict(fault), "root": str(run_dir), "log": log and str(log)})}


def faulty(command):
    """Return a command of launch/train.py as one that heeds a fault."""
    return [FAULTY_TRAIN if part == TRAIN else part for part in command]


def run_forked(
    arguments,
    fault=NO_FAULT,
    num_ranks=1,
    log=None,
    kill_after=None,
    output=None,
    timeout=TIMEOUT_SECONDS,
    meanwhile=lambda processes: None,
):
    """Run launch/train.py on ranks forked from a server that has imported all libraries.

    That is quicker than a launcher by the seconds of the imports.

    Args:
        arguments: of the command; one is run_dir=...
        fault: what goes wrong.
        num_ranks: how many processes.
        log: where the operations on the run's directory are listed.
        kill_after: seconds until SIGKILL to all ranks, if they still run then.
        output: directory for what the ranks print; that of the run's directory if not given.
        timeout: seconds after which ranks that still run have hung.
        meanwhile: called with the processes of all ranks as soon as they are started.

    Returns:
        Rank 0's exit code (negative: the signal), and the output of all ranks.

    Raises:
        AssertionError: a rank hung.
    """
    run_dir = next(str(a).removeprefix("run_dir=") for a in arguments if str(a).startswith("run_dir="))
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= variables(fault, run_dir, log)
    outputs = [Path(output or Path(run_dir).parent) / f"output-{rank}" for rank in range(num_ranks)]
    processes = []
    for rank, file in enumerate(outputs):
        file.touch()  # a rank may be killed before it opens it
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_rank, args=([*map(str, arguments)], own, file), daemon=True)
        process.start()
        processes.append(process)
    meanwhile(processes)
    _wait(processes, kill_after, timeout)
    texts = [file.read_text() for file in outputs]
    for file in outputs:
        file.unlink()
    return Finished(processes[0].exitcode, "", "".join(texts))


def _rank(arguments, own_variables, output):
    os.environ.update(own_variables)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [TRAIN, *arguments]
    import faulty_train

    faulty_train.main()


def _wait(processes, kill_after, timeout):
    """Wait for all ranks; assert that none outlives another's death by far."""
    deadline = time.monotonic() + (timeout if kill_after is None else kill_after)
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        if process.exitcode not in (None, 0) and kill_after is None:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    hung = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    assert not hung or kill_after is not None, f"ranks {hung} hung"


# What a run came to.


@dataclass(frozen=True)
class End:
    """All that must be the same however a run came to its end."""

    journal: bytes
    results: dict
    digest: str
    weights: dict


def end(run_dir, steps):
    """Return what a run came to: its journal, results, digest, and its last snapshot's hashes."""
    results = json.loads((run_dir / "results.json").read_text())
    assert results["finished"]
    manifest = read_manifest(snapshot_path(run_dir / "snapshots", steps))
    kept = ("zero_shot", "test", "best_step", "best_dev_loss", "steps", "weights_digest", "skipped_steps")
    return End(
        (run_dir / "journal.jsonl").read_bytes(),
        {name: results[name] for name in kept},
        manifest["digest"],
        manifest["files"],
    )


def num_steps(run_dir):
    """Return how many whole steps a run's journal holds."""
    path = run_dir / "journal.jsonl"
    if not path.exists():
        return 0
    return sum(isinstance(record, StepRecord) for record in read_journal(path)[1])


def num_reported_steps(run_dir):
    """Return the last step that metrics.jsonl calls done."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def check_interrupted(run_dir, undisturbed):
    """Assert that what a killed run left is what the undisturbed one had then; return the steps it lost.

    The whole lines of its journal are the first ones of the other's, the last one may be torn; and the newest
    snapshot is whole. A step is lost that was called done and is missing.
    """
    path = run_dir / "journal.jsonl"
    if path.exists():
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        assert undisturbed.journal.startswith(whole)
        assert undisturbed.journal[len(whole) :].startswith(data[len(whole) :])
    # Of an older one, that was being removed, files may be missing.
    for step in snapshot_steps(run_dir / "snapshots")[-1:]:
        assert read_manifest(snapshot_path(run_dir / "snapshots", step)) is not None
    return max(0, num_reported_steps(run_dir) - num_steps(run_dir))


# Disks.


@contextmanager
def small_disk(directory, size):
    """Mount a disk of `size` (as tmpfs spells it) on a directory; skip where that is forbidden."""
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk takes root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def remount(directory, how):
    """Make a small disk read-only ("ro"), writable ("rw") or of another size ("size=64m")."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(directory)], check=True)
