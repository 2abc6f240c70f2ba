"""Weights & Biases. WANDB_PROJECT, WANDB_MODE=offline and its other environment variables work as always."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from lezo_ds.trackers.base import PROJECT, RunFacts, Tracker


class Wandb(Tracker):
    """A run at Weights & Biases. A resumption continues it."""

    library: ClassVar[str | None] = "wandb"

    @classmethod
    def check(cls) -> None:
        """Refuse a service that nobody has logged in to."""
        if os.environ.get("WANDB_MODE", "online") == "online":
            import wandb

            if not wandb.login(prompt=False):
                raise RuntimeError("no API key; wandb login asks for it, and WANDB_MODE=offline needs none")

    def __init__(self, run: RunFacts) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.run_id("wandb"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )
        # Its own step only grows. Ours goes back when the run resumes, and to the best step at the end.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()
