"""Finds a rank whose process has ended or hangs, whatever the main threads of the others wait for.

With NCCL, or if a rank hangs, the others would wait until torch's timeout, half an hour by default.

A thread of each rank counts in a store that rank 0 holds. Rank 0 watches the counts of all others, and they
watch that of rank 0. A process that counts is not lost, however long its step takes.
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

# A rank is lost if its count stays the same for so long. A thread cannot count while a library holds the
# interpreter's lock.
LIMIT_SECONDS = 300.0
_BEATS = 60  # in this time; a slow beat does not matter
# While ranks join, those that have joined only wait for the others, and nothing holds that lock.
_JOINING_SECONDS = 10.0
_NOTICE_SECONDS = 30.0
_RANK_ZERO_SECONDS = 3.0
logger = logging.getLogger(__name__)

states: list[Callable[[], str]] = [lambda: "the command has not finished"]
"""What describes it, and functions that describe a run, one for each `lost_ranks_reported` it is in."""


class Heartbeat:
    def __init__(self, rank: int, num_ranks: int, limit_seconds: float) -> None:
        self.all_joined = False
        self.stopped = threading.Event()
        self._rank = rank
        self._limit = limit_seconds
        self._counts: dict[int, int] = {}  # of the ranks that have joined
        # Seconds of looks since the count of a rank changed, not of the clock: the machine may have slept.
        self._missed = dict.fromkeys(range(1, num_ranks) if rank == 0 else [0], 0.0)
        self._store_is_gone = False

    def start(self) -> None:
        for work in (self._count, self._watch):
            threading.Thread(target=work, daemon=True, name=f"heartbeat{work.__name__}").start()

    @property
    def _interval(self) -> float:
        return self._limit / _BEATS if self.all_joined else min(1.0, self._limit / _BEATS)

    def _count(self) -> None:
        try:
            # The connection is not shared: the process group's may wait for hours for a rank that is late.
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            timeout = timedelta(seconds=2 * self._limit)
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            while not self.stopped.is_set():
                store.add(f"heartbeat {self._rank}", 1)
                for rank in self._missed:
                    count = store.add(f"heartbeat {rank}", 0)
                    if count != self._counts.get(rank, 0):
                        self._counts[rank], self._missed[rank] = count, 0.0
                self.stopped.wait(self._interval)
        except RuntimeError:  # a closed connection, so rank 0 has ended
            self._store_is_gone = True

    def _watch(self) -> None:
        # This is a thread of its own, because the other one waits forever if rank 0 hangs.
        waited = 0.0
        while not self.stopped.wait(self._interval):
            if self._store_is_gone:
                time.sleep(
                    _RANK_ZERO_SECONDS
                )  # for the launcher, which ends this rank if rank 0 has failed
                self._report("rank 0 has ended")
            limit = self._limit if self.all_joined else _JOINING_SECONDS
            for rank in self._missed:
                self._missed[rank] += self._interval
                if self._missed[rank] >= (limit if rank in self._counts else self._limit):
                    self._report(
                        f"rank {rank} has shown no sign of life for {self._missed[rank]:.0f} s"
                    )
            waited += self._interval
            absent = ", ".join(str(rank) for rank in self._missed if rank not in self._counts)
            if absent and self._rank < 2 and waited % _NOTICE_SECONDS < self._interval:
                where = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
                logger.error(
                    "waiting for rank %s to join at %s, for %.0f s", cut(absent, 60), where, waited
                )

    def _report(self, what: str) -> None:
        if not self.stopped.is_set():
            end_with(lost_rank_error(what))


def lost_rank_error(what: str) -> LostRankError:
    text = f"another rank has ended, or has not answered in time: {what}; {states[-1]()}"
    return LostRankError(
        f"{text}; fix: read the error of that rank, then run the same command again"
    )
