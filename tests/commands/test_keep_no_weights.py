"""train.keep_snapshots=0: a finished run leaves results and records, and its weights can be had again."""

from __future__ import annotations

import pytest
from assets import REPOSITORY
from commands import assert_one_error, run_forked, run_forked_well, wait_until
from run_ends import results_of

from lezo_ds.model.snapshots import read_manifest, snapshot_steps

pytestmark = pytest.mark.distributed

KEYS = ["train.keep_snapshots=0", "train.steps=4", "train.eval_every=2"]
ADAMW = ["method=adamw", "adamw.learning_rate=1e-3"]


def train(recipe, run_dir, *more, runner=run_forked_well, **options):
    return runner(["--config", recipe, f"run_dir={run_dir}", *KEYS, *more], **options)


def export(run_dir, target, runner=run_forked_well):
    return runner(["--run", run_dir, "--out", target], program="export.py")


def without_times(results):
    return {name: results[name] for name in results.keys() - {"seconds", "peak_memory_bytes"}}


@pytest.mark.parametrize("kind", ["none", "prefix"])
def test_a_journal_gives_back_the_weights_that_were_removed(kind, recipe, tmp_path):
    run_dir, keys = tmp_path / "run", [f"peft.kind={kind}"]
    train(recipe, run_dir, *keys)
    results = results_of(run_dir)
    assert results["finished"]
    kept = [0] if kind == "prefix" else []  # the values from which a prefix starts, which nothing computes
    assert snapshot_steps(run_dir / "snapshots") == kept
    exported = export(run_dir, tmp_path / "model")
    if not kept:
        assert f"step {results['best_step']} is replayed from the base weights" in exported.err
    assert read_manifest(tmp_path / "model")["digest"] == results["weights_digest"]
    train(recipe, run_dir, *keys)
    assert without_times(results_of(run_dir)) == without_times(results)
    assert snapshot_steps(run_dir / "snapshots") == kept
    train(recipe, run_dir, *keys, "train.steps=6", "train.keep_snapshots=1")
    assert results_of(run_dir)["steps"] == 6
    assert snapshot_steps(run_dir / "snapshots") == [*kept, 6]


def test_a_first_order_run_says_why_it_has_no_weights_and_how_to_get_them(recipe, tmp_path):
    run_dir, again = tmp_path / "run", tmp_path / "again"
    train(recipe, run_dir, *ADAMW)
    results = results_of(run_dir)
    assert (results["finished"], results["steps"]) == (True, 4)
    assert not (run_dir / "checkpoints").exists()
    assert snapshot_steps(run_dir / "snapshots") == []
    message = f"run {run_dir} has no weights; got: no checkpoint and no snapshot: train.keep_snapshots=0"
    command = f"train --config {run_dir / 'config.yaml'} run_dir=NEW train.keep_snapshots=1"
    for failed in (
        export(run_dir, tmp_path / "model", runner=run_forked),
        run_forked(["--run", run_dir], program="evaluate.py"),
        train(recipe, run_dir, *ADAMW, runner=run_forked),
    ):
        assert_one_error(failed, 2, message, command)
        assert "loading" not in failed.err
    assert results_of(run_dir) == results
    keys = [f"run_dir={again}", "train.keep_snapshots=1"]
    run_forked_well(["--config", run_dir / "config.yaml", *keys], directory=REPOSITORY)
    export(again, tmp_path / "model")
    assert read_manifest(tmp_path / "model")["digest"] == results["weights_digest"]


def test_a_run_that_was_stopped_keeps_its_newest_weights(recipe, tmp_path):
    run_dir, keys = tmp_path / "run", [*ADAMW, "train.steps=30", "train.eval_every=30"]

    def stop(ranks):
        wait_until(lambda: '"learning_rate"' in read(run_dir / "metrics.jsonl"), ranks[0])
        (run_dir / "STOP").touch()

    train(recipe, run_dir, *keys, meanwhile=stop)
    results = results_of(run_dir)
    assert not results["finished"]
    assert snapshot_steps(run_dir / "checkpoints") == [results["steps"]]
    assert snapshot_steps(run_dir / "snapshots") == [results["steps"]]


def read(path):
    return path.read_text() if path.exists() else ""
