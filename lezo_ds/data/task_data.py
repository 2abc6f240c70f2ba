"""The data of a run: the splits as text and as tokens, the batches of a step, and the loss of a batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lezo_ds.config import RunConfig, find_task
from lezo_ds.data.chat import encode_answers, encode_conversations, encode_questions
from lezo_ds.data.encoding import (
    NEWLINE,
    EncodedExample,
    PromptTokenizer,
    encode_examples,
    encode_null,
    encode_prompts,
    load_tokenizer,
    prompt_room,
)
from lezo_ds.data.generation import (
    SAMPLE_KEYS,
    find_sampling,
    generation_settings,
    prompt_batch,
    read_answers,
)
from lezo_ds.data.objectives import Objective, load_objective
from lezo_ds.data.packing import DEALING, FEWEST_DEALT, can_pack, deal, pack
from lezo_ds.data.records import (
    Splits,
    draw_demonstrations,
    load_own_splits,
    load_records,
    sample_splits,
    with_demonstrations,
)
from lezo_ds.data.sampling import batch_indices
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings, MicroBatch, StepBatch
from lezo_ds.sharding.checkpoint_files import load_model_config, resolve_model
from lezo_ds.tasks.base import Example, Record, Task
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.zo.keys import sample_key

MEZO_LOSS_BATCH = 8
"""Number of examples over which MeZO's code averages a validation loss: the default of transformers."""


