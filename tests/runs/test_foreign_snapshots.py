"""Snapshots of other runs in a run's directory: they are never used, and never lost."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace

import pytest
from commands import run_forked, run_forked_well, wait_until
from run_ends import STEP, digest_after, end, reaches, results_of

from lezo_ds.model.snapshots import read_manifest, snapshot_path

LENGTH = ["train.steps=8", "train.eval_every=8", "train.keep_snapshots=9"]
NO_SNAPSHOTS = "train.snapshot_every=0"

pytestmark = pytest.mark.distributed


def arguments(recipe, run_dir, *more):
    return ["--config", recipe, f"run_dir={run_dir}", *LENGTH, *more]


@pytest.fixture(scope="module")
def first(recipe, tmp_path_factory):
    """A run with snapshots after steps 4 and 8."""
    run_dir = tmp_path_factory.mktemp("first") / "run"
    run_forked_well(arguments(recipe, run_dir, "train.snapshot_every=4"))
    return run_dir


@pytest.fixture(scope="module")
def second(recipe, tmp_path_factory):
    """The same with another seed."""
    run_dir = tmp_path_factory.mktemp("second") / "run"
    run_forked_well(arguments(recipe, run_dir, "train.snapshot_every=4", "seed=1"))
    return run_dir


def kill_after_five_steps(recipe, run_dir):
    def kill(ranks):
        wait_until(lambda: reaches(run_dir, STEP, 5), ranks[0])
        ranks[0].kill()

    finished = run_forked(arguments(recipe, run_dir, NO_SNAPSHOTS, "seed=1"), meanwhile=kill)
    assert finished.code == -signal.SIGKILL
    return finished


def outcome(run_dir):
    """Return the end of a run, but for the journal's bytes: its header has `train.snapshot_every`."""
    return replace(end(run_dir), journal=b"")


def export(run_dir, step, target):
    finished = run_forked_well(["--run", run_dir, "--step", step, "--out", target], program="export.py")
    return read_manifest(target)["digest"], finished.err


def test_a_run_started_anew_in_a_used_directory_sets_aside_what_is_there(recipe, first, second, tmp_path):
    run_dir = shutil.copytree(first, tmp_path / "run")
    (run_dir / "journal.jsonl").rename(tmp_path / "journal.jsonl")
    killed = kill_after_five_steps(recipe, run_dir)
    names = "config.yaml, environment.json, metrics.jsonl, predictions, results.json, snapshots"
    assert f"an earlier run left {names}; moved to {run_dir}/earlier-1" in killed.err
    run_forked_well(arguments(recipe, run_dir, NO_SNAPSHOTS, "seed=1"))
    assert outcome(run_dir) == outcome(second)
    assert results_of(run_dir / "earlier-1") == results_of(first)
    for file in (first / "predictions").iterdir():
        assert (run_dir / "earlier-1" / "predictions" / file.name).read_bytes() == file.read_bytes()
    for step in (4, 8):
        assert digest_after(run_dir / "earlier-1", step) == digest_after(first, step)


def test_a_snapshot_that_was_copied_in_is_set_aside(recipe, first, second, tmp_path):
    run_dir = tmp_path / "run"
    kill_after_five_steps(recipe, run_dir)
    place = snapshot_path(run_dir / "snapshots", 4)
    shutil.copytree(snapshot_path(first / "snapshots", 4), place)
    finished = run_forked_well(arguments(recipe, run_dir, NO_SNAPSHOTS, "seed=1"), num_ranks=2)
    assert (
        "of another run, or of steps that are no longer recorded: snapshots/step-00000004; moved to"
        in finished.err
    )
    assert outcome(run_dir) == outcome(second)
    assert digest_after(run_dir / "earlier-1", 4) == digest_after(first, 4)


def test_an_export_uses_only_the_snapshots_of_the_run(first, second, tmp_path):
    run_dir = shutil.copytree(second, tmp_path / "run")
    (run_dir / "results.json").unlink()
    for step, source in (
        (4, snapshot_path(first / "snapshots", 4)),
        (8, snapshot_path(run_dir / "snapshots", 4)),
    ):
        place = snapshot_path(run_dir / "snapshots", step)
        shutil.rmtree(place)
        shutil.copytree(source, place)
        digest, err = export(run_dir, step, tmp_path / f"exported-{step}")
        assert f"snapshot {place} belongs to another run" in err
        assert digest == digest_after(second, step)
