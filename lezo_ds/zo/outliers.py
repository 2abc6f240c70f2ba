"""Steps whose projected gradient is out of all proportion."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lezo_ds.zo.records import StepRecord

WINDOW = 100
"""Number of applied steps that say what an ordinary projected gradient is."""

_FEWEST = 20  # the median of fewer steps says little


def is_outlier(projected_grads: Sequence[float], records: Sequence[StepRecord], factor: float | None) -> bool:
    """Return whether a step has to be skipped because its largest |projected gradient| is an outlier.

    Args:
        projected_grads: of the step; empty if they are not finite.
        records: of the steps before it; the last `WINDOW` applied ones count.
        factor: multiple of their median beyond which a projected gradient is an outlier; None for no limit.
    """
    if factor is None or not projected_grads:
        return False
    recent: list[float] = []
    for record in reversed(records):
        if len(recent) == WINDOW:
            break
        if record.applied:
            recent.append(_magnitude(record.projected_grads))
    if len(recent) < _FEWEST:
        return False
    return _magnitude(projected_grads) > factor * statistics.median(recent)


def _magnitude(projected_grads: Sequence[float]) -> float:
    return max(map(abs, projected_grads))
