"""results.json: the outcome of a run in one small file.

Rank 0 writes the file when a process of the run ends in order, finished or asked to stop, and
replaces that of the process before. `lezo-ds train` prints the same values. A resumed run reads its
own file, and `export`, `sweep` and `report` read those of others, which may be damaged or come from
anyone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args, get_type_hints

from lezo_ds.files import DAMAGE, failures_named, write_atomically


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """The outcome of a run, with the names and the order of the keys of results.json.

    A score is a value of the task's metric: 0 to 1, or any number if the metric is a reward.

    Attributes:
        task: name of the task. method: the configuration's `method`, such as "lezo" or "zero_shot".
        peft: kind of the adapter, "none" if all weights were trained. metric: name of the task's
        metric. protocol: the configuration's `data.protocol`, which says how examples were chosen.
        finished: whether the run did all that it was asked for; false if it was asked to stop.
        zero_shot: score of the base model on the test split; None for in-context learning. test:
        score on the test split, at `best_step` if the run trains; None until it is finished.
        majority_class: score of always giving the most frequent label; None if there are no
        classes. best_step: step with the lowest validation loss, 0 for the base model; None if the
        run does not
            train, or is not finished.
        best_dev_loss: validation loss at `best_step`; None if it was not finite.
        trained_dev_loss: lowest validation loss after step 0. Runs of version 0.3 lack it.
        worse_than_base: whether no step had a lower validation loss than the base model.
        steps: number of steps, including skipped ones.
        early_stop_step: step at which train.patience ended the run; None if it did not.
        seed: the configuration's `seed`.
        seconds: wall-clock time of all processes of the run, without what a kill threw away.
        peak_memory_bytes: most memory that a rank used: of its GPU, or else of the host.
        skipped_steps: number of steps that changed nothing because a loss was not finite.
        model_fingerprint: digest of the base weights.
        weights_digest: digest of the weights after `step_of_weights` steps.
        world_size: number of ranks of the last process.
    """

    task: str
    method: str
    peft: str
    metric: str
    protocol: str
    finished: bool
    zero_shot: float | None
    test: float | None
    majority_class: float | None
    best_step: int | None
    best_dev_loss: float | None
    trained_dev_loss: float | None = None
    worse_than_base: bool = False
    steps: int
    early_stop_step: int | None
    seed: int
    seconds: float
    peak_memory_bytes: int
    skipped_steps: int
    model_fingerprint: str
    weights_digest: str
    world_size: int

    @property
    def step_of_weights(self) -> int:
        """Number of steps of the weights in memory when the process ended."""
        if self.finished:
            return self.best_step or 0
        return self.steps

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the content of a results.json, or None if it is missing or damaged."""
        try:
            return cls._from_json(json.loads(path.read_text(encoding="utf-8")))
        except DAMAGE:
            return None

    @classmethod
    def _from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return results from a file's content, whose types are checked. Other keys are ignored."""
        types = get_type_hints(cls)
        known = {
            field.name: _checked(values[field.name], types[field.name])
            for field in fields(cls)
            if field.name in values
        }
        results = cls(**known)
        if results.finished and results.test is None:
            raise ValueError("a finished run has no score")
        return results

    def write(self, path: Path) -> None:
        """Replace a results.json. LezoError: it cannot be written."""
        with failures_named(path):
            write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")


def _checked(value: Any, expected: Any) -> Any:
    """Return a value of JSON as the expected type, such as `float | None`, or raise TypeError."""
    accepted = get_args(expected) or (expected,)
    if float in accepted and type(value) is int:
        return float(value)
    if type(value) not in accepted:  # not isinstance: true is no number of steps
        raise TypeError(f"{value!r} is not of the type {expected}")
    return value