@dataclass(frozen=True)
class EncodedSplit:
    """The examples of one split and their tokens, in the same order.

    Attributes:
        examples: the examples as text.
        encoded: every candidate after its prompt.
        prompts: the prompts for the model to continue; empty if it generates no answers.
        null_encoded: every candidate after its null prompt; empty if scores are not calibrated.
        reads_records: whether the objective reads the fields of the records.
    """

    examples: tuple[Example, ...]
    encoded: tuple[EncodedExample, ...]
    prompts: tuple[tuple[int, ...], ...] = ()
    null_encoded: tuple[EncodedExample, ...] = ()
    reads_records: bool = False

    def fingerprint(self) -> str:
        """Return a hash of all tokens, labels and reference answers, in their order: 32 hex digits.

        The fields of the records count if the objective reads them.
        """
        digest = hashlib.sha256()
        for example, encoded in zip(self.examples, self.encoded, strict=True):
            facts = [encoded.sequences, encoded.option_lengths, encoded.label, example.references]
            facts += [encoded.spans] if encoded.spans else []
            digest.update(json.dumps(facts).encode())
            if self.reads_records:  # values of parquet files, such as dates, are hashed as text
                digest.update(json.dumps(example.record, sort_keys=True, default=str).encode())
        digest.update(json.dumps((self.prompts, [null.sequences for null in self.null_encoded])).encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class TaskData:
    """The encoded splits of a task, with the objective and the settings to run them.

    Attributes:
        task: the task.
        tokenizer: the model's tokenizer.
        train: the training examples.
        dev: the examples that select the best step.
        test: the examples of the final score.
        objective: the loss to minimize.
        generation: how to generate answers in evaluations; None if neither the task nor the objective needs
            any.
        packed: whether training examples share rows.
        loss_batch: number of examples in each part of a split whose validation loss is averaged first. The
            loss of the split is the mean of its parts, each weighted by its number of examples. None averages
            over all terms of the split at once.
    """

    task: Task
    tokenizer: PromptTokenizer
    train: EncodedSplit
    dev: EncodedSplit
    test: EncodedSplit
    objective: Objective
    generation: GenerationSettings | None = None
    packed: bool = False
    loss_batch: int | None = None

    def batch(self, config: RunConfig, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, which depend on the seed and the step only."""
        return list(self.step_batch(config, step))

    def step_batch(self, config: RunConfig, step: int) -> StepBatch:
        """Return the micro-batches of `batch`, each of which is laid out when it is read."""
        drawn, size = np.array(self.step_rows(config, step)), config.train.micro_batch_size
        # Sorting by length first reduces padding: a micro-batch is padded to its longest example.
        rows = drawn[np.lexsort((drawn, self._lengths[drawn]))]
        if self._deals(config):
            rows = deal(rows, len(rows) // size)
        weights = np.add.reduceat(self._num_terms[rows], np.arange(0, len(rows), size))
        if self.objective.reads_answers:
            weights *= config.generation.num_samples

        def build(index: int) -> MicroBatch:
            part: list[int] = rows[index * size : (index + 1) * size].tolist()
            if self.objective.reads_answers:
                return self._answer_batch(config, step, part)
            batch = self.objective_batch(self.train, part)
            return pack(batch) if self.packed else batch

        return StepBatch(weights.tolist(), build, content=rows.tobytes())

    def _deals(self, config: RunConfig) -> bool:
        """Return whether each micro-batch gets long and short examples."""
        train = config.train
        shares_rows = self.packed and not self.objective.reads_answers
        return shares_rows and FEWEST_DEALT <= train.micro_batch_size < train.batch_size

    def layout_facts(self, config: RunConfig) -> Mapping[str, str]:
        """Return, by name, what decides the last bits of losses besides the configuration."""
        return DEALING if self._deals(config) else {}

    def step_rows(self, config: RunConfig, step: int) -> list[int]:
        """Return the indices in `train` of a step's examples, in the order in which they are drawn."""
        num_examples = len(self.train.examples)
        return batch_indices(config.seed, step, num_examples=num_examples, batch_size=config.train.batch_size)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """int64 [training examples], the tokens that a forward pass runs for each."""
        if self.objective.build_batch is None:
            return np.array([len(ids) for ids in self.train.prompts])
        return np.array([example.num_tokens for example in self.train.encoded])

    @cached_property
    def _num_terms(self) -> np.ndarray:
        """int64 [training examples], the weight of each in its micro-batch."""
        return np.array([self.objective.num_terms(example) for example in self.train.encoded])

    def objective_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Lay out some examples of a split for the objective."""
        if self.objective.build_batch is None:
            return self.prompt_batch(split, rows)
        batch = self.objective.build_batch([split.encoded[row] for row in rows], self.tokenizer.pad_id)
        return replace(batch, examples=tuple(split.examples[row] for row in rows))

    def prompt_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Lay out the prompts of some examples of a split for the model to continue."""
        assert self.generation is not None
        batch = prompt_batch([split.prompts[row] for row in rows], self.generation)
        return replace(batch, examples=tuple(split.examples[row] for row in rows))

    def _answer_batch(self, config: RunConfig, step: int, rows: Sequence[int]) -> MicroBatch:
        """Lay out training prompts for the model to continue, each as often as it is sampled."""
        assert self.generation is not None
        keys, samples = config.generation, range(config.generation.num_samples)
        batch = self.prompt_batch(self.train, [row for row in rows for _ in samples])
        sampling = find_sampling(keys)
        settings = replace(self.generation, sampling=sampling)
        if sampling is None:
            return replace(batch, generation=settings)
        drawn = [
            sample_key(config.seed, step, self.train.examples[row].index, sample)
            for row in rows
            for sample in samples
        ]
        inputs = {**batch.inputs, SAMPLE_KEYS: torch.tensor(drawn)}
        return replace(batch, inputs=inputs, generation=settings)

    def answers(self, tokens: Tensor) -> list[str]:
        """Return the answers in the new tokens [examples, n] of a `prompt_batch`."""
        assert self.generation is not None
        return read_answers(tokens, self.generation, self.tokenizer)

    def loss(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example of an `objective_batch`: a LossFunction."""
        return self.objective.loss(self.answers(outputs) if self.objective.reads_answers else outputs, batch)


def load_task_data(config: RunConfig) -> TaskData:
    """Load, sample and tokenize a run's task.

    Raises:
        UserError: data, tokenizer or objective are missing, or do not fit the task or the model.
    """
    task = find_task(config.data)
    objective = load_objective(config.train.objective, task)
    if config.method == "adamw" and objective.reads_answers:
        raise UserError(
            "method adamw needs a loss with a gradient",
            got=f"train.objective={config.train.objective}, which reads generated answers",
            expected="an objective that reads logits",
            fix="set train.objective=task, or method=lezo",
        )
    _check_reward(config, task, objective)
    splits = _draw_splits(config, task)
    directory = resolve_model(config.model.path)
    tokenizer = load_tokenizer(str(directory))
    model_config = load_model_config(directory)
    keys = config.generation
    stops = (NEWLINE,) if keys.stop is None else keys.stop
    generation = None
    if task.kind == "generation" or objective.reads_answers:
        generation = generation_settings(tokenizer, keys.max_new_tokens, stops)

    follows_mezo = config.data.protocol == "mezo"
    length = config.data.max_length
    # MeZO's code cuts a text with its gold answer like a prompt whose answer is yet to come.
    shortened = follows_mezo and task.kind == "generation"
    encoded_length = prompt_room(length, keys.max_new_tokens) if shortened else length

    def encode(examples: tuple[Example, ...], *, continued: bool, calibrated: bool) -> EncodedSplit:
        if follows_mezo:
            examples = tuple(_without_space_before(example) for example in examples)
        if keys.stop is not None and task.kind == "generation":
            ending = keys.stop[0] if keys.stop else str(tokenizer.backend.eos_token)
            examples = tuple(_ending_with(example, ending) for example in examples)
        examples, encoded = _encode(task, tokenizer, examples, encoded_length)
        prompts: tuple[tuple[int, ...], ...] = ()
        if continued:
            encode_asked = encode_questions if examples[0].messages else encode_prompts
            prompts = encode_asked(tokenizer, examples, length, keys.max_new_tokens)
        return EncodedSplit(
            examples=examples,
            encoded=encoded,
            prompts=prompts,
            null_encoded=tuple(
                encode_null(tokenizer, example, length, with_demonstrations=config.method == "icl_sfc")
                for example in examples
            )
            if calibrated
            else (),
            reads_records=objective.is_reward,
        )

    scored = {"continued": generation is not None, "calibrated": config.method.endswith("_sfc")}
    data = TaskData(
        task=task,
        tokenizer=tokenizer,
        train=encode(splits.train, continued=objective.reads_answers, calibrated=False),
        dev=encode(splits.dev, **scored),
        test=encode(splits.test, **scored),
        objective=objective,
        generation=generation,
        # The mask of packed rows has no columns for the keys of a prefix.
        packed=config.peft.kind != "prefix" and can_pack(model_config, config.data.max_length),
        loss_batch=MEZO_LOSS_BATCH if follows_mezo else None,
    )
    text_config = model_config.get_text_config()
    _check_positions(data, getattr(text_config, "max_position_embeddings", None))
    _check_token_ids(data, text_config.vocab_size)
    return data


def _encode(
    task: Task, tokenizer: PromptTokenizer, examples: tuple[Example, ...], max_length: int
) -> tuple[tuple[Example, ...], tuple[EncodedExample, ...]]:
    """Return the examples that can be used, and their tokens."""
    if task.kind == "chat":
        return encode_conversations(tokenizer, examples, max_length)
    if examples[0].messages and task.has_answers:
        return examples, encode_answers(tokenizer, examples, max_length)
    return examples, encode_examples(tokenizer, examples, max_length)


def _check_reward(config: RunConfig, task: Task, objective: Objective) -> None:
    """Refuse a task or a metric that needs a reward if there is none, and a method that cannot use one."""
    needs = "a task without right answers" if not task.has_answers else "data.metric=reward"
    if (task.metric == REWARD or not task.has_answers) and not objective.is_reward:
        raise UserError(
            f"{needs} needs a reward",
            got=f"train.objective={config.train.objective}",
            expected="a function with the decorator `reward` (see lezo_ds/data/objectives.py)",
            fix="set train.objective=package.module:function",
        )
    if config.method.startswith("icl") and not task.has_answers:
        raise UserError(
            f"method {config.method} shows solved examples, and the task has none",
            got="records without right answers",
            expected="data.completion, data.labels or data.choices",
            fix="set method=zero_shot",
        )


def _draw_splits(config: RunConfig, task: Task) -> Splits:
    data = config.data
    if data.train is not None:
        splits, records = load_own_splits(
            task,
            data.train,
            validation=data.validation,
            test=data.test,
            seed=data.seed,
            num_train=data.num_train,
            num_dev=data.num_dev,
            num_test=data.num_test,
        )
        own_rows: list[int] = []  # no dev question is among the training records
    else:
        records, validation = load_records(task, None if data.path is None else Path(data.path))
        splits = sample_splits(
            task,
            train=records,
            validation=validation,
            protocol=data.protocol,
            seed=data.seed,
            num_train=data.num_train,
            num_dev=data.num_dev,
            num_test=data.num_test,
        )
        own_rows = [question.index for question in splits.dev]
    if not config.method.startswith("icl"):
        return splits
    return _with_demonstrations(config, task, splits, records=records, own_rows=own_rows)


def _with_demonstrations(
    config: RunConfig, task: Task, splits: Splits, *, records: Sequence[Record], own_rows: Sequence[int]
) -> Splits:
    """Put solved examples before every question of the dev and test splits.

    Args:
        config: configuration of the run.
        task: the task.
        splits: its examples.
        records: the records that are drawn for each question, if the configuration asks for that.
        own_rows: the row of each dev question among these records; empty if it is not there.
    """
    wanted, per_question = config.data.num_demonstrations, config.data.protocol == "mezo"
    # A dev question comes from the same records, and its own answer is not shown to it.
    available = len(records) - 1 if per_question else len(splits.train)
    if wanted > available:
        raise UserError(
            "there are fewer training examples than data.num_demonstrations",
            got=f"{wanted} of {available}",
            expected=f"at most {available}",
            fix=f"set data.num_demonstrations={available}, or give more training examples",
        )

    def show(questions: tuple[Example, ...], *, own_rows: Sequence[int] = ()) -> tuple[Example, ...]:
        if not per_question:
            return tuple(with_demonstrations(question, splits.train[:wanted]) for question in questions)
        drawn = draw_demonstrations(
            config.data.seed, len(questions), len(records), count=wanted, own_rows=own_rows
        )
        return tuple(
            with_demonstrations(question, [task.build_example(records[row], row) for row in rows])
            for question, rows in zip(questions, drawn, strict=True)
        )

    dev = show(splits.dev, own_rows=own_rows)
    return replace(splits, dev=dev, test=show(splits.test))


def _without_space_before(example: Example) -> Example:
    """Strip white space of any kind before an example's text, as MeZO's code does after it joins the text.

    Solved examples before a prompt begin without white space, so the prompt after them is left as it is.
    """
    return example if example.demonstrations else replace(example, prompt=example.prompt.lstrip())


def _ending_with(example: Example, ending: str) -> Example:
    """End the gold text with what ends an answer, instead of a newline."""
    texts = tuple(text.removesuffix(NEWLINE) + ending for text in example.candidates)
    return replace(example, candidates=texts)


def _check_positions(data: TaskData, num_positions: int | None) -> None:
    splits = (data.train, data.dev, data.test)
    lengths = [len(ids) for split in splits for example in split.encoded for ids in example.sequences]
    if data.generation is not None:
        new = data.generation.max_new_tokens
        lengths += [len(ids) + new for split in splits for ids in split.prompts]
    longest = max(lengths)
    if num_positions is not None and longest > num_positions:
        raise UserError(
            "an input is longer than the model's positions",
            got=f"{longest} tokens",
            expected=f"at most {num_positions}",
            fix=f"set data.max_length={num_positions}",
        )


def _check_token_ids(data: TaskData, num_embeddings: int) -> None:
    """Refuse tokens that the model's embedding has no row for: they may have been added to the tokenizer."""
    for split in (data.train, data.dev, data.test):
        sequences = [ids for e in (*split.encoded, *split.null_encoded) for ids in e.sequences]
        largest = max((max(ids) for ids in (*sequences, *split.prompts)), default=0)
        if largest >= num_embeddings:
            raise UserError(
                "the tokenizer gives a token that the model's embedding has no row for",
                got=f"id {largest}, {data.tokenizer.backend.convert_ids_to_tokens(largest)!r}",
                expected=f"ids below {num_embeddings}, the vocab_size in config.json",
                fix="use the tokenizer that the model was trained with, or resize the model's embedding",
            )
