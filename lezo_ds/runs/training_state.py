"""Where a first-order run stands: the file that says which of its checkpoints counts.

A zeroth-order run needs none: its journal is its state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, write_atomically
from lezo_ds.journal import EvaluationRecord, Header


@dataclass(frozen=True)
class TrainingState:
    """What training_state.json holds.

    Attributes:
        header: what the run was begun with, as in a journal.
        world_size: number of ranks; the checkpoint's optimizer states are sharded among as many.
        step: number of steps the checkpoint has seen, 0 for none yet.
        evaluations: all up to now; those of steps after the checkpoint will be done again.
    """

    header: Header
    world_size: int
    step: int = 0
    evaluations: tuple[EvaluationRecord, ...] = ()

    def at_checkpoint(self) -> TrainingState:
        """Return the state without evaluations of steps after the checkpoint."""
        return replace(self, evaluations=tuple(e for e in self.evaluations if e.step <= self.step))

    def with_evaluations(self, evaluations: Sequence[EvaluationRecord]) -> TrainingState:
        """Return the state with these evaluations."""
        return replace(self, evaluations=tuple(evaluations))

    def write(self, path: Path) -> None:
        """Write the file: it holds the old state or the new, never a mix.

        Raises:
            LezoError: it cannot be written.
        """
        with failures_named(path):
            write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")


def read_training_state(path: Path) -> TrainingState:
    """Read the file that `TrainingState.write` wrote.

    Raises:
        UserError: it is not there, or is not such a file.
    """
    try:
        values = json.loads(path.read_text())
        evaluations = tuple(EvaluationRecord(**record) for record in values["evaluations"])
        header = Header(**values["header"])
        return TrainingState(header, values["world_size"], values["step"], evaluations)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read",
            got=f"{type(error).__name__}: {error}",
            expected="the state that a first-order run wrote",
            fix="restore the file from a copy, or use another run_dir",
        ) from error
