"""results.json: the outcome of a run in one small file.

Rank 0 writes the file when a process of the run ends in order, finished or asked to stop, and
replaces that of the process before. `lezo-ds train` prints the same values, and `lezo-ds evaluate
--out` writes such a file of a model. A resumed run reads its own file, and `export` and `report`
read those of others, which may be damaged or come from anyone.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import TypeAdapter

from lezo_ds import distributed
from lezo_ds.config import RunConfig
from lezo_ds.data.metrics import LabelScore
from lezo_ds.files import DAMAGE, read_regular


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """The outcome of a run, with the names and the order of the keys of results.json.

    A score is a value of the task's metric: 0 to 1, or any number if the metric is a reward.

    Attributes:
        task: name of the task.
        method: how the weights were made or read, such as "LeZO" (`method_name`) or "zero-shot".
        peft: kind of the adapter, "none" if all weights were trained.
        metric: name of the task's metric.
        protocol: the configuration's `data.protocol`, which says how examples were chosen.
        finished: whether the run did all that it was asked for; false if it was asked to stop.
        zero_shot: score of the base model on the test split; None with solved examples in prompts.
        test: score on the test split, at `best_step`; None until the run is finished.
        majority_class: score of always giving the most frequent label; None if there are no
            classes.
        macro_f1: mean F1 of the labels where `test` was measured; None if the task is no
            classification.
        by_label: the scores of each label there; None if another launch has done this test.
        best_step: step with the lowest validation loss, 0 for the base model; None if nothing was
            trained, or the run is not finished.
        best_dev_loss: validation loss at `best_step`; None if it was not finite.
        trained_dev_loss: lowest validation loss after step 0.
        worse_than_base: whether no step had a lower validation loss than the base model.
        steps: number of steps, including skipped ones.
        early_stop_step: step at which train.patience ended the run; None if it did not.
        seed: the configuration's `seed`.
        seconds: wall-clock time of all processes of the run, without what a kill threw away.
        peak_memory_bytes: most memory that a rank used: of its GPU, or else of the host.
        skipped_steps: number of steps that changed nothing because a loss was not finite.
        flat_steps: number of steps that changed nothing because all losses, or rewards, were equal.
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
    macro_f1: float | None = None
    by_label: Mapping[str, LabelScore] | None = None
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
    flat_steps: int = 0
    model_fingerprint: str
    weights_digest: str
    world_size: int

    @property
    def step_of_weights(self) -> int:
        """Number of steps of the weights in memory when the process ended."""
        if self.finished:
            return self.best_step or 0
        return self.steps

    def __post_init__(self) -> None:
        if self.finished and (self.test is None or not math.isfinite(self.test)):
            raise ValueError("a finished run has a finite score")

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the content of a results.json, or None if it is missing or damaged.

        The types of all values are checked. Other keys, as of a younger version, are ignored.
        """
        try:
            return TypeAdapter(cls).validate_json(read_regular(path), strict=True)
        except DAMAGE:  # pydantic's error is a ValueError
            return None


_ESTIMATORS = {
    "one-sided": "one-sided differences",
    "fzoo": "FZOO",
    "grzo": "GRZO",
    "evolution-strategies": "evolution strategies",
}
"""Methods that an estimator has given a name. Two-sided differences are LeZO, or MeZO."""


def method_name(config: RunConfig) -> str:
    """Return the name of a method of training, from the keys of its recipe.

    Such as "LeZO", "FZOO with LoRA", or "evolution strategies on rank-1 directions of 50% of the
    blocks".
    """
    zo = config.zo
    dropped = zo.sparsity or 0.0
    name = "LeZO" if dropped else "MeZO"
    if zo.estimator != "spsa":
        name = _ESTIMATORS.get(zo.estimator, zo.estimator)
    if zo.noise_rank:
        name += f" on rank-{zo.noise_rank} directions"
    if dropped and name != "LeZO":
        place = "the last " if zo.layer_policy == "fixed" else ""
        name += f" of {place}{1 - dropped:.0%} of the blocks"
    if config.peft.kind != "none":
        name += f" with {'LoRA' if config.peft.kind == 'lora' else 'a prefix'}"
    return name


def peak_memory_bytes(earlier: RunResults | None = None) -> int:
    """Return the most memory that a rank has used in any process of a run. A collective."""
    device = distributed.device()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
    # A process that only resumes a finished run uses less than the one that trained it.
    if earlier is not None:
        peak = max(peak, earlier.peak_memory_bytes)
    peaks: list[int] = distributed.gather_objects(peak)
    return max(peaks)
