"""The journal: a write-ahead log from which the weights after every step can be rebuilt."""

from lezo_ds.journal.journal import (
    EvaluationRecord,
    Header,
    Journal,
    JournalRecord,
    read_journal,
    step_checksums,
)
from lezo_ds.zo.records import StepRecord

__all__ = [
    "EvaluationRecord",
    "Header",
    "Journal",
    "JournalRecord",
    "StepRecord",
    "read_journal",
    "step_checksums",
]
