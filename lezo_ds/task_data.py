"""What a run reads: a task's splits as text and as tokens, and the micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lezo_ds.batch import MicroBatch
from lezo_ds.checkpoint_files import load_config, resolve_model
from lezo_ds.config import RunConfig
from lezo_ds.data import load_records, sample_splits
from lezo_ds.encoding import EncodedExample, PromptTokenizer, encode_examples, load_tokenizer
from lezo_ds.errors import UserError
from lezo_ds.objectives import training_objective
from lezo_ds.sampling import batch_indices
from lezo_ds.tasks import get_task
from lezo_ds.tasks.base import Example, Task


@dataclass(frozen=True)
class EncodedSplit:
    """Examples of one split and their tokens, in the same order."""

    examples: tuple[Example, ...]
    encoded: tuple[EncodedExample, ...]


@dataclass(frozen=True)
class TaskData:
    """All that a run reads: a task's splits as tokens."""

    task: Task
    tokenizer: PromptTokenizer
    train: EncodedSplit
    dev: EncodedSplit
    test: EncodedSplit

    def batch(self, config: RunConfig, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step: a pure function of (seed, step)."""
        rows = batch_indices(config.seed, step, len(self.train.encoded), config.train.batch_size)
        size = config.train.micro_batch_size
        build = training_objective(self.task.kind).build_batch
        return [
            build([self.train.encoded[row] for row in rows[begin : begin + size]], self.tokenizer.pad_id)
            for begin in range(0, len(rows), size)
        ]


def load_task_data(config: RunConfig) -> TaskData:
    """Load, sample and tokenise a run's task.

    Raises:
        UserError: data or tokenizer are missing or do not fit the task.
    """
    task = get_task(config.data.task)
    path = None if config.data.path is None else Path(config.data.path)
    train, validation = load_records(task, path)
    data = config.data
    sizes = (data.num_train, data.num_dev, data.num_test)
    splits = sample_splits(task, train, validation, data.protocol, data.seed, *sizes)
    directory = resolve_model(config.model.path)
    tokenizer = load_tokenizer(str(directory))

    def encode(examples: tuple[Example, ...]) -> EncodedSplit:
        return EncodedSplit(examples, tuple(encode_examples(tokenizer, examples, data.max_length)))

    task_data = TaskData(task, tokenizer, encode(splits.train), encode(splits.dev), encode(splits.test))
    _check_positions(task_data, directory)
    return task_data


def _check_positions(data: TaskData, directory: Path) -> None:
    num_positions = getattr(load_config(directory).get_text_config(), "max_position_embeddings", None)
    encoded = [example for split in (data.train, data.dev, data.test) for example in split.encoded]
    longest = max(len(sequence) for example in encoded for sequence in example.sequences)
    if num_positions is not None and longest > num_positions:
        raise UserError(
            "an input is longer than the model's positions",
            got=f"{longest} tokens",
            expected=f"at most {num_positions}",
            fix=f"set data.max_length={num_positions}",
        )
