"""The data of a run, from records to the batch of a step.

    record (tables) -> example (splits) -> encoded (reader) -> batch (batches, generation)

Records are read, checked and encoded once, before weights are loaded. A step then draws examples by
the run's seed and lays them out as micro-batches, each of which one forward pass runs:

    drawn           batch_size rows of the stream of permutations (batches.batch_indices)
    in order        sorted by length, to have little padding; or dealt, if rows are shared
    micro-batches   [ row row row | row row row | ... ]    micro_batch_size rows each

All of this is a pure function of the configuration and the step, so a run resumes at any step, on
any number of ranks, with the same batches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lezo_ds.config import ReadingConfig, RunConfig, find_task
from lezo_ds.data.batches import batch_indices, num_earlier
from lezo_ds.data.encoding import PromptTokenizer
from lezo_ds.data.metrics import try_metric
from lezo_ds.data.objectives import Objective, load_objective, training_objective, try_loss
from lezo_ds.data.packing import FEWEST_DEALT, can_pack, deal, pack
from lezo_ds.data.reader import EncodedSplit, Reader, load_reader
from lezo_ds.data.splits import Splits, load_splits, refused_together, with_demonstrations
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings, MicroBatch, StepBatch
from lezo_ds.tasks import Task
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.zo.keys import sample_key

logger = logging.getLogger(__name__)


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
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer."""
        return self.reader.tokenizer

    @property
    def generation(self) -> GenerationSettings | None:
        """How answers are written; None if neither the task nor the objective needs them."""
        return self.reader.generation

    @property
    def objective(self) -> Objective:
        """The loss to minimize."""
        return self.reader.objective

    def answers(self, tokens: Tensor) -> list[str]:
        """Return the answers in new tokens; see `Reader.answers`."""
        return self.reader.answers(tokens)

    def loss(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example: a LossFunction; see `Reader.loss`."""
        return self.reader.loss(outputs, batch)

    def step_batch(self, config: RunConfig, step: int) -> StepBatch:
        """Return the micro-batches of a step, each of which is laid out when it is read.

        They are a function of the seed and the step. `prefetch.StepBatches` lays them out ahead.
        """
        size = config.train.micro_batch_size
        rows = self._in_order(config, self.step_rows(config, step))
        # A batch that is larger than the data, or that crosses the end of an epoch, repeats
        # examples. A conversation may be several, one for each turn.
        repetitions = num_earlier([self.train.examples[row].index for row in rows])

        def build(index: int) -> MicroBatch:
            part = slice(index * size, (index + 1) * size)
            of_micro_batch: list[int] = rows[part].tolist()
            if not self.objective.reads_answers:
                return self.training_batch(of_micro_batch)
            keys = self._sample_keys(config, step, of_micro_batch, repetitions[part])
            return self._answer_batch(config, of_micro_batch, keys)

        weights = self._weights(config, rows)
        return StepBatch(weights, build, rows.tobytes(), num_examples=len(rows))

    def step_rows(self, config: RunConfig, step: int) -> list[int]:
        """Return the indices in `train` of a step's examples, in the order of the stream."""
        num_examples = len(self.train.examples)
        return batch_indices(config.seed, step, num_examples, config.train.batch_size)

    def num_tokens(self, config: RunConfig, step: int) -> int:
        """Return the number of tokens that a forward pass runs for all examples of a step."""
        return sum(self._length(row) for row in self.step_rows(config, step))

    def training_batch(self, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of some training examples, which share rows if the model allows it."""
        batch = self.reader.objective_batch(self.train, rows)
        return pack(batch, self.num_start) if self.packed else batch

    def _in_order(self, config: RunConfig, drawn: Sequence[int]) -> np.ndarray:
        """Return the examples of a step, one micro-batch after the other."""
        size = config.train.micro_batch_size
        # A micro-batch is padded to its longest example, so sorting by length reduces padding.
        rows = np.array(sorted(drawn, key=lambda row: (self._length(row), row)))
        if self.packed and FEWEST_DEALT <= size < len(rows):
            rows = deal(rows, len(rows) // size)
        group_size = config.zo.examples_per_direction
        if self.objective.reads_answers and group_size is not None and 1 < group_size < size:
            # Each group reads its prompts next to each other (prompt_reading.py).
            parts = rows.reshape(-1, size)
            rows = np.concatenate([deal(part, size // group_size) for part in parts])
        return rows

    def _length(self, row: int) -> int:
        """Return the number of tokens that a forward pass runs for a training example."""
        if self.objective.reads_answers:
            return len(self.train.prompts[row])
        return self.train.encoded[row].num_tokens

    def _weights(self, config: RunConfig, rows: np.ndarray) -> list[float]:
        """Return the number of terms in the loss of each micro-batch."""
        num_terms = [self.objective.num_terms(self.train.encoded[row]) for row in rows]
        weights = np.add.reduceat(num_terms, np.arange(0, len(rows), config.train.micro_batch_size))
        if self.objective.reads_answers:
            weights *= config.generation.num_samples
        sums: list[float] = weights.tolist()
        return sums

    def _answer_batch(
        self, config: RunConfig, rows: Sequence[int], keys: Sequence[int]
    ) -> MicroBatch:
        """Return the batch of prompts to train on; the samples of a prompt are neighboring rows.

        Args:
            config: of the run.
            rows: indices in `train` of the prompts.
            keys: of the random numbers of each sample; none if answers are not drawn.
        """
        samples = range(config.generation.num_samples)
        batch = self.reader.objective_batch(self.train, [row for row in rows for _ in samples])
        assert batch.prompts is not None
        common = batch.prompts.common_ids
        if common is not None:
            # Each group of examples reads what all prompts begin with in its own direction.
            num_groups = max(1, len(rows) // (config.zo.examples_per_direction or len(rows)))
            is_shared = num_groups < len(batch.inputs["input_ids"])  # else it is read at once
            common = common.expand(num_groups, -1) if is_shared else None
        prompts = replace(
            batch.prompts,
            sample_keys=torch.tensor(keys) if keys else None,
            common_ids=common,
        )
        return replace(batch, prompts=prompts)

    def _sample_keys(
        self, config: RunConfig, step: int, rows: Sequence[int], repetitions: Sequence[int]
    ) -> list[int]:
        """Return the key of the random numbers of each sample, if answers are drawn.

        Args:
            config: of the run.
            step: index of the step.
            rows: indices in `train` of the prompts.
            repetitions: how often the step had each of these prompts before.
        """
        if config.generation.temperature == 0:
            return []
        num_samples = config.generation.num_samples
        keys = []
        for row, repetition in zip(rows, repetitions, strict=True):
            example = self.train.examples[row].index
            first = repetition * num_samples
            for number in range(first, first + num_samples):
                keys.append(sample_key(config.seed, step, example, number))
        return keys


def load_examples(reading: ReadingConfig) -> tuple[Reader, Splits]:
    """Load the splits of a task, and return how a model reads them, and their examples.

    Raises:
        UserError: data cannot be read or do not fit the task, or the user's reward or metric fails
            on a few examples.
    """
    task = find_task(reading.data)
    objective = load_objective(reading.objective, task)
    _check_objective(reading, task, objective)
    splits = load_splits(task, reading.data)
    if objective.rewards is not None:
        objective.rewards.try_out(splits.train)
    try_metric(task, splits.test)
    if reading.method == "icl":
        splits = with_demonstrations(reading.data, splits)
    reader = load_reader(task, reading.model, reading.data, reading.generation, objective)
    return reader, splits


def load_task_data(config: RunConfig) -> TaskData:
    """Load and encode the splits of a run's task.

    Raises:
        UserError: as by `load_examples`, or an example does not fit the model, or the user's
            objective fails on one.
    """
    reader, splits = load_examples(config.reading)
    objective = reader.objective
    train, dev, test = refused_together(
        (
            partial(reader.encode, splits.train, is_training=True),
            partial(reader.encode, splits.dev),
            partial(reader.encode, splits.test),
        )
    )
    # Generation pads on the left, and the mask of packed rows has no columns for keys of a prefix.
    takes_packed = not objective.reads_answers and config.peft.kind != "prefix"
    packed = takes_packed and can_pack(reader.model_config, config.data.max_length)
    warn_of_unreachable(reader, test)
    if objective != training_objective(reader.task) and not objective.reads_answers:
        batch = reader.objective_batch(train, [0])
        try_loss(objective, batch, reader.model_config.get_text_config().vocab_size)
    # What examples share is read in the direction that they share.
    examples_a_direction = config.zo.examples_per_direction or config.train.batch_size
    reads_once = examples_a_direction >= config.train.micro_batch_size
    num_start = train.num_start if packed and reads_once else 0
    return TaskData(reader, train, dev, test, packed, num_start)


def warn_of_unreachable(reader: Reader, split: EncodedSplit) -> None:
    """Say how many right answers the model cannot write, because its answers end before."""
    settings = reader.generation
    if settings is None or not reader.task.writes_answers:
        return
    num_stopped = 0
    num_long = 0
    num_calls = sum(example.references == ("",) for example in split.examples)
    for example, encoded in zip(split.examples, split.encoded, strict=True):
        if not example.references:
            continue
        cut = [any(stop in text for stop in settings.stops) for text in example.references]
        if all(cut):
            num_stopped += 1
        elif encoded.num_gold_tokens() - 1 > settings.max_new_tokens:  # the last one ends it
            num_long += 1
    stops = ", ".join(map(repr, settings.stops))
    problems = {
        "are calls of tools without a text: no answer can equal them; with data.messages, the "
        "tokens of calls are scored": num_calls,
        f"have several lines or other texts that end an answer ({stops}): no answer can equal "
        "them; to end answers at the end of the sequence, set generation.stop=[]": num_stopped,
        f"have more than generation.max_new_tokens={settings.max_new_tokens} tokens: no answer can "
        "equal them; set it higher": num_long,
    }
    total = len(split.examples)
    for problem, number in problems.items():
        if number:
            logger.warning("%d of %d right answers to score %s", number, total, problem)


def _check_objective(reading: ReadingConfig, task: Task, objective: Objective) -> None:
    """Refuse an objective that does not fit the method or the task."""
    name = f"train.objective={reading.objective}"
    if reading.method == "adamw" and objective.reads_answers:
        raise UserError(
            f"method adamw cannot use {name}, which has no gradient", fix="set method=lezo"
        )
    if (task.metric == REWARD or not task.has_answers) and not objective.is_reward:
        needs = "data.metric=reward" if task.has_answers else "a task without right answers"
        raise UserError(
            f"{needs} needs a reward, not {name}",
            fix="set train.objective=package.module:function, a function with the decorator "
            "`reward`",
        )
    if reading.method == "icl" and not task.has_answers:
        raise UserError(
            "method icl shows solved examples, and the task has none", fix="set method=zero_shot"
        )
