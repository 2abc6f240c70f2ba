"""What ends a run early, what it keeps, and where it reports."""

import csv
import os
import shutil
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from assets import REPOSITORY, read_lines
from commands import assert_refused, lezo, run_words, scores_of, train
from run_ends import results_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_tasks import NUM_POSITIONS, write_tasks, write_writer

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_steps
from lezo_ds.data.rewards import reward
from lezo_ds.runs.screen import WORSE
from lezo_ds.zo.estimators import Spsa

pytestmark = pytest.mark.distributed

PATH = ":".join(f"{REPOSITORY}/{folder}" for folder in ("", "tests/helpers", "tests/runs"))
MEASURED = {"seconds", "peak_memory_bytes"}
FAILURE = "LEZO_TEST_METRIC"
"""A variable of the environment: what a metric returns, or no number, to make it raise."""


def unmeasured(results):
    return {name: results[name] for name in results.keys() - MEASURED}


def share_of_right(predicted, examples):
    """Return a score as a user's metric does: NumPy's float, or a failure if an answer is wrong."""
    pairs = zip(predicted, examples, strict=True)
    share = sum(answer == example.label for answer, example in pairs) / len(examples)
    if share < 1 and FAILURE in os.environ:
        return float(os.environ[FAILURE])
    return np.float32(share)


@dataclass(frozen=True)
class Leaves(Spsa):
    """An estimator with a call that belongs to a program of its own."""

    def estimate(self, probes, losses):
        sys.exit(0)


def test_a_run_goes_on_when_failing_code_of_ones_own_is_corrected(recipe, tmp_path):
    run_dir = tmp_path / "run"
    own = {"num_ranks": 2, "PYTHONPATH": PATH}
    key = "data.metric=test_options:share_of_right"
    words = run_words(recipe, run_dir, key)
    assert_refused("train", words, key, **own, **{FAILURE: "nan"})
    words = run_words(recipe, tmp_path / "left", "zo.estimator=test_options:Leaves")
    assert_refused("train", words, "Leaves failed: SystemExit: 0 (", **own)
    assert not list(tmp_path.glob("*/results.json"))
    train(recipe, run_dir, key, **own)
    rows = read_lines(run_dir / "predictions" / "step-00000000.jsonl")
    is_right = [row["predicted"] in row["right"] for row in rows]
    assert results_of(run_dir)["zero_shot"] == pytest.approx(sum(is_right) / len(is_right))


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
    assert '"split"' in lines[11]
    (cut / "journal.jsonl").write_text("".join(lines[:12]))  # right after the last evaluation
    train(recipe, cut, *PATIENT)
    assert (cut / "journal.jsonl").read_text() == "".join(lines)


def test_monitors_get_every_step_and_evaluation_and_show_a_resumed_run_as_one(recipe, tmp_path):
    run_dir = tmp_path / "run"
    keys = ["train.report_to=[csv, tensorboard]", "train.eval_every=4"]
    for steps in (4, 8):
        train(recipe, run_dir, *keys, f"train.steps={steps}")
    shown = EventAccumulator(str(run_dir / "monitors" / "run"))
    shown.Reload()
    assert [point.step for point in shown.Scalars("loss")] == list(range(1, 9))
    assert all(point.value > 0 for point in shown.Scalars("tokens_per_second"))
    entries = read_lines(run_dir / "metrics.jsonl")
    for name in ("loss", "projected_gradient", "learning_rate", "dev_loss", "test_accuracy"):
        logged = [entry for entry in entries if name in entry]
        expected = [(entry["step"], pytest.approx(entry[name])) for entry in logged]
        (path,) = (run_dir / "monitors").rglob(f"{name}.csv")
        with path.open() as file:
            rows = [row for row in csv.reader(file) if row[0] != "step"]  # a header of each start
        assert [(int(row[0]), float(row[1])) for row in rows] == expected


def test_a_run_that_gets_worse_says_so_and_gives_the_base_model(recipe, tmp_path):
    run_dir, file = tmp_path / "run", tmp_path / "run.lezo"
    model = f"model.path={recipe.parent / 'model'}"
    keys = [model, "train.keep_snapshots=1", "zo.learning_rate=1"]
    assert WORSE in train(recipe, run_dir, *keys).out
    results = results_of(run_dir)
    assert (results["best_step"], results["worse_than_base"], results["steps"]) == (0, True, 8)
    assert results["best_dev_loss"] < results["trained_dev_loss"]
    assert results["test"] == results["zero_shot"]
    assert snapshot_steps(run_dir / "snapshots") == [8]
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines if "dev_loss" in line] == [0, 4, 8]

    scored = scores_of("--run", run_dir)
    assert (scored["step"], scored["score"]) == (0, results["zero_shot"])
    lezo("export", "--run", run_dir, "--journal", file)
    exported = lezo("export", "--journal", file, model, "--out", tmp_path / "out")
    assert WORSE in exported.err and WORSE in (tmp_path / "out" / "README.md").read_text()
    digests = read_manifest(tmp_path / "out")["digest"], results["weights_digest"]
    assert digests == (results["model_fingerprint"],) * 2


@reward
def nothing(answers, records):
    return [0.0 for _ in answers]


def unknown(completions, **fields):
    return [None for _ in completions]


def num_words(completions, **fields):
    return [len(completion.split()) for completion in completions]


def test_rewards_that_are_all_equal_are_named_and_samples_show_the_answers(recipe, tmp_path):
    run_dir = tmp_path / "run"
    keys = [
        f"model.path={write_writer(tmp_path / 'writer')}",
        f"data.path={write_tasks(tmp_path / 'data') / 'squad'}",
        "data.task=squad",
        f"data.max_length={NUM_POSITIONS}",
        "generation.max_new_tokens=12",
        "train.objective={test_options:nothing: 1, test_options:num_words: 0}",
        "data.metric=reward",
        *(f"data.num_{split}=9" for split in ("train", "dev", "test")),
    ]
    finished = train(recipe, run_dir, *keys, PYTHONPATH=PATH, num_ranks=2)
    assert "All losses or rewards were equal in 8 of 8 steps" in finished.out
    assert "-0" not in finished.out.replace("-0000", "").split("Run directory")[0]
    assert results_of(run_dir)["flat_steps"] == 8
    samples = read_lines(run_dir / "samples.jsonl")
    of_base = [sample for sample in samples if (sample["step"], sample["split"]) == (0, "test")]
    rows = read_lines(run_dir / "predictions" / "step-00000000.jsonl")
    predicted = [row["predicted"] for row in rows]
    assert [sample["answer"] for sample in of_base] == predicted[:4]
    for sample in samples:
        assert str(sample["reward"]) == "0.0"  # and not -0.0
        assert sample["rewards"] == {"nothing": 0.0, "num_words": len(sample["answer"].split())}
        assert type(sample["ended"]) is bool
    lines = read_lines(run_dir / "metrics.jsonl")
    means = [line["test_rewards/num_words"] for line in lines if "test_rewards/num_words" in line]
    num_all_words = sum(len(answer.split()) for answer in predicted)
    assert means[0] == pytest.approx(num_all_words / len(predicted))
    assert all(0 <= line.get("test_share_ended", 0) <= 1 for line in lines)
    words = run_words(recipe, tmp_path / "unjudged", *keys, "train.objective=test_options:unknown")
    assert_refused("train", words, "no answer of the split test", PYTHONPATH=PATH, num_ranks=2)
