"""What all variants of a benchmark share: a model, and the examples of each step in two layouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from lezo_ds.config import ZoConfig
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch
from lezo_ds.tools.benchmark.settings import Variant

T = TypeVar("T")


class Inputs(ABC):
    """A model, and the batch of each step. All variants get the same examples at the same step.

    Attributes:
        columns: the columns of the table that say what is measured.
        seed: of the noise and of the dropped blocks.
        loss: the loss on which the task is trained.
    """

    columns: Mapping[str, Any]
    seed: int
    loss: LossFunction

    @property
    @abstractmethod
    def zo(self) -> ZoConfig:
        """Settings of a step, apart from those that a variant changes."""

    @abstractmethod
    def batches(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of our trainer at a step from 0, the same on all ranks."""

    @abstractmethod
    def published_batches(self, step: int) -> list[MicroBatch]:
        """Return the share of each rank in the layout of MeZO's code, the same on all ranks.

        Each candidate is a sequence of its own. Sequences are padded to the longest of the share, to a
        multiple of 8.
        """

    @abstractmethod
    def plain_model(self) -> nn.Module:
        """Return a new unsharded model, the same on all ranks, to run only."""

    @abstractmethod
    def start_engine(self) -> LezoEngine:
        """Return our engine on the sharded model. A collective."""

    def zo_config(self, variant: Variant) -> ZoConfig:
        """Return the settings of a variant's step: for "recipe" as they are, otherwise the papers' step."""
        rate = self.zo.learning_rate if variant.learning_rate is None else variant.learning_rate
        if variant.kind == "recipe":
            return replace(self.zo, learning_rate=rate)
        return ZoConfig(
            learning_rate=rate,
            perturbation_scale=self.zo.perturbation_scale,
            update_precision=self.zo.update_precision,
            sparsity=variant.sparsity,
            probes_per_pass=variant.probes_per_pass,
            directions=variant.directions,
        )


def equal_parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Return `count` parts of the examples of a batch, in order.

    Raises:
        UserError: `count` does not divide the batch.
    """
    if len(items) % count:
        raise UserError(
            "the batch does not split into equal parts",
            got=f"{len(items)} examples, {count} parts",
            expected="a multiple of the number of parts",
            fix="change --batch, --micro-batches, train.batch_size or the number of ranks",
        )
    size = len(items) // count
    return [items[start : start + size] for start in range(0, len(items), size)]
