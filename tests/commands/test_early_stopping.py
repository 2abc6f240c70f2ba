"""Early stopping: a run whose validation loss stays the same stops, and stays stopped."""

from __future__ import annotations

import json
import shutil

import pytest
from commands import run_forked_well
from run_ends import digest_after, records_of, results_of

from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.run import stopping_step
from lezo_ds.tools.sweep import plan_sweep
from lezo_ds.zo.records import StepRecord

# With a learning rate of 0, no evaluation is better than the first, at step 2.
SETTINGS = ["train.steps=20", "train.eval_every=2", "train.patience=2", "train.keep_snapshots=2"]
RATES = {"lezo": "zo.learning_rate=0", "adamw": "adamw.learning_rate=0"}


def evaluations(*losses, split="dev"):
    return [
        EvaluationRecord(step=10 * (i + 1), split=split, loss=loss, metrics={})
        for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "patience", "step"),
    [
        ([], 1, None),
        ([3.0, 2.0, 1.0], 1, None),
        ([3.0, 3.0], 1, 20),
        ([3.0, 4.0, 2.0, 2.5, 2.4], 2, 50),
        ([3.0, 4.0, 2.0, 2.5, 2.4], 3, None),
        ([3.0, 4.0, 4.0, 2.0, 1.0], 2, 30),  # what comes later changes nothing
        ([None, None, 3.0], 2, 20),
        ([None, 3.0, None, 2.0], 2, None),
        ([3.0, 3.0, 3.0], None, None),
    ],
)
def test_patience_counts_evaluations_in_a_row_that_are_not_better_than_the_best(losses, patience, step):
    assert stopping_step(evaluations(*losses), patience) == step
    tested = [*evaluations(5.0, split="test"), *evaluations(*losses), *evaluations(9.0, 9.0, split="test")]
    assert stopping_step(tested, patience) == step


@pytest.fixture(scope="module", params=RATES)
def stopped(request, recipe, tmp_path_factory):
    """A run of a sweep that stopped early, and what it printed."""
    settings = [*SETTINGS, RATES[request.param], f"method={request.param}"]
    (run,) = plan_sweep(str(recipe), ["seed=0"], tmp_path_factory.mktemp(request.param), settings)
    return run, run_forked_well(run.arguments)


@pytest.mark.distributed
def test_a_run_stops_with_a_snapshot_and_says_so(stopped):
    run, finished = stopped
    results = results_of(run.directory)
    assert (results["finished"], results["early_stop_step"], results["steps"]) == (True, 6, 6)
    assert results["best_step"] == 2
    assert results["test"] is not None
    assert (run.directory / "snapshots" / "step-00000006").is_dir()
    assert "Stopped early, at step 6: train.patience ran out." in finished.out
    assert run.state() == "done"


@pytest.mark.distributed
def test_the_same_command_changes_nothing(stopped):
    run, _ = stopped
    measured = ("seconds", "peak_memory_bytes")
    before = {name: value for name, value in results_of(run.directory).items() if name not in measured}
    finished = run_forked_well(run.arguments)
    assert "resuming at step 6 of 20" in finished.err
    after = results_of(run.directory)
    assert {name: after[name] for name in before} == before
    assert after["early_stop_step"] == 6


@pytest.mark.distributed
def test_a_run_that_is_cut_anywhere_stops_at_the_same_step(stopped, tmp_path):
    run, _ = stopped
    if run.config.method != "lezo":
        pytest.skip("only a journal can be cut")
    lines = (run.directory / "journal.jsonl").read_text().splitlines(keepends=True)
    for i, kept in enumerate((6, 11)):  # in the middle, and right after the last evaluation
        copy = tmp_path / str(i)
        shutil.copytree(run.directory, copy)
        (copy / "journal.jsonl").write_text("".join(lines[:kept]))
        assert "split" in json.loads(lines[10])
        run_forked_well([*run.arguments, f"run_dir={copy}"])
        assert (copy / "journal.jsonl").read_text() == "".join(lines)
        assert results_of(copy)["early_stop_step"] == 6


@pytest.mark.distributed
def test_more_patience_continues_the_run(stopped, tmp_path):
    run, _ = stopped
    copy = tmp_path / "run"
    shutil.copytree(run.directory, copy)
    run_forked_well([*run.arguments, f"run_dir={copy}", "train.patience=4"])
    assert results_of(copy)["early_stop_step"] == 10
    if run.config.method == "lezo":
        assert len(records_of(copy, StepRecord)) == 10
        assert digest_after(copy, 10) == digest_after(run.directory, 6)  # the rate is 0
