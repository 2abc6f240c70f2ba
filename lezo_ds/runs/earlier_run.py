"""What another run left in a run's directory: it is moved aside, so that it is neither used nor lost."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from lezo_ds.files import failures_named, make_directory, sync
from lezo_ds.model.snapshots import SnapshotOwner, read_facts, snapshot_path, snapshot_steps
from lezo_ds.runs.run_directory import RunDirectory

logger = logging.getLogger(__name__)


def set_aside_earlier_run(directory: RunDirectory) -> None:
    """Move everything that an earlier run wrote. Its journal or training state is not there any more.

    Raises:
        LezoError: a file cannot be moved.
    """
    _set_aside(directory, directory.outputs(), "an earlier run left")


def set_aside_foreign_snapshots(directory: RunDirectory, owner: SnapshotOwner) -> None:
    """Move the snapshots of other runs, and those after the end of the run's records.

    Raises:
        LezoError: a snapshot cannot be moved.
    """
    root = directory.snapshots
    facts = {step: read_facts(snapshot_path(root, step)) for step in snapshot_steps(root)}
    foreign = [step for step, found in facts.items() if found and owner.owns(step, found) is False]
    reason = "of another run, or of steps that are no longer recorded:"
    _set_aside(directory, [snapshot_path(root, step) for step in foreign], reason)


def _set_aside(directory: RunDirectory, paths: Sequence[Path], reason: str) -> None:
    if not paths:
        return
    candidates = (directory.path / f"earlier-{number}" for number in itertools.count(1))
    target = next(path for path in candidates if not path.exists())
    names = [path.relative_to(directory.path) for path in paths]
    with failures_named(target):
        for path, name in zip(paths, names, strict=True):
            make_directory((target / name).parent)
            path.rename(target / name)
            sync((target / name).parent)
            sync(path.parent)
    listed = ", ".join(map(str, names))
    logger.warning("%s: %s %s; moved to %s", directory.path, reason, listed, target)
