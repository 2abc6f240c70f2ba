"""Runs that are killed or asked to stop, and resumed by the same command, end as if nothing had happened."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest
from assets import write_recipe
from commands import deepspeed, kill_group, python, run_well, start

from lezo_ds.journal import StepRecord, read_journal
from lezo_ds.model.snapshots import read_manifest, snapshot_path

STEPS = 40
LENGTH = [f"train.steps={STEPS}", "train.eval_every=10", "train.snapshot_every=6"]
PATIENCE_SECONDS = 120
KINDS = {
    "fp32": ["model.dtype=fp32"],
    "bf16": ["model.dtype=bf16", "zo.learning_rate=1e-4"],
    "bf16_stochastic": ["model.dtype=bf16", "zo.learning_rate=1e-4", "zo.update_precision=stochastic"],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    """Return how a run of a kind ends if nothing happens to it: one rank, once."""
    ends = {}

    def end_of(kind):
        if kind not in ends:
            run_dir = tmp_path_factory.mktemp(kind)
            run_well(python(*arguments(recipe, run_dir, kind)))
            ends[kind] = end(run_dir)
        return ends[kind]

    return end_of


def arguments(recipe, run_dir, kind):
    return ["--config", recipe, f"run_dir={run_dir}", *LENGTH, *KINDS[kind]]


def end(run_dir):
    """Return all that a run came to: its records, its results, and the digests of its weights."""
    results = json.loads((run_dir / "results.json").read_text())
    last = read_manifest(snapshot_path(run_dir / "snapshots", STEPS))
    assert results["finished"]
    kept = ("zero_shot", "test", "majority_class", "best_step", "best_dev_loss", "steps", "weights_digest")
    return read_journal(run_dir / "journal.jsonl")[1], {name: results[name] for name in kept}, last["digest"]


def num_steps(run_dir):
    return len([r for r in read_journal(run_dir / "journal.jsonl")[1] if isinstance(r, StepRecord)])


def reaches(run_dir, text, count):
    """Return whether the journal holds `text` at least `count` times."""
    path = run_dir / "journal.jsonl"
    return path.exists() and path.read_text().count(text) >= count


def wait_until(condition, process):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()[1][-5000:]
        assert time.monotonic() < deadline, "the run did not come so far"
        time.sleep(0.002)


def kill_when(command, condition):
    """Start a command and send SIGKILL to all its processes at once as soon as the condition holds."""
    with start(command) as process:
        wait_until(condition, process)
        kill_group(process)
        assert process.returncode == -signal.SIGKILL


def rank_of(process, rank):
    """Return the process of a rank that a launcher has started."""
    children = psutil.Process(process.pid).children(recursive=True)
    return next(c for c in children if c.environ().get("RANK") == str(rank))


MOMENTS = {
    "fp32": [
        (2, '"kind":"header"', 1),
        (2, '"kind":"step"', 3),
        (1, '"kind":"step"', 15),
        (2, '"kind":"step"', 24),
        (1, '"split":"test"', 2),  # all is done but for the results
    ],
    "bf16": [(2, '"kind":"step"', 13), (1, '"split":"dev"', 2)],
    "bf16_stochastic": [(1, '"kind":"step"', 2), (1, '"kind":"step"', 33)],
}
"""When a run is killed, again and again: (number of ranks, text in the journal, how often)."""
LAST_RANKS = {"fp32": 4, "bf16": 1, "bf16_stochastic": 2}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_again_and_again_ends_as_if_never_killed(kind, recipe, undisturbed, tmp_path):
    given = arguments(recipe, tmp_path, kind)
    for num_ranks, text, count in MOMENTS[kind]:
        command = python(*given) if num_ranks == 1 else deepspeed(num_ranks, *given)
        kill_when(command, lambda text=text, count=count: reaches(tmp_path, text, count))
    last = LAST_RANKS[kind]
    run_well(python(*given) if last == 1 else deepspeed(last, *given))
    assert end(tmp_path) == undisturbed(kind)


@pytest.mark.distributed
def test_a_rank_that_dies_ends_the_run_which_then_resumes(recipe, undisturbed, tmp_path):
    given = arguments(recipe, tmp_path, "fp32")
    with start(deepspeed(2, *given)) as process:
        wait_until(lambda: reaches(tmp_path, '"kind":"step"', 8), process)
        rank_of(process, 1).kill()
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode != 0
    assert 8 <= num_steps(tmp_path) < STEPS
    run_well(python(*given))
    assert end(tmp_path) == undisturbed("fp32")


@pytest.mark.distributed
def test_sigterm_to_one_rank_stops_all_at_the_same_step_and_the_run_resumes(recipe, undisturbed, tmp_path):
    given = arguments(recipe, tmp_path, "fp32")
    with start(deepspeed(2, *given)) as process:
        wait_until(lambda: reaches(tmp_path, '"kind":"step"', 4), process)
        rank_of(process, 1).terminate()
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, err[-5000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert not results["finished"]
    assert 4 <= results["steps"] == num_steps(tmp_path) < STEPS
    assert results["test"] is None
    run_well(deepspeed(2, *given))
    assert end(tmp_path) == undisturbed("fp32")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=["SIGINT", "SIGUSR1"])
def test_other_signals_that_ask_for_a_stop_end_a_run_well(number, recipe, tmp_path):
    with start(python(*arguments(recipe, tmp_path, "fp32"))) as process:
        wait_until(lambda: reaches(tmp_path, '"kind":"step"', 2), process)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err[-5000:]
    assert json.loads((tmp_path / "results.json").read_text())["steps"] == num_steps(tmp_path) < STEPS
