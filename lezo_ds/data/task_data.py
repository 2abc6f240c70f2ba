"""What a run reads: a task's splits as text and as tokens, the batches of a step, and the loss of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from lezo_ds.config import RunConfig
from lezo_ds.data.encoding import (
    EncodedExample,
    PromptTokenizer,
    encode_examples,
    encode_null,
    encode_prompts,
    load_tokenizer,
)
from lezo_ds.data.generation import MAX_NEW_TOKENS, prompt_batch, read_answers
from lezo_ds.data.objectives import Objective, load_objective
from lezo_ds.data.packing import can_pack, pack
from lezo_ds.data.records import Splits, load_records, sample_splits, with_demonstrations
from lezo_ds.data.sampling import batch_indices
from lezo_ds.errors import UserError
from lezo_ds.model.batch import GenerationSettings, MicroBatch
from lezo_ds.sharding.checkpoint_files import load_model_config, resolve_model
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Example, Task


@dataclass(frozen=True)
class EncodedSplit:
    """Examples of one split and their tokens, in the same order.

    Attributes:
        examples: as text.
        encoded: every candidate behind its prompt.
        prompts: what the model is to continue, where it is to write answers; else empty.
        null_encoded: every candidate behind its null prompt, where scores are calibrated; else empty.
    """

    examples: tuple[Example, ...]
    encoded: tuple[EncodedExample, ...]
    prompts: tuple[tuple[int, ...], ...] = ()
    null_encoded: tuple[EncodedExample, ...] = ()


@dataclass(frozen=True)
class TaskData:
    """All that a run reads: a task's splits as tokens, and what is to be done with them.

    Attributes:
        task: what they are of.
        tokenizer: the model's.
        train: what is trained on.
        dev: what picks the best step.
        test: what is scored.
        objective: what is minimised.
        generation: how answers are written, where the task or the objective wants any.
        packed: whether training examples share rows.
    """

    task: Task
    tokenizer: PromptTokenizer
    train: EncodedSplit
    dev: EncodedSplit
    test: EncodedSplit
    objective: Objective
    generation: GenerationSettings | None = None
    packed: bool = False

    def batch(self, config: RunConfig, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step: a pure function of (seed, step).

        The examples of the step are sorted by length before they are cut into micro-batches: each is padded
        to its own longest, and the ranks, which take them in turn, have the like to do at a time.
        """
        drawn = batch_indices(config.seed, step, len(self.train.encoded), config.train.batch_size)
        rows = sorted(drawn, key=lambda row: (self._num_tokens(row), row))
        size = config.train.micro_batch_size
        batches = [
            self.objective_batch(self.train, rows[begin : begin + size])
            for begin in range(0, len(rows), size)
        ]
        return [pack(batch) for batch in batches] if self.packed else batches

    def _num_tokens(self, row: int) -> int:
        if self.objective.build_batch is None:
            return len(self.train.prompts[row])
        return self.train.encoded[row].num_tokens

    def objective_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Lay out some examples of a split for the objective."""
        if self.objective.build_batch is None:
            return self.prompt_batch(split, rows)
        batch = self.objective.build_batch([split.encoded[row] for row in rows], self.tokenizer.pad_id)
        return replace(batch, examples=tuple(split.examples[row] for row in rows))

    def prompt_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Lay out the prompts of some examples of a split, for the model to continue."""
        assert self.generation is not None
        batch = prompt_batch([split.prompts[row] for row in rows], self.generation)
        return replace(batch, examples=tuple(split.examples[row] for row in rows))

    def answers(self, tokens: Tensor) -> list[str]:
        """Return the answers in the new tokens [examples, n] of a `prompt_batch`."""
        assert self.generation is not None
        return read_answers(tokens, self.generation, self.tokenizer)

    def loss(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example of an `objective_batch`: a LossFunction."""
        return self.objective.loss(self.answers(outputs) if self.objective.reads_answers else outputs, batch)


def load_task_data(config: RunConfig) -> TaskData:
    """Load, sample and tokenise a run's task.

    Raises:
        UserError: data, tokenizer or objective are missing or do not fit the task.
    """
    task = TASKS.find(config.data.task)
    objective = load_objective(config.train.objective, task)
    if config.method == "adamw" and objective.reads_answers:
        raise UserError(
            "method adamw needs a loss with a gradient",
            got=f"train.objective={config.train.objective}, of generated answers",
            expected="an objective of logits",
            fix="set train.objective=task, or method=lezo",
        )
    splits = _with_demonstrations(config, _draw_splits(config, task))
    directory = resolve_model(config.model.path)
    tokenizer = load_tokenizer(str(directory))
    generation = None
    if task.kind == "generation" or objective.reads_answers:
        generation = GenerationSettings(MAX_NEW_TOKENS, tokenizer.stop_ids(), tokenizer.pad_id)
    train = _encode(config, tokenizer, splits.train, continued=objective.reads_answers, calibrated=False)
    dev, test = (
        _encode(config, tokenizer, split, generation is not None, config.data.calibrated)
        for split in (splits.dev, splits.test)
    )
    packed = config.train.packed and config.peft.kind != "prefix"
    packed = packed and can_pack(load_model_config(directory), config.data.max_length)
    task_data = TaskData(task, tokenizer, train, dev, test, objective, generation, packed)
    _check_positions(task_data, directory)
    return task_data


def _draw_splits(config: RunConfig, task: Task) -> Splits:
    data = config.data
    train, validation = load_records(task, None if data.path is None else Path(data.path))
    sizes = (data.num_train, data.num_dev, data.num_test)
    return sample_splits(task, train, validation, data.protocol, data.seed, *sizes)


def _with_demonstrations(config: RunConfig, splits: Splits) -> Splits:
    """Show the first training examples before every question, if the method is in-context learning."""
    if config.method != "icl":
        return splits
    wanted = config.data.num_demonstrations
    if wanted > len(splits.train):
        raise UserError(
            "there are fewer training examples than data.num_demonstrations",
            got=f"{wanted} of {len(splits.train)}",
            expected=f"at most {len(splits.train)}",
            fix=f"set data.num_demonstrations={len(splits.train)}, or a larger data.num_train",
        )
    shown = splits.train[:wanted]
    return replace(
        splits,
        dev=with_demonstrations(splits.dev, shown),
        test=with_demonstrations(splits.test, shown),
    )


def _encode(
    config: RunConfig,
    tokenizer: PromptTokenizer,
    examples: tuple[Example, ...],
    continued: bool,
    calibrated: bool,
) -> EncodedSplit:
    max_length = config.data.max_length
    return EncodedSplit(
        examples,
        encode_examples(tokenizer, examples, max_length),
        encode_prompts(tokenizer, examples, max_length, MAX_NEW_TOKENS) if continued else (),
        _encode_nulls(tokenizer, examples, max_length) if calibrated else (),
    )


def _encode_nulls(
    tokenizer: PromptTokenizer, examples: Sequence[Example], max_length: int
) -> tuple[EncodedExample, ...]:
    found = [encode_null(tokenizer, example, max_length) for example in examples]
    encoded = tuple(null for null in found if null is not None)
    if len(encoded) < len(examples):
        raise UserError(
            "data.calibrated needs a task with an empty prompt to compare with",
            got="a task that generates answers",
            expected="a task with candidates",
            fix="set data.calibrated=false",
        )
    return encoded


def _check_positions(data: TaskData, directory: Path) -> None:
    num_positions = getattr(load_model_config(directory).get_text_config(), "max_position_embeddings", None)
    splits = (data.train, data.dev, data.test)
    lengths = [len(ids) for split in splits for example in split.encoded for ids in example.sequences]
    lengths += [len(ids) + MAX_NEW_TOKENS for split in splits for ids in split.prompts]
    longest = max(lengths)
    if num_positions is not None and longest > num_positions:
        raise UserError(
            "an input is longer than the model's positions",
            got=f"{longest} tokens",
            expected=f"at most {num_positions}",
            fix=f"set data.max_length={num_positions}",
        )
