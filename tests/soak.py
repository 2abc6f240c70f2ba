"""`make soak`: injects the faults of the tests at length, and counts how many cases held.

python tests/soak.py --parts kills disks --kills 100 --steps 2000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
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
from run_ends import end, num_steps

from lezo_ds.journal import read_journal

KINDS = {
    "fp32": [],
    "bf16": ["model.dtype=bf16", "zo.learning_rate=1e-4"],
    "bf16, stochastic": [
        *("model.dtype=bf16", "zo.learning_rate=1e-4", "zo.update_precision=stochastic"),
    ],
    "fp16": ["model.dtype=fp16", "zo.learning_rate=1e-4"],
    "LoRA": ["peft.kind=lora"],
    "prefix": ["peft.kind=prefix"],
}
HUNG_SECONDS = 3600
STOP_SECONDS = 30
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
        self.part, self.tried, self.held = part, 0, 0
        self.notes = []

    def check(self, case, action):
        """Try a case; an assertion that fails is shown, and counted."""
        self.tried += 1
        try:
            action()
        except AssertionError as error:
            print(f"FAILED {self.part}: {case}: {error}", flush=True)
            return
        self.held += 1

    def row(self):
        return f"| {self.part} | {self.tried:,} | {self.held:,} | {'; '.join(self.notes)} |"


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
    log = directory / "operations"
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

    def kill(fault):
        run_dir = directory / "run"
        finished = run_faulty(arguments(recipe, run_dir, *SHORT), fault)
        assert finished.code == -signal.SIGKILL, finished.err[-3000:]
        assert check_interrupted(run_dir, undisturbed) == 0
        assert finish(recipe, run_dir, 4, *SHORT) == undisturbed
        assert not list((run_dir / "snapshots").glob(".*"))

    for fault in faults[:: options.stride]:
        shutil.rmtree(directory / "run", ignore_errors=True)
        what = operations[fault.number - 1]
        count.check(f"{fault.moment} operation {fault.number}, {what}", lambda fault=fault: kill(fault))
    yield count


def kill_at_random(recipe, directory, options):
    """Kill all ranks of long runs at random moments; every tenth run is started by a launcher."""
    chance = random.Random(options.seed)
    counts = {kind: Count(f"SIGKILL of all ranks at random, {kind}") for kind in options.kinds}
    lost = {kind: [] for kind in options.kinds}
    while sum(map(len, lost.values())) < options.kills:
        kind = min(lost, key=lambda kind: len(lost[kind]))
        lost[kind] += kill_one_run(recipe, directory, options, kind, counts[kind], chance)
    for kind, count in counts.items():
        worst = max(lost[kind], default=0)
        count.notes.append(f"{len(lost[kind])} kills, at most {worst} finished steps lost")
        count.notes.append(f"and the ends of runs of {options.steps} steps")
        yield count


def kill_one_run(recipe, directory, options, kind, count, chance):
    """Kill a run again and again, then let it end; return the number of finished steps each kill lost."""
    given = [f"train.steps={options.steps}", f"train.eval_every={options.steps}", *KINDS[kind]]
    given.append("train.snapshot_every=37")
    reference, run_dir = directory / f"{kind}, undisturbed", directory / kind
    if not reference.exists():
        finish(recipe, reference, options.steps, *given)
    undisturbed = end(reference)
    lost = []

    def interrupted():
        lost.append(check_interrupted(run_dir, undisturbed))
        assert lost[-1] == 0

    for kill in range(1, options.kills_per_run + 1):
        command = arguments(recipe, run_dir, *given)
        seconds = chance.uniform(0.2, options.longest)
        if kill % 10 == 0:
            kill_launched(chance.choice((deepspeed, mpirun))(2, *command), run_dir, seconds)
        else:
            run_forked(command, num_ranks=chance.choice((1, 1, 1, 2, 2, 4)), kill_after=seconds)
        count.check(f"kill {kill}", interrupted)
        if (run_dir / "results.json").exists():
            break
    reached = num_steps(run_dir)

    def compare():
        assert finish(recipe, run_dir, options.steps, *given, num_ranks=chance.choice((1, 2))) == undisturbed

    count.check(f"the end after {kill} kills", compare)
    print(f"  {kind}: {kill} kills, until step {reached}; {count.held} of {count.tried} held", flush=True)
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

        def stop(target, number, count=count, make=make, num_ranks=num_ranks, seconds=seconds):
            run_dir = directory / f"{count.part}, {count.tried}"
            with start(make(num_ranks, *arguments(recipe, run_dir, *given))) as process:
                wait_until(lambda: num_steps(run_dir) >= 4, process)
                ranks = ranks_of(process) if num_ranks > 1 else [psutil.Process(process.pid)]
                assert len(ranks) == num_ranks
                began = time.monotonic()
                ask_for_stop(target, number, process, ranks, run_dir)
                _, alive = psutil.wait_procs(ranks, timeout=HUNG_SECONDS)
                seconds.append(time.monotonic() - began)
                err = process.communicate()[1]
            assert not alive and seconds[-1] < STOP_SECONDS
            assert process.returncode == 0 or target in LAUNCHERS, err[-3000:]
            assert check_interrupted(run_dir, undisturbed) == 0
            results = json.loads((run_dir / "results.json").read_text())
            assert not results["finished"] and results["steps"] == num_steps(run_dir) < 60
            assert finish(recipe, run_dir, 60, *given) == undisturbed

        for target in targets:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)[: 1 if target == "file" else None]:
                case = "by the file" if target == "file" else f"{number.name} to {target}"
                count.check(case, lambda target=target, number=number: stop(target, number))
        middle = statistics.median(seconds)
        count.notes.append(f"seconds until all ranks are gone: median {middle:.1f}, max {max(seconds):.1f}")
        yield count


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

    def fill(size):
        with small_disk(directory / "disk", f"{size}k") as disk:
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

    for size in range(4, options.largest_disk, 4 * options.stride):
        count.check(f"{size} KiB", lambda size=size: fill(size))
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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kills-per-run", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--longest", type=float, default=8.0, help="seconds until a kill")
    parser.add_argument("--largest-disk", type=int, default=400, help="KiB")
    parser.add_argument("--stride", type=int, default=1, help="try every n-th operation and disk")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # A shell's background jobs ignore it, and so would the runs that are to be stopped by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    counts = []
    with tempfile.TemporaryDirectory() as directory:
        recipe = write_recipe(Path(directory))
        for part in options.parts:
            place = Path(directory) / part
            place.mkdir()
            began = time.monotonic()
            for count in PARTS[part](recipe, place, options):
                counts.append(count)
                print(count.row(), flush=True)
            print(f"  {part}: {time.monotonic() - began:.0f} s", flush=True)
    print("| case | tried | held | |\n|---|---|---|---|")
    for count in counts:
        print(count.row())
    if any(count.held < count.tried for count in counts):
        sys.exit(1)


if __name__ == "__main__":
    main()
