"""Trackio, which keeps its records on this machine: trackio show opens them. TRACKIO_DIR says where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lezo_ds.trackers.base import PROJECT, RunFacts, Tracker


class Trackio(Tracker):
    """A run in Trackio's project lezo_ds. A resumption continues it."""

    library: ClassVar[str | None] = "trackio"

    def __init__(self, run: RunFacts) -> None:
        import trackio

        self._trackio = trackio
        # Trackio finds the run again by its name, and run directories in different places may have the same.
        name = f"{run.name}-{run.run_id('trackio')}"
        trackio.init(project=PROJECT, name=name, config=dict(run.config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the values."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until everything is stored."""
        self._trackio.finish()
