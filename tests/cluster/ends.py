"""What a run came to: the same for runs of the same settings, wherever they were started and how often."""

from __future__ import annotations

import json

from lezo_ds.journal import read_journal
from lezo_ds.model.snapshots import read_manifest, snapshot_path

SHORT = ("train.steps=8", "train.eval_every=4")
LONG = ("train.steps=200", "train.eval_every=50", "train.snapshot_every=20")
"""Steps enough that a run is told to stop before it has done them."""


def results_of(run_dir):
    return json.loads((run_dir / "results.json").read_text())


def end(run_dir):
    """Return a finished run's records and the digests of its best and its last weights."""
    results = results_of(run_dir)
    assert results["finished"]
    last = read_manifest(snapshot_path(run_dir / "snapshots", results["steps"]))
    return read_journal(run_dir / "journal.jsonl")[1], results["weights_digest"], last["digest"]


def num_steps_done(run_dir):
    """Return how many steps the journal holds, of a run that may be under way."""
    journal = run_dir / "journal.jsonl"
    return journal.read_text().count('"kind":"step"') if journal.exists() else 0


def assert_stopped_by_agreement(run_dir):
    """Assert that a long run ended well before its end, with all it had done in its results."""
    results = results_of(run_dir)
    assert not results["finished"]
    assert 0 < results["steps"] == num_steps_done(run_dir) < 200
