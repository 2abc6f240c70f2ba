"""Snapshots of other runs in a run's directory: they are never used, and never lost."""

import shutil

import pytest
from commands import train
from run_ends import digest_after, end

from lezo_ds.checkpoints.snapshots import snapshot_path

pytestmark = pytest.mark.distributed

LENGTH = [f"train.{key}" for key in ("steps=8", "eval_every=8", "keep_snapshots=9")]
LENGTH.append("train.snapshot_every=4")


def outcome(run_dir):
    return end(run_dir).results, end(run_dir).weights  # a journal's header has the number of steps


@pytest.mark.thorough
def test_snapshots_of_another_run_that_are_copied_in_are_set_aside(recipe, tmp_path):
    run_dir, first, second = (tmp_path / name for name in ("run", "first", "second"))
    train(recipe, first, *LENGTH, "seed=0")
    train(recipe, second, *LENGTH, "seed=1")
    train(recipe, run_dir, *LENGTH, "seed=1", "train.steps=5", "train.snapshot_every=0")
    snapshots = run_dir / "snapshots"
    shutil.copytree(snapshot_path(first / "snapshots", 4), snapshot_path(snapshots, 4))
    shutil.rmtree(snapshot_path(snapshots, 5))
    train(recipe, run_dir, *LENGTH, "seed=1", num_ranks=2)
    assert outcome(run_dir) == outcome(second)
    assert digest_after(run_dir / "earlier-1", 4) == digest_after(first, 4)
