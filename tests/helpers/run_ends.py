"""What a run has left in its directory, and the part of it that is the same however the run got
there."""

from __future__ import annotations

import json
from dataclasses import dataclass

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_path
from lezo_ds.journal import EvaluationRecord, read_journal
from lezo_ds.zo.records import StepRecord

STEP = '"kind":"step"'


@dataclass(frozen=True)
class End:
    results: dict
    digest: str
    weights: dict
    journal: bytes


def end(run_dir):
    results = results_of(run_dir)
    assert results["finished"]
    kept = [
        "zero_shot",
        "test",
        "best_step",
        "best_dev_loss",
        "steps",
        "weights_digest",
        "skipped_steps",
    ]
    manifest = read_manifest(snapshot_path(run_dir / "snapshots", results["steps"]))
    return End(
        results={name: results[name] for name in kept},
        digest=manifest["digest"],
        weights=manifest["files"],
        journal=(run_dir / "journal.jsonl").read_bytes(),
    )


def results_of(run_dir):
    return json.loads((run_dir / "results.json").read_text())


def records_of(run_dir, kind=(StepRecord, EvaluationRecord)):
    return [
        record for record in read_journal(run_dir / "journal.jsonl")[1] if isinstance(record, kind)
    ]


def digest_after(run_dir, step):
    return read_manifest(snapshot_path(run_dir / "snapshots", step))["digest"]


def reaches(run_dir, text, count):
    """Return whether the journal holds a text at least `count` times."""
    path = run_dir / "journal.jsonl"
    return path.exists() and path.read_text().count(text) >= count


def num_steps(run_dir):
    path = run_dir / "journal.jsonl"
    return len(records_of(run_dir, StepRecord)) if path.exists() else 0
