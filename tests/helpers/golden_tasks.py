"""Records of every task with the text that MeZO's protocol makes of them, worked out by hand."""

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


_FILE = Path(__file__).parents[1] / "unit" / "golden" / "tasks.json"
GOLDEN = [
    Golden(**row | {name: tuple(row[name]) for name in ("candidates", "references")})
    for row in json.loads(_FILE.read_text(encoding="utf-8"))
]
