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
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

# Before anything imports torch or deepspeed: they look at these once.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The tests that this runs at length, and what they share.
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
sys.path.insert(0, str(Path(__file__).parent / "unit"))

import psutil
from assets import write_recipe
from commands import deepspeed, kill_group, mpirun, python, ranks_of, run_forked, start, wait_until
from faults import Fault, check_interrupted, remount, run_faulty, small_disk
from ranks import run_ranks
from run_ends import end, num_steps
from test_journal import HEADER, some_records, write_journal
from tiny_runs import start_engine

from lezo_ds.config import TrainConfig
from lezo_ds.engine.agreement import fact_numbers
from lezo_ds.errors import JournalError
from lezo_ds.journal import Journal, read_journal
from lezo_ds.tools.benchmark.inputs import loss_function, split_batch, write_empty_model
from lezo_ds.tools.opt_shapes import opt_config
from lezo_ds.tools.workloads import WORKLOADS
from lezo_ds.zo.layers import num_dropped_from_sparsity
from lezo_ds.zo.updates.sgd import Sgd

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
NUM_RECORDS = 200
NUM_FLIPPED = 40
HUNG_SECONDS = 3600
STOP_SECONDS = 30
REPETITIONS = 7
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


def cut_journals(recipe, directory, options):
    """Cut a journal at every byte."""
    count = Count(f"journal of {NUM_RECORDS} records cut at every byte")
    path = directory / "journal.jsonl"
    records = some_records(NUM_RECORDS)[:NUM_RECORDS]
    data = write_journal(path, records)
    header_end = data.index(b"\n") + 1

    def cut(size):
        path.write_bytes(data[:size])
        if size < header_end:
            assert raises_journal_error(path)
        else:
            assert read_journal(path) == (HEADER, records[: data.count(b"\n", header_end, size)])

    for size in range(len(data)):
        count.check(f"byte {size}", lambda size=size: cut(size))
    yield count


def flip_journals(recipe, directory, options):
    """Flip every bit of a journal."""
    count = Count(f"every bit of a journal of {NUM_FLIPPED} records flipped")
    path = directory / "journal.jsonl"
    records = some_records(NUM_FLIPPED)[:NUM_FLIPPED]
    data = bytearray(write_journal(path, records))

    def flip(bit):
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        data[bit // 8] ^= 1 << bit % 8
        if bit // 8 == len(data) - 1:  # the last newline: a torn line
            assert read_journal(path)[1] == records[:-1]
        else:
            assert raises_journal_error(path)

    for bit in range(8 * len(data)):
        count.check(f"bit {bit}", lambda bit=bit: flip(bit))
    yield count


def raises_journal_error(path):
    try:
        read_journal(path)
    except JournalError:
        return True
    return False


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


def measure(recipe, directory, options):
    """Measure appends to the journal, and resumption."""
    count = Count("figures")
    seconds = []
    with Journal.create(directory / "journal.jsonl", HEADER) as journal:
        for record in some_records(2000):
            began = time.perf_counter()
            journal.append(record)
            seconds.append(time.perf_counter() - began)
    cuts = statistics.quantiles(seconds, n=100)
    count.notes.append(f"append p50 {1e3 * cuts[49]:.2f} ms, p99 {1e3 * cuts[98]:.2f} ms")
    run_dir = directory / "run"
    given = [f"train.eval_every={options.steps}", "train.snapshot_every=0"]
    finish(recipe, run_dir, options.steps, f"train.steps={options.steps}", *given)
    found = []
    for keeps in (True, False):
        if not keeps:
            shutil.rmtree(run_dir / "snapshots")
        began = time.perf_counter()
        code = (
            "import sys, time; from pathlib import Path; from lezo_ds.runs import restore\n"
            "run = restore.read_run(Path(sys.argv[1]))\n"
            "engine = restore.make_engine(run.config)\n"
            "began = time.perf_counter()\n"
            "engine.load_checkpoint(run.directory.snapshots, run.steps)\n"
            "print(time.perf_counter() - began)\n"
        )
        command = [sys.executable, "-c", code, str(run_dir)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found.append(float(out.split()[-1]))
        found.append(time.perf_counter() - began)
    thousand = options.steps / 1000
    count.notes.append(f"resumption from a snapshot {found[0]:.2f} s ({found[1]:.1f} s with the start)")
    count.notes.append(
        f"replay {found[2] / thousand:.2f} s per 1,000 steps ({found[3]:.1f} s with the start)"
    )
    yield count


def measure_checks(recipe, directory, options):
    """Measure what a step's checks cost, by processor time, on OPT-125M's shape at SST-2's length."""
    write_empty_model(opt_config("opt-125m"), "fp32", directory)
    for sparsity in (0, 0.75):
        count = Count(f"checks of OPT-125M's shape, one thread, sparsity {sparsity}")
        ((step, facts, check, replay),) = run_ranks(
            times_of_checks, 1, directory, sparsity, timeout=HUNG_SECONDS
        )
        share = (facts + check / TrainConfig.check_every) / step
        count.notes += [
            f"a step {step:.3f} s",
            f"hashes {1e3 * facts:.2f} ms",
            f"a check of all weights {check:.3f} s, every {TrainConfig.check_every} steps",
            f"all checks {100 * share:.2f} % of a step",
            f"replay {1000 * replay:.0f} s per 1,000 steps",
        ]
        yield count


def times_of_checks(model, sparsity):
    """Return the processor seconds of a step, of parts of it and of a replayed step: each the least seen."""
    num_dropped = num_dropped_from_sparsity(sparsity, 12)
    engine = start_engine(model, num_dropped_layers=num_dropped)
    batch, loss = split_batch(WORKLOADS["sst2"], 1), loss_function(WORKLOADS["sst2"])

    def seconds(action):
        began = time.process_time()
        action()
        return time.process_time() - began

    engine.watch_weights()
    # Weights of nothing but zeros have no gradient, and updates by 0 are left out.
    record = replace(engine.train_batch(batch, loss), projected_grads=(1e-3,))
    updates = Sgd().step_updates([record], 0, 1) * 10
    replayed = min(seconds(lambda: engine.weights.apply(updates)) for _ in range(REPETITIONS)) / 10
    plan = engine._decide()
    facts = min(seconds(lambda: fact_numbers(engine._facts(plan, batch))) for _ in range(REPETITIONS))
    step = min(seconds(lambda: engine.train_batch(batch, loss)) for _ in range(REPETITIONS))
    engine.watch_weights()
    check = seconds(engine.check_weights)
    return step, facts, check, replayed


PARTS = {
    "cuts": cut_journals,
    "flips": flip_journals,
    "operations": kill_at_operations,
    "kills": kill_at_random,
    "stops": stop_runs,
    "disks": fill_disks,
    "figures": measure,
    "checks": measure_checks,
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
