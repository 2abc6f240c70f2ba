"""The disk that a run takes. It is checked before the run starts."""

from __future__ import annotations

import shutil

from lezo_ds.checkpoints.checkpoint import DTYPES
from lezo_ds.checkpoints.snapshots import snapshot_steps
from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, eval_every
from lezo_ds.errors import UserError
from lezo_ds.runs.directory import RunDirectory

_CHECKPOINT = (
    12  # bytes of AdamW's checkpoint for each trained parameter: float32 weights and two moments
)


def snapshot_sizes(config: RunConfig, num_parameters: int, num_trained: int) -> list[int]:
    """Return the bytes of each snapshot and checkpoint on the disk while the last of them is written."""
    train, itemsize = config.train, DTYPES[config.model.dtype].itemsize
    if config.method not in TRAINED or train.steps is None:
        return []
    every = eval_every(config) if train.snapshot_every is None else train.snapshot_every
    num_due = -(-train.steps // every) if every else 1
    size = (num_parameters if config.peft.kind == "none" else num_trained) * itemsize
    if (
        config.method in ZEROTH_ORDER
        and config.zo.update_precision == "fp32_master"
        and itemsize == 2
    ):
        size += 2 * num_trained
    is_adamw = config.method == "adamw"  # it also keeps the best step's snapshot
    number = min(1 + max(1, train.keep_snapshots) + is_adamw, num_due)
    return [size] * number + [_CHECKPOINT * num_trained] * (2 * is_adamw)


def check_disk(config: RunConfig, num_parameters: int, num_trained: int) -> None:
    """Refuse to start or resume a run whose snapshots will not fit the disk."""
    directory = RunDirectory(config.run_dir)
    if config.train.steps in snapshot_steps(directory.snapshots):
        return
    files = [
        file
        for folder in (directory.snapshots, directory.checkpoints)
        for file in folder.rglob("*")
    ]
    present = sum(file.stat().st_size for file in files if file.is_file())
    needed = sum(snapshot_sizes(config, num_parameters, num_trained)) - present
    place = directory.path.absolute()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    if needed > free:
        what = f"the snapshots of run_dir={directory.path} need {needed / 1e9:.3g} GB more"
        fix = "make room, set another run_dir, or train.keep_snapshots=1"
        raise UserError(f"{what}, and its disk has {free / 1e9:.3g} GB left", fix=fix)
