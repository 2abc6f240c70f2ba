"""What a run has left in its directory, and what of it is the same however the run got there."""

import json
from types import SimpleNamespace

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_path
from lezo_ds.journal import EvaluationRecord, read_journal
from lezo_ds.zo.records import StepRecord

STEP = '"kind":"step"'


KEPT = ("zero_shot", "test", "best_step", "best_dev_loss", "steps", "skipped_steps")


def end(run_dir):
    """Return what a finished run has left: results, weights by file, and its journal's bytes."""
    results = results_of(run_dir)
    assert results["finished"]
    manifest = read_manifest(snapshot_path(run_dir / "snapshots", results["steps"]))
    return SimpleNamespace(
        results={name: results[name] for name in (*KEPT, "weights_digest")},
        weights=(manifest["digest"], manifest["files"]),
        journal=(run_dir / "journal.jsonl").read_bytes(),
    )


def results_of(run_dir):
    return json.loads((run_dir / "results.json").read_text())


def records_of(run_dir, kind=(StepRecord, EvaluationRecord)):
    records = read_journal(run_dir / "journal.jsonl").records
    return [record for record in records if isinstance(record, kind)]


def digest_after(run_dir, step):
    return read_manifest(snapshot_path(run_dir / "snapshots", step))["digest"]


def reaches(run_dir, text, count):
    """Return whether the journal holds a text at least `count` times."""
    path = run_dir / "journal.jsonl"
    return path.exists() and path.read_text().count(text) >= count


def num_steps(run_dir):
    path = run_dir / "journal.jsonl"
    return len(records_of(run_dir, StepRecord)) if path.exists() else 0
