"""`make soak`: injects the faults of the tests at length, and counts how many cases held.

python tests/soak.py --parts kills disks --kills 100 --steps 2000
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

# Before anything imports torch or deepspeed: they look at these once.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The tests that this runs at length, and what they share.
sys.path.insert(0, str(Path(__file__).parent / "helpers"))

import psutil
from assets import write_recipe
from commands import deepspeed, kill_group, mpirun, python, ranks_of, run_forked, start, wait_until
from faults import Fault, check_interrupted, remount, run_faulty, small_disk
from run_ends import end, num_steps, results_of

from lezo_ds.journal import read_journal

BF16 = ["model.dtype=bf16", "zo.learning_rate=1e-4"]
KINDS = {
    "fp32": [],
    "bf16": BF16,
    "bf16, stochastic": [*BF16, "zo.update_precision=stochastic"],
    "fp16": ["model.dtype=fp16", "zo.learning_rate=1e-4"],
    "LoRA": ["peft.kind=lora"],
    "prefix": ["peft.kind=prefix"],
}
HUNG_SECONDS = 3600
STOP_SECONDS = 30
KILLS_PER_RUN = 20
LONGEST_SECONDS = 8.0
"""The longest time until a run is killed."""
LARGEST_DISK = 400
"""In KiB; a run of 4 steps fits."""
LAUNCHERS = ("inner launcher", "command", "all")
"""Those that may have an exit code of their own when they get a signal."""
STARTERS = {
    "one process": (lambda _, *given: python(*given), 1, ("rank 0", "file")),
    "deepspeed, two ranks": (deepspeed, 2, ("rank 0", "rank 1", *LAUNCHERS, "file")),
    "mpirun, two ranks": (mpirun, 2, ("rank 0", "rank 1", "command", "file")),
}
"""How to start it, its number of ranks, and what may be asked to stop."""
SHORT = ["train.steps=4", "train.eval_every=4", "train.snapshot_every=2", "train.keep_snapshots=1"]


class Count:
    """How many cases of a part were tried, and how many held."""

    def __init__(self, part):
        self.part, self.tried, self.held, self.note = part, 0, 0, ""

    @contextmanager
    def case(self, name):
        """Try a case in the context. An assertion that fails is shown, and counted."""
        self.tried += 1
        try:
            yield
        except AssertionError as error:
            print(f"FAILED {self.part}: {name}: {error}", file=sys.stderr, flush=True)
            return
        self.held += 1

    def row(self):
        return f"| {self.part} | {self.tried:,} | {self.held:,} | {self.note} |"


def arguments(recipe, run_dir, *given):
    return ["--config", recipe, f"run_dir={run_dir}", *given]


def finish(recipe, run_dir, steps, *given, num_ranks=1):
    given = arguments(recipe, run_dir, *given)
    finished = run_forked(given, num_ranks=num_ranks, timeout=HUNG_SECONDS)
    assert finished.code == 0, finished.err[-3000:]
    found = end(run_dir)
    assert found.results["steps"] == steps
    return found


# Parts.


def kill_at_operations(recipe, directory, options):
    """Kill a run before every file operation in its directory, and within every write."""
    log, run_dir = directory / "operations", directory / "run"
    run_faulty(arguments(recipe, directory / "undisturbed", *SHORT), log=log)
    undisturbed = end(directory / "undisturbed")
    operations = [line for line in log.read_text().splitlines() if not line.startswith("apply")]
    faults = [Fault(number=number) for number in range(1, len(operations) + 1)]
    faults += [
        Fault(number=number, moment="within")
        for number, operation in enumerate(operations, 1)
        if re.match(r"write |save |fsync .*\.(json|jsonl|yaml)\.tmp", operation)
    ]
    count = Count("SIGKILL at every file operation of a run")
    for fault in faults[:: options.stride]:
        shutil.rmtree(run_dir, ignore_errors=True)
        with count.case(f"{fault.moment} operation {fault.number}, {operations[fault.number - 1]}"):
            finished = run_faulty(arguments(recipe, run_dir, *SHORT), fault)
            assert finished.code == -signal.SIGKILL, finished.err[-3000:]
            assert check_interrupted(run_dir, undisturbed) == 0
            assert finish(recipe, run_dir, 4, *SHORT) == undisturbed
            assert not list((run_dir / "snapshots").glob(".*"))
    yield count


def kill_at_random(recipe, directory, options):
    """Kill all ranks of long runs at random moments; every tenth run is started by a launcher."""
    chance = random.Random(options.seed)
    counts = {kind: Count(f"SIGKILL of all ranks at random, {kind}") for kind in KINDS}
    lost = {kind: [] for kind in KINDS}
    while sum(map(len, lost.values())) < options.kills:
        kind = min(lost, key=lambda kind: len(lost[kind]))
        lost[kind] += kill_one_run(recipe, directory, options.steps, kind, counts[kind], chance)
    for kind, count in counts.items():
        worst = max(lost[kind], default=0)
        count.note = (
            f"{len(lost[kind])} kills, at most {worst} finished steps lost; runs of {options.steps} steps"
        )
        yield count


def kill_one_run(recipe, directory, steps, kind, count, chance):
    """Kill a run again and again, then let it end; return the number of finished steps each kill lost."""
    given = [f"train.steps={steps}", f"train.eval_every={steps}", "train.snapshot_every=37", *KINDS[kind]]
    reference, run_dir = directory / f"{kind}, undisturbed", directory / kind
    if not reference.exists():
        finish(recipe, reference, steps, *given)
    undisturbed = end(reference)
    lost = []
    for kill in range(1, KILLS_PER_RUN + 1):
        command = arguments(recipe, run_dir, *given)
        seconds = chance.uniform(0.2, LONGEST_SECONDS)
        if kill % 10 == 0:
            kill_launched(chance.choice((deepspeed, mpirun))(2, *command), run_dir, seconds)
        else:
            run_forked(command, num_ranks=chance.choice((1, 1, 1, 2, 2, 4)), kill_after=seconds)
        with count.case(f"kill {kill}"):
            lost.append(check_interrupted(run_dir, undisturbed))
            assert lost[-1] == 0
        if (run_dir / "results.json").exists():
            break
    with count.case(f"the end after {len(lost)} kills"):
        assert finish(recipe, run_dir, steps, *given, num_ranks=chance.choice((1, 2))) == undisturbed
    shutil.rmtree(run_dir)
    return lost


def kill_launched(command, run_dir, seconds):
    """Start a run by a launcher and kill all its processes at once, so many seconds after its first step."""
    with start(command) as process:
        before = num_steps(run_dir)
        while process.poll() is None and num_steps(run_dir) == before:
            time.sleep(0.01)
        time.sleep(seconds / 4)
        if process.poll() is not None:
            return
        ranks = psutil.Process(process.pid).children(recursive=True)  # those of mpirun have their own groups
        kill_group(process)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        psutil.wait_procs(ranks)


def stop_runs(recipe, directory, options):
    """Stop runs by each signal to each process that may get it, and by the file; how long it takes."""
    given = ["train.steps=60", "train.eval_every=30", "train.snapshot_every=0"]
    undisturbed = finish(recipe, directory / "undisturbed", 60, *given)
    for starter, (make, num_ranks, targets) in STARTERS.items():
        count = Count(f"a stop asked for, {starter}")
        seconds = []
        for number, target in itertools.product((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), targets):
            if target == "file" and number != signal.SIGTERM:
                continue  # the file has no signal, so once is enough
            run_dir = directory / f"{starter}, {count.tried}"
            with count.case(f"{number.name} to {target}"):
                command = make(num_ranks, *arguments(recipe, run_dir, *given))
                seconds.append(stop_run(command, run_dir, num_ranks, target=target, number=number))
                assert check_interrupted(run_dir, undisturbed) == 0
                results = results_of(run_dir)
                assert not results["finished"] and results["steps"] == num_steps(run_dir) < 60
                assert finish(recipe, run_dir, 60, *given) == undisturbed
        middle, worst = statistics.median(seconds or [0]), max(seconds, default=0)
        count.note = f"seconds until all ranks are gone: median {middle:.1f}, max {worst:.1f}"
        yield count


def stop_run(command, run_dir, num_ranks, *, target, number):
    """Start a run and ask it to stop; return how many seconds later all of its ranks were gone."""
    with start(command) as process:
        wait_until(lambda: num_steps(run_dir) >= 4, process)
        ranks = ranks_of(process) if num_ranks > 1 else [psutil.Process(process.pid)]
        assert len(ranks) == num_ranks
        began = time.monotonic()
        ask_for_stop(target, number, process, ranks, run_dir)
        _, alive = psutil.wait_procs(ranks, timeout=HUNG_SECONDS)
        seconds = time.monotonic() - began
        err = process.communicate()[1]
    assert not alive and seconds < STOP_SECONDS
    assert process.returncode == 0 or target in LAUNCHERS, err[-3000:]
    return seconds


def ask_for_stop(target, number, process, ranks, run_dir):
    """Send a signal to a process of a run, to all of them, or make the file."""
    if target == "file":
        (run_dir / "STOP").touch()
    elif target == "all":
        os.killpg(process.pid, number)
    elif target == "command":
        process.send_signal(number)
    elif target == "inner launcher":
        ranks[0].parent().send_signal(number)
    else:
        ranks[int(target.removeprefix("rank "))].send_signal(number)


def fill_disks(recipe, directory, options):
    """Run on disks of many sizes: a clean stop; with more room, the same end."""
    undisturbed = finish(recipe, directory / "undisturbed", 4, *SHORT)
    count = Count("disk full")
    for size in range(4, LARGEST_DISK, 4 * options.stride):
        with count.case(f"{size} KiB"), small_disk(directory / "disk", f"{size}k") as disk:
            run_dir = disk / "run"
            finished = run_forked(arguments(recipe, run_dir, *SHORT))
            errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
            if finished.code != 0:
                assert finished.code in (1, 2, 3) and len(errors) == 1, finished.err[-3000:]
                assert "Traceback" not in finished.err
            if (run_dir / "journal.jsonl").exists():
                read_journal(run_dir / "journal.jsonl")
            remount(disk, "size=64m")
            assert finish(recipe, run_dir, 4, *SHORT) == undisturbed
    yield count


PARTS = {
    "operations": kill_at_operations,
    "kills": kill_at_random,
    "stops": stop_runs,
    "disks": fill_disks,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--stride", type=int, default=1, help="try every n-th operation and disk")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # A shell's background jobs ignore it, and so would the runs that are to be stopped by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    all_held = True
    print("| case | tried | held | |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        recipe = write_recipe(Path(directory))
        for part in options.parts:
            place = Path(directory) / part
            place.mkdir()
            for count in PARTS[part](recipe, place, options):
                print(count.row(), flush=True)
                all_held = all_held and count.held == count.tried
    sys.exit(not all_held)


if __name__ == "__main__":
    main()
