"""The disk space that a run takes. It is checked before the run starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from lezo_ds.checkpoints.checkpoint import DTYPES
from lezo_ds.checkpoints.snapshots import snapshot_steps
from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, eval_every
from lezo_ds.errors import UserError
from lezo_ds.runs.directory import RunDirectory

_LOW_BITS_BYTES = 2
"""Size of the low bits of a 16-bit parameter that zo.update_precision=fp32_master stores."""

_ADAMW_BYTES = 12
"""Size of a trained parameter in AdamW's checkpoint: a float32 weight and two float32 moments."""


def snapshot_sizes(config: RunConfig, num_parameters: int, num_trained: int) -> list[int]:
    """Return the most snapshots and checkpoints that are on the disk at one time.

    That is while the last of them is written, before the oldest is removed.

    Args:
        config: of the run.
        num_parameters: number of the model's parameters.
        num_trained: number of those that are trained, which are all that an adapter's snapshot has.

    Returns:
        The bytes of each.
    """
    train = config.train
    if config.method not in TRAINED or train.steps is None:
        return []
    itemsize = DTYPES[config.model.dtype].itemsize
    num_stored = num_parameters if config.peft.kind == "none" else num_trained
    size = num_stored * itemsize
    is_master = config.zo.update_precision == "fp32_master"
    if config.method in ZEROTH_ORDER and is_master and itemsize == 2:
        size += _LOW_BITS_BYTES * num_trained
    every = train.snapshot_every
    if every is None:
        every = eval_every(config)
    num_due = -(-train.steps // every) if every > 0 else 1
    num_kept = max(1, train.keep_snapshots)
    if config.method != "adamw":
        return [size] * min(num_kept + 1, num_due)
    num_kept += 1  # that of the best step
    return [size] * min(num_kept + 1, num_due) + [_ADAMW_BYTES * num_trained] * 2


def check_disk(config: RunConfig, num_parameters: int, num_trained: int) -> None:
    """Refuse to start or resume a run whose snapshots will not fit the disk."""
    directory = RunDirectory(config.run_dir)
    if config.train.steps in snapshot_steps(directory.snapshots):  # nothing is written any more
        return
    present = _size_of(directory.snapshots) + _size_of(directory.checkpoints)
    needed = sum(snapshot_sizes(config, num_parameters, num_trained)) - present
    path = directory.path.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"the snapshots of run_dir={directory.path} need {needed / 1e9:.3g} GB more, "
            f"and its disk has {free / 1e9:.3g} GB left",
            fix="make room, set another run_dir, or train.keep_snapshots=1",
        )


def _size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, which need not exist."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
