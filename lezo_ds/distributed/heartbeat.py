"""Finds a rank whose process has ended or hangs, whatever the main threads of the others wait for.

With gloo, a rank that ends breaks the messages of the others. With NCCL, and if a rank hangs, the others wait
until torch's timeout, half an hour by default, and NCCL then ends them without a message of ours.

A thread of each rank counts in a store that rank 0 holds. Rank 0 watches the counts of all others, and they
watch that of rank 0. The count says that the process runs, not what its main thread does: a long step or a
slow disk is no reason to end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lezo_ds.errors import LostRankError, end_with

# A rank is lost if its count stays the same for so long. A thread cannot count while another one holds the
# interpreter's lock, as a library might while it reads or writes a large file.
LIMIT_SECONDS = 300.0
_BEATS = 60  # in this time; a slow beat does not matter
_RANK_ZERO_SECONDS = 3.0

states: list[Callable[[], str]] = []
"""Functions that describe the run, one for each `lost_ranks_reported` that the main thread is in."""


class Heartbeat:
    def __init__(self, rank: int, num_ranks: int, limit_seconds: float) -> None:
        self._rank = rank
        self._interval = limit_seconds / _BEATS
        # Looks since the count of a rank changed. This is not a time, so that a machine that slept does not
        # take all others for lost when it wakes up.
        self._missed = dict.fromkeys(range(1, num_ranks) if rank == 0 else [0], 0)
        self._store_is_gone = False
        self._stopped = threading.Event()
        # The connection is not shared: the process group's may wait for hours for a rank that is late.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=limit_seconds)
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    def start(self) -> None:
        for work in (self._count, self._watch):
            threading.Thread(target=work, daemon=True, name=f"heartbeat{work.__name__}").start()

    def stop(self) -> None:
        self._stopped.set()

    def _count(self) -> None:
        counts: dict[int, int] = {}
        try:
            while not self._stopped.wait(self._interval):
                self._store.add(f"heartbeat {self._rank}", 1)
                for rank in self._missed:
                    count = self._store.add(f"heartbeat {rank}", 0)
                    if count != counts.get(rank):
                        counts[rank], self._missed[rank] = count, 0
        except RuntimeError:  # a closed connection, so rank 0 has ended
            self._store_is_gone = True

    def _watch(self) -> None:
        # This is a thread of its own, because the other one waits forever if rank 0 hangs.
        while not self._stopped.wait(self._interval):
            if self._store_is_gone:
                time.sleep(_RANK_ZERO_SECONDS)  # for the launcher, which ends this rank if rank 0 has failed
                self._report("rank 0 has ended")
                return
            for rank, missed in list(self._missed.items()):
                self._missed[rank] = missed + 1
                if missed >= _BEATS:
                    self._report(f"rank {rank} has shown no sign of life for {self._interval * _BEATS:.0f} s")

    def _report(self, what: str) -> None:
        for state in states[-1:]:  # a copy: the main thread may leave the context at this moment
            if not self._stopped.is_set():
                end_with(lost_rank_error(what, state()))


def lost_rank_error(what: str, state: str) -> LostRankError:
    return LostRankError(
        f"another rank has ended, or has not answered in time: {what}; {state}; "
        "fix: read the error of that rank, then run the same command again"
    )
