"""Snapshots of other runs in a run's directory: they are never used, and never lost."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from commands import run_forked_well
from run_ends import digest_after, end, results_of

from lezo_ds.checkpoints.snapshots import snapshot_path

pytestmark = pytest.mark.distributed


LENGTH = [f"train.{key}" for key in ("steps=8", "eval_every=8", "keep_snapshots=9")]


def arguments(recipe, run_dir, *more):
    return ["--config", recipe, f"run_dir={run_dir}", *LENGTH, "train.snapshot_every=4", *more]


@pytest.fixture(scope="module")
def runs(recipe, tmp_path_factory):
    """Two runs of other seeds."""
    directories = [tmp_path_factory.mktemp("runs") / f"seed-{seed}" for seed in (0, 1)]
    for seed, run_dir in enumerate(directories):
        run_forked_well(arguments(recipe, run_dir, f"seed={seed}"))
    return directories


def outcome(run_dir):
    return replace(end(run_dir), journal=b"")  # whose header has the number of steps


@pytest.mark.thorough
def test_a_run_started_anew_in_a_used_directory_sets_aside_what_is_there(recipe, runs, tmp_path):
    first, second = runs
    run_dir = shutil.copytree(first, tmp_path / "run")
    (run_dir / "journal.jsonl").unlink()
    run_forked_well(arguments(recipe, run_dir, "seed=1"))
    assert outcome(run_dir) == outcome(second)
    assert results_of(run_dir / "earlier-1") == results_of(first)
    for step in (4, 8):
        assert digest_after(run_dir / "earlier-1", step) == digest_after(first, step)


@pytest.mark.thorough
def test_a_snapshot_that_was_copied_in_is_set_aside(recipe, runs, tmp_path):
    first, second = runs
    run_dir = tmp_path / "run"
    run_forked_well(arguments(recipe, run_dir, "seed=1", "train.steps=5", "train.snapshot_every=0"))
    place = snapshot_path(run_dir / "snapshots", 4)
    shutil.copytree(snapshot_path(first / "snapshots", 4), place)
    shutil.rmtree(snapshot_path(run_dir / "snapshots", 5))
    run_forked_well(arguments(recipe, run_dir, "seed=1"), num_ranks=2)
    assert outcome(run_dir) == outcome(second)
    assert digest_after(run_dir / "earlier-1", 4) == digest_after(first, 4)
