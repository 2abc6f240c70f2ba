"""Counts what ranks send, by DeepSpeed's own logger."""

from __future__ import annotations

from contextlib import contextmanager

from deepspeed import comm
from deepspeed.comm.comm import comms_logger, timers


@contextmanager
def counted_bytes():
    """Count the bytes that this rank passes to each operation of deepspeed.comm inside the context.

    The dict is filled at the end. Meanwhile operations run one after the other.
    """
    counts = {}
    comm.configure(enabled=True, prof_all=True, verbose=False)
    comms_logger.reset_data()
    # Timers of earlier messages would stay. On a GPU, each message would wait for all their events.
    timers.timers.clear()
    try:
        yield counts
    finally:
        comm.configure(enabled=False)
    for operation, sizes in comms_logger.get_raw_data().items():
        counts[operation] = sum(size * entry[0] for size, entry in sizes.items())
