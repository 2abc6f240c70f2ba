"""The state file of a first-order run, which names the checkpoint to resume from.

A zeroth-order run has no such file, because its journal is its state.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, write_atomically
from lezo_ds.journal import EvaluationRecord, Header
from lezo_ds.model.snapshots import SnapshotOwner
from lezo_ds.runs.header import journal_owner


@dataclass(frozen=True)
class TrainingState:
    """The content of training_state.json.

    Attributes:
        header: what the run was started with, as in a journal.
        world_size: number of ranks. The optimizer states in the checkpoint have one shard per rank.
        step: number of steps that the checkpoint has seen; 0 if there is no checkpoint yet.
        evaluations: all evaluations so far. Those after the checkpoint are repeated when the run resumes.
    """

    header: Header
    world_size: int
    step: int = 0
    evaluations: tuple[EvaluationRecord, ...] = ()

    def at_checkpoint(self) -> TrainingState:
        """Return the state without evaluations of steps after the checkpoint."""
        return replace(self, evaluations=tuple(e for e in self.evaluations if e.step <= self.step))

    @property
    def owner(self) -> SnapshotOwner:
        """What the manifests of the run's snapshots must have."""
        return journal_owner(self.header, ())

    def write(self, path: Path) -> None:
        """Replace the file atomically.

        Raises:
            LezoError: the file cannot be written.
        """
        with failures_named(path):
            write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")


def read_training_state(path: Path) -> TrainingState:
    """Read the file that `TrainingState.write` wrote.

    Raises:
        UserError: the file is missing or is not a training state.
    """
    try:
        values = json.loads(path.read_text())
        return TrainingState(
            header=Header(**values["header"]),
            world_size=values["world_size"],
            step=values["step"],
            evaluations=tuple(EvaluationRecord(**record) for record in values["evaluations"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read",
            got=f"{type(error).__name__}: {error}",
            expected="the state that a first-order run wrote",
            fix="restore the file from a copy, or use another run_dir",
        ) from error


def weights_removed(run_dir: Path) -> UserError:
    """Return the error for a first-order run whose weights are wanted, but not there any more."""
    return UserError(
        f"run {run_dir} has no weights",
        got="no checkpoint and no snapshot: train.keep_snapshots=0 removes them when a run has finished",
        expected="a run of adamw that keeps them, since no journal can replay it",
        fix=f"train again: lezo-ds train --config {run_dir / 'config.yaml'} run_dir=NEW "
        "train.keep_snapshots=1",
    )
