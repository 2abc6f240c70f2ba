"""What ends a run early, what it keeps, and where it reports."""

from __future__ import annotations

import csv
import json
import shutil
import signal

import pytest
from commands import (
    PATIENCE_SECONDS,
    assert_all_end,
    assert_one_error,
    deepspeed,
    ranks_of,
    run_forked,
    run_forked_well,
    start,
    wait_until,
)
from run_ends import STEP, digest_after, num_steps, reaches, results_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lezo_ds.model.snapshots import read_manifest, snapshot_steps

pytestmark = pytest.mark.distributed

MEASURED = {"seconds", "peak_memory_bytes"}


def train(recipe, run_dir, *keys, runner=run_forked_well, **options):
    return runner(["--config", recipe, f"run_dir={run_dir}", *keys], **options)


def unmeasured(results):
    return {name: results[name] for name in results.keys() - MEASURED}


# With a learning rate of 0, no evaluation is better than the first, at step 2.
PATIENT = ["train.steps=20", "train.eval_every=2", "train.patience=2", "zo.learning_rate=0"]


def test_a_run_without_better_validations_stops_and_stays_stopped(recipe, tmp_path):
    run_dir, cut = tmp_path / "run", tmp_path / "cut"
    finished = train(recipe, run_dir, *PATIENT)
    results = results_of(run_dir)
    assert (results["finished"], results["early_stop_step"], results["best_step"]) == (True, 6, 2)
    assert results["test"] is not None
    assert 6 in snapshot_steps(run_dir / "snapshots")
    assert "Stopped early, at step 6: train.patience ran out." in finished.out
    assert "resuming at step 6 of 20" in train(recipe, run_dir, *PATIENT).err
    assert unmeasured(results_of(run_dir)) == unmeasured(results)
    shutil.copytree(run_dir, cut)
    lines = (run_dir / "journal.jsonl").read_text().splitlines(keepends=True)
    assert "split" in json.loads(lines[10])
    (cut / "journal.jsonl").write_text("".join(lines[:11]))  # right after the last evaluation
    train(recipe, cut, *PATIENT)
    assert (cut / "journal.jsonl").read_text() == "".join(lines)
    train(recipe, run_dir, *PATIENT, "train.patience=4")
    assert results_of(run_dir)["early_stop_step"] == 10
    assert digest_after(run_dir, 10) == digest_after(cut, 6)  # the rate is 0
    fewer = train(recipe, run_dir, *PATIENT, "train.steps=8", runner=run_forked)
    assert_one_error(fewer, 2, "has 10 steps already; train.steps=8")


@pytest.mark.parametrize("kind", ["none", "prefix"])
def test_a_journal_gives_back_the_weights_that_were_removed(kind, recipe, tmp_path):
    run_dir, keys = tmp_path / "run", [f"peft.kind={kind}", "train.keep_snapshots=0", "train.steps=4"]
    train(recipe, run_dir, *keys)
    results = results_of(run_dir)
    kept = [0] if kind == "prefix" else []  # the values from which a prefix starts, which no replay computes
    assert snapshot_steps(run_dir / "snapshots") == kept
    run_forked_well(["--run", run_dir, "--out", tmp_path / "model"], program="export.py")
    assert read_manifest(tmp_path / "model")["digest"] == results["weights_digest"]
    train(recipe, run_dir, *keys, "train.steps=6", "train.keep_snapshots=1")
    assert results_of(run_dir)["steps"] == 6
    assert snapshot_steps(run_dir / "snapshots") == [*kept, 6]


def test_monitors_get_every_step_and_evaluation(recipe, tmp_path):
    run_dir = tmp_path / "run"
    train(recipe, run_dir, "train.report_to=[csv,tensorboard]")
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (events,) = (run_dir / "monitors").rglob("events.out.tfevents.*")
    board = EventAccumulator(str(events.parent))
    board.Reload()
    for name in ("loss", "projected_gradient", "dev_loss", "dev_accuracy"):
        expected = [(entry["step"], pytest.approx(entry[name])) for entry in entries if name in entry]
        (path,) = (run_dir / "monitors").rglob(f"train_{name}.csv")
        with path.open() as file:
            _, *rows = csv.reader(file)
        assert [(int(row[0]), float(row[1])) for row in rows] == expected
        assert [(event.step, event.value) for event in board.Scalars(f"train/{name}")] == expected


def test_a_signal_to_deepspeeds_launcher_stops_all_ranks(recipe, tmp_path):
    keys = ["train.steps=1000", "train.eval_every=500", "train.batch_size=2", "train.micro_batch_size=1"]
    with start(deepspeed(2, "--config", recipe, f"run_dir={tmp_path}", *keys)) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        process.send_signal(signal.SIGUSR1)  # which DeepSpeed's launcher does not pass on
        assert_all_end(ranks)
        process.communicate(timeout=PATIENCE_SECONDS)
    results = results_of(tmp_path)
    assert not results["finished"]
    assert 4 <= results["steps"] == num_steps(tmp_path) < 1000
