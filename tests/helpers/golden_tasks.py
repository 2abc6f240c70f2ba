"""Records of every task with the text that MeZO's protocol makes of them, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Golden:
    """A record in its hub's schema, and the Example that it becomes."""

    task: str
    record: dict[str, Any]
    prompt: str
    candidates: tuple[str, ...]
    label: int
    references: tuple[str, ...]


_ROWS = json.loads(
    (Path(__file__).parents[1] / "unit" / "golden" / "tasks.json").read_text(encoding="utf-8")
)
GOLDEN = [
    Golden(**row | {name: tuple(row[name]) for name in ("candidates", "references")})
    for row in _ROWS
]
