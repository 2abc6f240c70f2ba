"""The disk space that a run takes, for its plan."""

from __future__ import annotations

from lezo_ds.checkpoints.checkpoint import DTYPES
from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, eval_every

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
    checkpoints = []
    if config.method == "adamw":
        num_kept += 1  # that of the best step
        checkpoints = [_ADAMW_BYTES * num_trained] * 2
    return [size] * min(num_kept + 1, num_due) + checkpoints
