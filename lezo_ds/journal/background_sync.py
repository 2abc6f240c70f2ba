"""Syncs a file in a thread, so that its writer need not wait for the disk."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundSync:
    """Syncs of one file, one at a time. The thread starts with the first sync, and a process that ends waits.

    Args:
        descriptor: of the file, which its writer closes after `close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal-sync")
        self._running: Future[None] | None = None

    def start(self) -> None:
        """Start to sync what has been written. The sync before must have been waited for."""
        assert self._running is None, "at most one sync runs at a time"
        self._running = self._thread.submit(os.fsync, self._descriptor)

    def wait(self) -> None:
        """Wait for the end of the sync, if one was started.

        Raises:
            OSError: it failed. What was written may be lost.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Let the thread end after the sync that runs."""
        self._thread.shutdown()
