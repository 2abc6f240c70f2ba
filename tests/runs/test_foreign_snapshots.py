"""Snapshots of other runs in a run's directory: they are never used, and never lost."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from commands import run_forked_well
from run_ends import digest_after, end, results_of

from lezo_ds.checkpoints.snapshots import snapshot_path

pytestmark = pytest.mark.distributed


def arguments(recipe, run_dir, *more):
    length = [
        "train.steps=8",
        "train.eval_every=8",
        "train.keep_snapshots=9",
        "train.snapshot_every=4",
    ]
    return ["--config", recipe, f"run_dir={run_dir}", *length, *more]


@pytest.fixture(scope="module")
def first(recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("first") / "run"
    run_forked_well(arguments(recipe, run_dir))
    return run_dir


@pytest.fixture(scope="module")
def second(recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("second") / "run"
    run_forked_well(arguments(recipe, run_dir, "seed=1"))
    return run_dir


def outcome(run_dir):
    return replace(end(run_dir), journal=b"")  # whose header has the number of steps


@pytest.mark.thorough
def test_a_run_started_anew_in_a_used_directory_sets_aside_what_is_there(
    recipe, first, second, tmp_path
):
    run_dir = shutil.copytree(first, tmp_path / "run")
    (run_dir / "journal.jsonl").unlink()
    run_forked_well(arguments(recipe, run_dir, "seed=1"))
    assert outcome(run_dir) == outcome(second)
    assert results_of(run_dir / "earlier-1") == results_of(first)
    for step in (4, 8):
        assert digest_after(run_dir / "earlier-1", step) == digest_after(first, step)


@pytest.mark.thorough
def test_a_snapshot_that_was_copied_in_is_set_aside(recipe, first, second, tmp_path):
    run_dir = tmp_path / "run"
    run_forked_well(arguments(recipe, run_dir, "seed=1", "train.steps=5", "train.snapshot_every=0"))
    place = snapshot_path(run_dir / "snapshots", 4)
    shutil.copytree(snapshot_path(first / "snapshots", 4), place)
    shutil.rmtree(snapshot_path(run_dir / "snapshots", 5))
    run_forked_well(arguments(recipe, run_dir, "seed=1"), num_ranks=2)
    assert outcome(run_dir) == outcome(second)
    assert digest_after(run_dir / "earlier-1", 4) == digest_after(first, 4)
