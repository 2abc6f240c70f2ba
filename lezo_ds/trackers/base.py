"""What a tracker is."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lezo_ds.files import write_atomically

PROJECT = "lezo_ds"
"""The project of all runs, where a service has projects."""


@dataclass(frozen=True)
class RunFacts:
    """What a tracker knows of a run.

    Attributes:
        name: name of the run's directory.
        folder: folder for the tracker's files. It exists.
        config: the run's configuration, as nested plain dicts.
        step: number of steps that are done. What was logged of later steps is logged again.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    step: int

    def run_id(self, service: str) -> str:
        """Return the id of the run at a service: eight hexadecimal digits, the same when it resumes."""
        path = self.folder / f"{service}-id"
        if not path.exists():
            write_atomically(path, secrets.token_hex(4))
        return path.read_text()


class Tracker(ABC):
    """Takes the metrics of a run, on rank 0. Its constructor opens it, or opens it again on resumption.

    A tracker may raise anything. The run then goes on without it.

    Args:
        run: the run.

    Attributes:
        library: name of the package that it imports; None if it needs none.
    """

    library: ClassVar[str | None] = None

    @classmethod
    def check(cls) -> None:
        """Raise anything if the tracker could not be opened. Its library is installed."""
        return

    @abstractmethod
    def __init__(self, run: RunFacts) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step or an evaluation.

        Args:
            step: number of steps done. It goes back once: the final test score is that of the best step.
            values: by the names that metrics.jsonl has.
        """

    def close(self) -> None:
        """Finish what is not written yet."""
        return
