"""Finds a rank whose process has ended or hangs, whatever the main threads of the others wait for.

With NCCL, or if a rank hangs, the others would wait until torch's timeout, half an hour by default.

Each rank has two threads. One counts in a store that rank 0 holds, and reads the counts of others.
The other one watches them: rank 0 those of all others, and they that of rank 0.

    rank 0   counts, watches 1, 2, 3      <-- "heartbeat 1", "heartbeat 2", "heartbeat 3"
    rank 1   counts, watches 0            <-- "heartbeat 0"
    ...

A process that counts is not lost, however long its step takes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lezo_ds.errors import LostRankError, cut, end_with

# A rank is lost if its count stays the same for so long. A thread cannot count while a library
# holds the interpreter's lock.
LIMIT_SECONDS = 300.0
_BEATS = 60  # in this time; a slow beat does not matter
# While ranks join, those that have joined only wait for the others, and nothing holds that lock.
_JOINING_SECONDS = 10.0
_NOTICE_SECONDS = 30.0
_RANK_ZERO_SECONDS = 3.0
logger = logging.getLogger(__name__)

states: list[Callable[[], str]] = [lambda: "the command has not finished"]
"""What describes the process in the error of a lost rank: the last function of this list.

Each `lost_ranks_reported` that the process is in has added one, which describes a run.
"""


class Heartbeat:
    """The two threads of a rank.

    Attributes:
        all_joined: whether all ranks have joined. The main thread sets it.
        stopped: the main thread sets it when no rank is watched anymore.
    """

    def __init__(self, rank: int, num_ranks: int, limit_seconds: float) -> None:
        self.all_joined = False
        self.stopped = threading.Event()
        self._rank = rank
        self._limit = limit_seconds
        self._watched = [0] if rank > 0 else list(range(1, num_ranks))
        # The counting thread alone writes these two.
        self._counts = dict.fromkeys(self._watched, 0)  # of the watched ranks; 0 until one joins
        self._store_is_gone = False
        # The watching thread alone writes these two. The seconds are those of looks since the count
        # of a rank changed, not of the clock: the machine may have slept.
        self._seen = dict(self._counts)  # counts at the last look
        self._missed = dict.fromkeys(self._watched, 0.0)

    def start(self) -> None:
        """Start both threads."""
        for work in (self._count, self._watch):
            threading.Thread(target=work, daemon=True, name=f"heartbeat{work.__name__}").start()

    @property
    def _interval(self) -> float:
        interval = self._limit / _BEATS
        return interval if self.all_joined else min(1.0, interval)

    def _count(self) -> None:
        try:
            # The connection is not shared: the process group's may wait for hours for a late rank.
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=2 * self._limit),
            )
            while not self.stopped.is_set():
                store.add(f"heartbeat {self._rank}", 1)
                for rank in self._watched:
                    self._counts[rank] = store.add(f"heartbeat {rank}", 0)
                self.stopped.wait(self._interval)
        except RuntimeError:  # a closed connection, so rank 0 has ended
            self._store_is_gone = True

    def _watch(self) -> None:
        # A thread of its own, because the one that counts waits forever if rank 0 hangs.
        waited = 0.0
        while not self.stopped.wait(self._interval):
            if self._store_is_gone:
                # The launcher ends this rank meanwhile if rank 0 has failed.
                time.sleep(_RANK_ZERO_SECONDS)
                self._report("rank 0 has ended")
            self._look()
            waited += self._interval
            absent = ", ".join(str(rank) for rank, count in self._counts.items() if not count)
            is_time = waited % _NOTICE_SECONDS < self._interval
            if absent and is_time and self._rank < 2:
                logger.error(
                    "waiting for rank %s to join at %s, port %s, for %.0f s",
                    cut(absent, 60),
                    os.environ["MASTER_ADDR"],
                    os.environ["MASTER_PORT"],
                    waited,
                )

    def _look(self) -> None:
        """Add up how long each rank has not counted, and report one that is lost."""
        for rank in self._watched:
            count = self._counts[rank]
            has_only_joined = count > 0 and not self.all_joined
            limit = _JOINING_SECONDS if has_only_joined else self._limit
            if count != self._seen[rank]:
                self._seen[rank] = count
                self._missed[rank] = 0.0
            self._missed[rank] += self._interval
            if self._missed[rank] >= limit:
                self._report(
                    f"rank {rank} has shown no sign of life for {self._missed[rank]:.0f} s"
                )

    def _report(self, problem: str) -> None:
        if not self.stopped.is_set():
            end_with(lost_rank_error(problem))


def lost_rank_error(problem: str) -> LostRankError:
    """Return the error for a lost rank, with the state of this process."""
    return LostRankError(
        f"another rank has ended, or has not answered in time: {problem}; {states[-1]()}; "
        "fix: read the error of that rank, then run the same command again"
    )
