"""Typical batches of each task, for estimates and benchmarks that run without the task's data."""

from __future__ import annotations

from dataclasses import dataclass

from lezo_ds.tasks.base import Task

DEFAULT_LENGTH = 256
"""Assumed length, in tokens, of an example of a task that is not in WORKLOADS."""


@dataclass(frozen=True)
class Workload:
    """The size of one step's batch. All of its examples have the same length.

    Attributes:
        length: tokens of prompt and candidate together.
        num_candidates: answers per example that are compared; 1 for teacher forcing.
        candidate_tokens: length of one answer in tokens, less than `length`.
        batch_size: examples per step, over all ranks.
    """

    length: int
    num_candidates: int = 2
    candidate_tokens: int = 1
    batch_size: int = 16


WORKLOADS = {
    "sst2": Workload(32),
    "rte": Workload(88),
    "cb": Workload(112, num_candidates=3),
    "boolq": Workload(200),
    "wsc": Workload(64),
    "wic": Workload(56),
    "multirc": Workload(376),
    "copa": Workload(24, num_candidates=1, candidate_tokens=6),
    "record": Workload(280, num_candidates=1, candidate_tokens=24),
    "squad": Workload(256, num_candidates=1, candidate_tokens=5),
    "drop": Workload(320, num_candidates=1, candidate_tokens=3),
}
"""Typical examples of the built-in tasks, in OPT's tokens. A real batch is as long as its longest example."""


def typical_workload(task: Task) -> Workload:
    """Return a typical batch of a task.

    A task that is not in WORKLOADS gets DEFAULT_LENGTH. The way it is trained then tells the rest:
    classification compares two candidates of one token, everything else trains on one answer of eight tokens.
    """
    if task.name in WORKLOADS:
        return WORKLOADS[task.name]
    if task.kind == "classification":
        return Workload(DEFAULT_LENGTH)
    return Workload(DEFAULT_LENGTH, num_candidates=1, candidate_tokens=8)
