"""The lines of metrics.jsonl, in which a run notes each step and each evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return all entries of a run's metrics.jsonl, oldest first; none if there is no such file.

    A last line that is still being written is left out.
    """
    file = directory / "metrics.jsonl"
    data = file.read_bytes() if file.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def is_step(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is about a step; otherwise it is about an evaluation."""
    return "loss" in entry


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock(3725.4)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
