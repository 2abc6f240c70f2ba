"""The data of a run: its splits (dataset.py), and the batches of its steps.

A step draws rows by the run's seed and lays them out as micro-batches, each of which one forward
pass runs:

    drawn           batch_size rows of the stream of permutations (batches.batch_indices)
    in order        sorted by length, to have little padding; or dealt, if rows are shared
    micro-batches   [ row row row | row row row | ... ]    micro_batch_size rows each

All of this is a pure function of the configuration and the step, so a run resumes at any step, on
any number of ranks, with the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lezo_ds.config import RunConfig
from lezo_ds.data.batches import batch_indices
from lezo_ds.data.dataset import Examples
from lezo_ds.data.objectives import Objective, training_objective, try_loss
from lezo_ds.data.packing import FEWEST_DEALT, can_pack, deal, pack
from lezo_ds.data.reader import EncodedSplit, Reader
from lezo_ds.data.tasks import Task
from lezo_ds.forward.batch import MicroBatch, StepBatch
from lezo_ds.zo.keys import sample_key


@dataclass(frozen=True)
class TaskData:
    """The encoded splits of a run, and the batches of its steps.

    Attributes:
        reader: how the model reads them.
        train: the examples to train on.
        dev: the examples to select the best step by.
        test: the examples for the final score.
        packed: whether sequences share rows in training (packing.py).
        num_start: number of tokens with which all of them begin, which a row then has once.
    """

    reader: Reader
    train: EncodedSplit
    dev: EncodedSplit
    test: EncodedSplit
    packed: bool
    num_start: int = 0

    @property
    def task(self) -> Task:
        """The task."""
        return self.reader.task

    @property
    def objective(self) -> Objective:
        """The loss to minimize."""
        return self.reader.objective

    def loss(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example: a LossFunction; see `Reader.loss`."""
        return self.reader.loss(outputs, batch)

    def step_batch(self, config: RunConfig, step: int) -> StepBatch:
        """Return the micro-batches of a step, each of which is laid out when it is read.

        They are a function of the seed and the step. `prefetch.StepBatches` lays them out ahead.
        """
        size = config.train.micro_batch_size
        rows = self._in_order(config, self.step_rows(config, step))
        keys = self._sample_keys(config, step, rows)

        def build(index: int) -> MicroBatch:
            part = slice(index * size, (index + 1) * size)
            of_micro_batch: list[int] = rows[part].tolist()
            if not self.objective.reads_answers:
                return self.training_batch(of_micro_batch)
            return self._answer_batch(config, of_micro_batch, None if keys is None else keys[part])

        return StepBatch(
            self._weights(config, rows),
            build,
            rows.tobytes(),
            num_examples=len(rows),
            may_lack_losses=self.objective.is_reward,
        )

    def step_rows(self, config: RunConfig, step: int) -> list[int]:
        """Return the rows of `train` of a step's examples, in the order of the stream."""
        return batch_indices(config.seed, step, len(self.train), config.train.batch_size)

    def num_tokens(self, config: RunConfig, step: int) -> int:
        """Return the number of tokens that a forward pass runs for all examples of a step."""
        return int(self._lengths[self.step_rows(config, step)].sum())

    def training_batch(self, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of some training examples, which share rows if the model allows it."""
        batch = self.reader.objective_batch(self.train, rows)
        return pack(batch, self.num_start) if self.packed else batch

    def _in_order(self, config: RunConfig, drawn: Sequence[int]) -> np.ndarray:
        """Return the examples of a step, one micro-batch after the other."""
        size = config.train.micro_batch_size
        # A micro-batch is padded to its longest example, so sorting by length reduces padding.
        by_number = np.sort(drawn)
        rows = by_number[np.argsort(self._lengths[by_number], kind="stable")]
        if self.packed and FEWEST_DEALT <= size < len(rows):
            rows = deal(rows, len(rows) // size)
        group_size = config.zo.examples_per_direction
        if self.objective.reads_answers and group_size is not None and 1 < group_size < size:
            # Each group reads its prompts next to each other (prompt_reading.py).
            parts = rows.reshape(-1, size)
            rows = np.concatenate([deal(part, size // group_size) for part in parts])
        return rows

    @cached_property
    def _lengths(self) -> np.ndarray:
        """The number of tokens that a forward pass runs for each training example."""
        return self.train.column("prompt_length" if self.objective.reads_answers else "length")

    def _weights(self, config: RunConfig, rows: np.ndarray) -> list[float]:
        """Return the number of terms in the loss of each micro-batch."""
        num_terms = np.ones(len(rows), dtype=np.int64)
        if self.objective.counts_tokens:
            num_terms = self.train.num_gold[rows]
        firsts = np.arange(0, len(rows), config.train.micro_batch_size)
        weights = np.add.reduceat(num_terms, firsts)
        if self.objective.reads_answers:
            weights *= config.generation.num_samples
        sums: list[float] = weights.tolist()
        return sums

    def _answer_batch(
        self, config: RunConfig, rows: Sequence[int], keys: Tensor | None
    ) -> MicroBatch:
        """Return the batch of prompts to train on; the samples of a prompt are neighboring rows.

        Args:
            config: of the run.
            rows: indices in `train` of the prompts.
            keys: of the random numbers of each sample, [prompts, samples]; None if answers are not
                drawn.
        """
        samples = range(config.generation.num_samples)
        repeated = [row for row in rows for _ in samples]
        batch = self.reader.objective_batch(self.train, repeated)
        assert batch.prompts is not None
        common = batch.prompts.common_ids
        if common is not None:
            # Each group of examples reads what all prompts begin with in its own direction.
            group_size = config.zo.examples_per_direction or len(rows)
            num_groups = max(1, len(rows) // group_size)
            is_shared = num_groups < len(repeated)  # else it is read at once
            common = common.expand(num_groups, -1) if is_shared else None
        sample_keys = None if keys is None else keys.flatten()
        prompts = replace(batch.prompts, sample_keys=sample_keys, common_ids=common)
        return replace(batch, prompts=prompts)

    def _sample_keys(self, config: RunConfig, step: int, rows: np.ndarray) -> Tensor | None:
        """Return the keys of the random numbers of each sample, [prompts, samples].

        It is None if answers are not drawn. A batch that is larger than the data, or that crosses
        the end of an epoch, repeats examples. Each time, the samples have other numbers.
        """
        if not self.objective.reads_answers or config.generation.temperature == 0:
            return None
        examples = pd.Series(self.train.index[rows])
        times = examples.groupby(examples).cumcount()  # how often each was there before
        num_samples = config.generation.num_samples
        keys = [
            sample_key(config.seed, step, example, time * num_samples + number)
            for example, time in zip(examples.tolist(), times.tolist(), strict=True)
            for number in range(num_samples)
        ]
        return torch.tensor(keys).reshape(-1, num_samples)


def load_task_data(config: RunConfig) -> TaskData:
    """Load and encode the splits of a run's task. A collective.

    Raises:
        UserError: data cannot be read or do not fit the task, an example does not fit the model, or
            the user's objective fails on one.
    """
    examples = Examples(config)
    reader = examples.reader
    objective = reader.objective
    train = examples.split("train")
    dev = examples.split("dev")
    test = examples.split("test")
    # Generation pads on the left, and the mask of packed rows has no columns for keys of a prefix.
    takes_packed = not objective.reads_answers and config.peft.kind != "prefix"
    packed = takes_packed and can_pack(reader.model_config, config.data.max_length)
    if objective != training_objective(reader.task) and not objective.reads_answers:
        batch = reader.objective_batch(train, [0])
        try_loss(objective, batch, reader.model_config.get_text_config().vocab_size)
    # What examples share is read in the direction that they share.
    examples_a_direction = config.zo.examples_per_direction or config.train.batch_size
    reads_once = examples_a_direction >= config.train.micro_batch_size
    num_start = train.num_start if packed and reads_once else 0
    return TaskData(reader, train, dev, test, packed, num_start)
