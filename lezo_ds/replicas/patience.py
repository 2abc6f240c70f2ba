"""How long a member of a round waits for the others, and when it gives up on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")

_LEAST_SECONDS = 10.0
_ROUNDS = 4  # a round may take so many times as long as the longest one lately
_SHRINKAGE = 0.9  # of the longest round, with each round
_MOST_FAILURES = 3


class Patience:
    """Tells a slow member from one that hangs by the rounds so far.

    Attributes:
        num_rounds: number of rounds that this replica has finished.
        longest: seconds of its longest recent round. Before its first round, `limit`.
        seconds: the most that the present round may take.
    """

    def __init__(self, limit: float) -> None:
        """`limit` is the most seconds of any round (train.timeout_seconds)."""
        self.num_rounds = 0
        self.longest = limit
        self.seconds = limit
        self._limit = limit
        self._began = 0.0
        self._num_failures = 0

    def start_round(self, longest_known: float) -> None:
        """Start the clock of a round. `longest_known` is the least `longest` of all members.

        The least, because a new member does not know how long rounds take.
        """
        # After a failure, the others may only have been slower than ever.
        expected = max(_LEAST_SECONDS, _ROUNDS * longest_known) * 2**self._num_failures
        self.seconds = min(self._limit, expected)
        self._began = time.monotonic()

    def finish_round(self) -> None:
        """Note that the members have done the round."""
        duration = time.monotonic() - self._began
        if self.num_rounds > 0:
            duration = max(duration, _SHRINKAGE * self.longest)
        self.longest = duration
        self.num_rounds += 1
        self._num_failures = 0

    def lose_round(self) -> bool:
        """Note that the round is lost. Return whether that has happened too often in a row."""
        self._num_failures += 1
        return self._num_failures >= _MOST_FAILURES


def in_background(action: Callable[[], _T]) -> Future[_T]:
    """Return the future result of an action, which runs in a thread of its own.

    `result(seconds)` is then an absolute limit. One on each read would not end a peer that sends a
    byte a second. An executor would not do: the process could not end before its threads do.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
