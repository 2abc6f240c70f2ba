"""What ends a run early, what it keeps, and where it reports."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from assets import REPOSITORY
from commands import assert_one_error, run_forked, run_forked_well
from own_kind import Rating
from run_ends import results_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_steps
from lezo_ds.zo.estimators import Spsa

pytestmark = pytest.mark.distributed

MEASURED = {"seconds", "peak_memory_bytes"}
FAILURE = "LEZO_TEST_METRIC"
"""A variable of the environment: what a metric returns, or no number, to make it raise."""


def train(recipe, run_dir, *keys, runner=run_forked_well, **options):
    return runner(["--config", recipe, f"run_dir={run_dir}", *keys], **options)


def unmeasured(results):
    return {name: results[name] for name in results.keys() - MEASURED}


def share_of_right(predicted, examples):
    """Return a score as a user's metric does: NumPy's float, or a failure if an answer is wrong."""
    share = sum(
        answer == example.label for answer, example in zip(predicted, examples, strict=True)
    )
    share /= len(examples)
    if share < 1 and FAILURE in os.environ:
        return float(os.environ[FAILURE])
    return np.float32(share)


@dataclass(frozen=True)
class Leaves(Spsa):
    """An estimator with a call that belongs to a program of its own."""

    def estimate(self, probes, losses):
        sys.exit(0)


@dataclass(frozen=True, kw_only=True)
class Leaving(Rating):
    """A task with such a call."""

    def build_example(self, record):
        sys.exit(0)


LEAVING = Leaving(fields={"sentence": str})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("zo.estimator=test_options:Leaves", "Leaves failed: SystemExit: 0 ("),
        ("data.task=test_options:LEAVING", "code that the recipe names called sys.exit(0); fix: "),
    ],
)
def test_a_module_that_ends_the_program_does_not_pass_for_a_finished_run(
    key, message, recipe, tmp_path
):
    path = f"{REPOSITORY}:{REPOSITORY}/tests/runs:{REPOSITORY}/tests/helpers"
    failed = train(recipe, tmp_path / "run", key, runner=run_forked, PYTHONPATH=path)
    assert_one_error(failed, 2, message)
    assert not (tmp_path / "run" / "results.json").exists()


@pytest.mark.parametrize("failure", ["nan", "raises"])
def test_a_metric_that_fails_ends_a_run_in_one_line_which_goes_on_when_it_is_corrected(
    failure, recipe, tmp_path
):
    run_dir = tmp_path / "run"
    path = f"{REPOSITORY}:{REPOSITORY}/tests/runs:{REPOSITORY}/tests/helpers"
    own = {"num_ranks": 2, "PYTHONPATH": path}
    key = "data.metric=test_options:share_of_right"
    failed = train(recipe, run_dir, key, runner=run_forked, **own, **{FAILURE: failure})
    assert_one_error(failed, 2, "data.metric=test_options:share_of_right")
    assert not (run_dir / "results.json").exists()
    train(recipe, run_dir, key, **own)
    results = results_of(run_dir)
    rows = (run_dir / "predictions" / "step-00000000.jsonl").read_text().splitlines()
    is_right = [row["predicted"] in row["right"] for row in map(json.loads, rows)]
    assert results["finished"]
    assert results["zero_shot"] == pytest.approx(sum(is_right) / len(is_right))


# With a learning rate of 0, no evaluation is better than those at steps 0 and 2.
PATIENT = ["train.steps=20", "train.eval_every=2", "train.patience=2", "zo.learning_rate=0"]


@pytest.mark.thorough
def test_a_run_without_better_validations_stops_and_stays_stopped(recipe, tmp_path):
    run_dir, cut = tmp_path / "run", tmp_path / "cut"
    train(recipe, run_dir, *PATIENT)
    results = results_of(run_dir)
    assert (results["finished"], results["early_stop_step"], results["best_step"]) == (True, 6, 0)
    assert results["test"] is not None
    assert 6 in snapshot_steps(run_dir / "snapshots")
    train(recipe, run_dir, *PATIENT)
    assert unmeasured(results_of(run_dir)) == unmeasured(results)
    shutil.copytree(run_dir, cut)
    lines = (run_dir / "journal.jsonl").read_text().splitlines(keepends=True)
    assert "split" in json.loads(lines[11])
    (cut / "journal.jsonl").write_text("".join(lines[:12]))  # right after the last evaluation
    train(recipe, cut, *PATIENT)
    assert (cut / "journal.jsonl").read_text() == "".join(lines)
    fewer = train(recipe, run_dir, *PATIENT, "train.steps=4", runner=run_forked)
    assert_one_error(fewer, 2, "has 6 steps already; train.steps=4")


def test_a_journal_gives_back_the_weights_that_were_removed(recipe, tmp_path):
    run_dir, keys = (
        tmp_path / "run",
        ["peft.kind=prefix", "train.keep_snapshots=0", "train.steps=4"],
    )
    train(recipe, run_dir, *keys)
    results = results_of(run_dir)
    # The values from which a prefix starts, which no replay computes.
    assert snapshot_steps(run_dir / "snapshots") == [0]
    run_forked_well(["--run", run_dir, "--out", tmp_path / "model"], program="export")
    assert read_manifest(tmp_path / "model")["digest"] == results["weights_digest"]
    train(recipe, run_dir, *keys, "train.steps=6", "train.keep_snapshots=1")
    assert results_of(run_dir)["steps"] == 6
    assert snapshot_steps(run_dir / "snapshots") == [0, 6]


def test_monitors_get_every_step_and_evaluation(recipe, tmp_path):
    run_dir = tmp_path / "run"
    train(recipe, run_dir, "train.report_to=[csv]")
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "projected_gradient", "learning_rate", "dev_loss", "test_accuracy"):
        expected = [
            (entry["step"], pytest.approx(entry[name])) for entry in entries if name in entry
        ]
        (path,) = (run_dir / "monitors").rglob(f"{name}.csv")
        with path.open() as file:
            _, *rows = csv.reader(file)
        assert [(int(row[0]), float(row[1])) for row in rows] == expected


def test_monitors_show_a_resumed_run_as_one(recipe, tmp_path):
    keys = ["train.report_to=[tensorboard]", "train.eval_every=4"]
    train(recipe, tmp_path / "run", *keys, "train.steps=4")
    train(recipe, tmp_path / "run", *keys, "train.steps=8")
    shown = EventAccumulator(str(tmp_path / "run" / "monitors" / "run"))
    shown.Reload()
    assert [point.step for point in shown.Scalars("loss")] == list(range(1, 9))
    assert all(point.value > 0 for point in shown.Scalars("tokens_per_second"))
