"""The data of a run, from records to the batch of a step.

    record (tables) -> example (splits) -> encoded (encoding, chat) -> batch (batches, generation)

Records are read, checked and encoded once, before weights are loaded. A step then draws examples by
the run's seed and lays them out as micro-batches, each of which one forward pass runs:

    drawn           batch_size rows of the stream of permutations (batches.batch_indices)
    in order        sorted by length, to have little padding; or dealt, if rows are shared
    micro-batches   [ row row row | row row row | ... ]    micro_batch_size rows each

All of this is a pure function of the configuration and the step, so a run resumes at any step, on
any number of ranks, with the same batches.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config import RunConfig, find_task
from lezo_ds.data.batches import batch_indices, num_earlier
from lezo_ds.data.chat import (
    ask_in_chat,
    encode_conversation,
    encode_question,
    end_of_turn,
    find_thought,
    not_written,
)
from lezo_ds.data.control_tokens import ControlTokens
from lezo_ds.data.encoding import (
    NEWLINE,
    EncodedExample,
    PromptTokenizer,
    TokenIds,
    cut_prompts,
    encode_example,
    encode_prompt,
    load_tokenizer,
    num_alike,
    prompt_room,
    warn_of_cuts,
)
from lezo_ds.data.generation import (
    COMMON_IDS,
    SAMPLE_KEYS,
    generation_settings,
    prompt_batch,
    read_answers,
)
from lezo_ds.data.metrics import try_metric
from lezo_ds.data.objectives import (
    Objective,
    load_objective,
    training_objective,
    try_loss,
    try_reward,
)
from lezo_ds.data.packing import FEWEST_DEALT, can_pack, deal, pack
from lezo_ds.data.splits import Splits, load_splits, refused_together, usable, with_demonstrations
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings, MicroBatch, StepBatch
from lezo_ds.registry import names_code
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.conversations import OF_CONVERSATIONS
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.zo.keys import sample_key

logger = logging.getLogger(__name__)

FEWEST_COMMON = 8
"""Tokens with which all prompts begin run on their own if they are at least this many."""

_EMPTY: tuple[object, ...] = (None, "", [])  # values of a field that a record does not have

_MEZO_LOSS_BATCH = 8
"""Examples in a batch of MeZO's validation loss, the default of transformers' Trainer."""


@dataclass(frozen=True)
class EncodedSplit:
    """The examples of one split and their tokens, in the same order.

    Attributes:
        examples: the examples.
        encoded: their candidates, or gold texts, as token ids.
        prompts: their prompts as token ids; empty if the model writes no answers to them.
        reads_records: whether the objective is a reward, which reads the fields of records.
    """

    examples: tuple[Example, ...]
    encoded: tuple[EncodedExample, ...]
    prompts: tuple[TokenIds, ...] = ()
    reads_records: bool = False

    @cached_property
    def num_common(self) -> int:
        """Number of tokens with which all prompts begin; 0 if they are few."""
        # All prompts lie between the first and the last in lexical order, and begin as these two
        # do. One token of a prompt is left to continue.
        number = num_alike(min(self.prompts)[:-1], max(self.prompts))
        return number if number >= FEWEST_COMMON else 0

    def fingerprint(self) -> str:
        """Return a hash of all that decides losses and scores, in its order: 32 hex digits."""
        digest = hashlib.sha256()
        for example, encoded in zip(self.examples, self.encoded, strict=True):
            values = (
                encoded.sequences,
                encoded.option_lengths,
                encoded.label,
                example.references,
                *([encoded.spans] if encoded.spans else []),
            )
            digest.update(json.dumps(values).encode())
            if self.reads_records:  # values of parquet files, such as dates, are hashed as text
                record = json.dumps(example.record, sort_keys=True, default=str)
                digest.update(record.encode())
        # Journals of versions up to 0.4 have a list of null prompts here, which was mostly empty.
        digest.update(json.dumps((self.prompts, [])).encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class TaskData:
    """The encoded splits of a task, with the objective and the settings to run them.

    Attributes:
        task: the task.
        tokenizer: the model's tokenizer.
        train: the examples to train on.
        dev: the examples to select the best step by.
        test: the examples for the final score.
        objective: the loss to minimize.
        encode: encodes other examples as those of `test`.
        generation: how answers are written; None if neither the task nor the objective needs them.
        packed: whether sequences share rows in training (packing.py).
        loss_batch: average a validation loss over batches of this number of examples first; None
            averages over all terms.
    """

    task: Task
    tokenizer: PromptTokenizer
    train: EncodedSplit
    dev: EncodedSplit
    test: EncodedSplit
    objective: Objective
    encode: Callable[[tuple[Example, ...]], EncodedSplit]
    generation: GenerationSettings | None = None
    packed: bool = False
    loss_batch: int | None = None

    def step_batch(self, config: RunConfig, step: int) -> StepBatch:
        """Return the micro-batches of a step, each of which is laid out when it is read.

        They are a function of the seed and the step. `prefetch.StepBatches` lays them out ahead.
        """
        size = config.train.micro_batch_size
        # A micro-batch is padded to its longest example, so sorting by length reduces padding.
        by_length = sorted((self._length(row), row) for row in self.step_rows(config, step))
        rows = np.array([row for _, row in by_length])
        if self.packed and FEWEST_DEALT <= size < len(rows):
            rows = deal(rows, len(rows) // size)
        group_size = config.zo.examples_per_direction
        if self.objective.reads_answers and group_size is not None and 1 < group_size < size:
            # Each group reads its prompts next to each other (prompt_reading.py).
            parts = rows.reshape(-1, size)
            rows = np.concatenate([deal(part, size // group_size) for part in parts])
        num_terms = [self.objective.num_terms(self.train.encoded[row]) for row in rows]
        weights = np.add.reduceat(num_terms, np.arange(0, len(rows), size))
        if self.objective.reads_answers:
            weights *= config.generation.num_samples

        repetitions = num_earlier(rows.tolist())

        def build(index: int) -> MicroBatch:
            part = slice(index * size, (index + 1) * size)
            of_micro_batch: list[int] = rows[part].tolist()
            if self.objective.reads_answers:
                return self._answer_batch(config, step, of_micro_batch, repetitions[part])
            return self.training_batch(of_micro_batch)

        return StepBatch(weights.tolist(), build, rows.tobytes(), num_examples=len(rows))

    def step_rows(self, config: RunConfig, step: int) -> list[int]:
        """Return the indices in `train` of a step's examples, in the order of the stream."""
        num_examples = len(self.train.examples)
        return batch_indices(config.seed, step, num_examples, config.train.batch_size)

    def _length(self, row: int) -> int:
        """Return the number of tokens that a forward pass runs for a training example."""
        if self.objective.reads_answers:
            return len(self.train.prompts[row])
        return self.train.encoded[row].num_tokens

    def objective_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of some examples of a split whose outputs the objective reads."""
        if self.objective.build_batch is None:
            batch = self.prompt_batch(split, rows)
        else:
            encoded = [split.encoded[row] for row in rows]
            batch = self.objective.build_batch(encoded, self.tokenizer.pad_id)
        examples = tuple(split.examples[row] for row in rows)
        return replace(batch, examples=examples)

    def training_batch(self, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of some training examples, which share rows if the model allows it."""
        batch = self.objective_batch(self.train, rows)
        return pack(batch) if self.packed else batch

    def prompt_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of the prompts of some examples, for the model to continue."""
        assert self.generation is not None
        prompts = [split.prompts[row] for row in rows]
        return prompt_batch(prompts, self.generation, split.num_common)

    def _answer_batch(
        self, config: RunConfig, step: int, rows: Sequence[int], repetitions: Sequence[int]
    ) -> MicroBatch:
        """Return the batch of prompts to train on; the samples of a prompt are neighboring rows.

        Args:
            config: of the run.
            step: index of the step.
            rows: indices in `train` of the prompts.
            repetitions: how often the step had each of these prompts before.
        """
        num_samples = config.generation.num_samples
        samples = range(num_samples)
        batch = self.objective_batch(self.train, [row for row in rows for _ in samples])
        if COMMON_IDS in batch.inputs:
            # Each group of examples reads what all prompts begin with in its own direction.
            num_groups = max(1, len(rows) // (config.zo.examples_per_direction or len(rows)))
            inputs = dict(batch.inputs)
            common = inputs.pop(COMMON_IDS)
            if num_groups < len(inputs["input_ids"]):  # a prompt without others is read at once
                inputs[COMMON_IDS] = common.expand(num_groups, -1)
            batch = replace(batch, inputs=inputs)
        if config.generation.temperature == 0:
            return batch
        keys = []
        for row, repetition in zip(rows, repetitions, strict=True):
            example = self.train.examples[row].index
            for sample in samples:
                number = repetition * num_samples + sample
                keys.append(sample_key(config.seed, step, example, number))
        return replace(batch, inputs={**batch.inputs, SAMPLE_KEYS: torch.tensor(keys)})

    def answers(self, tokens: Tensor, *, with_thoughts: bool = False) -> list[str]:
        """Return the answers in the new tokens [examples, n] of a `prompt_batch`."""
        assert self.generation is not None
        return read_answers(tokens, self.generation, self.tokenizer, with_thoughts=with_thoughts)

    def loss(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example of an `objective_batch`: a LossFunction."""
        if self.objective.reads_answers:
            # A reward may judge thoughts, too.
            answers = self.answers(outputs, with_thoughts=self.objective.is_reward)
            return self.objective.loss(answers, batch)
        return self.objective.loss(outputs, batch)


def load_task_data(config: RunConfig, task_alone: Task | None = None) -> TaskData:
    """Load and encode the splits of a task.

    Args:
        config: the configuration of the run.
        task_alone: load no splits, which are then empty, and encode for this task.

    Raises:
        UserError: data cannot be read or do not fit the task or the model, or the user's objective
            or metric fails on a few examples.
    """
    task = task_alone or find_task(config.data)
    objective = training_objective(task.kind)
    splits = Splits((), (), (), ())
    if task_alone is None:
        objective = load_objective(config.train.objective, task)
        _check_objective(config, task, objective)
        splits = load_splits(task, config.data)
        if objective.is_reward:
            try_reward(objective, splits.train)
        try_metric(task, splits.test)
    if config.method == "icl":
        splits = with_demonstrations(config.data, splits)
    directory = resolve_model(config.model.path)
    tokenizer = load_tokenizer(str(directory), config.data.date)
    model_config = load_model_config(directory)
    thought = find_thought(tokenizer) if config.data.in_chat else None
    if thought is not None and thought.is_open and task.has_answers and not objective.reads_answers:
        message = "prompts in the chat template open a thought (%s), and answers to learn have none"
        logger.warning(message, thought.opening)
    generation = None
    if task.kind == "generation" or objective.reads_answers:
        # A run of 0.4 in a chat, whose answers ended at a newline, goes on as it was.
        ends_turn = config.data.in_chat and config.generation.stop is not None
        generation = generation_settings(
            tokenizer, config.generation, end_of_turn(tokenizer) if ends_turn else ()
        )
        generation = replace(generation, thought=thought)
    writes_answers = generation is not None
    encoder = _Encoder(config, task, objective, tokenizer, model_config)
    # Generation pads on the left, and the mask of packed rows has no columns for keys of a prefix.
    takes_packed = not objective.reads_answers and config.peft.kind != "prefix"
    encode = partial(encoder.encode, has_prompts=writes_answers)
    train, dev, test = refused_together(
        (
            partial(encoder.encode, splits.train, has_prompts=objective.reads_answers),
            partial(encode, splits.dev),
            partial(encode, splits.test),
        )
    )
    data = TaskData(
        task,
        tokenizer,
        train=train,
        dev=dev,
        test=test,
        objective=objective,
        encode=encode,
        generation=generation,
        packed=takes_packed and can_pack(model_config, config.data.max_length),
        loss_batch=_MEZO_LOSS_BATCH if config.data.protocol == "mezo" else None,
    )
    if task.kind == "generation" and generation is not None:
        _warn_of_unreachable(test, generation)
    if splits.train and names_code(config.train.objective) and not objective.reads_answers:
        batch = data.objective_batch(data.train, [0])
        try_loss(objective, batch, model_config.get_text_config().vocab_size)
    return data


class _Texts(NamedTuple):
    """An example in the words that the recipe asks for.

    Attributes:
        shown: as it is shown to the user.
        read: as the model reads it, with marks at the text of control tokens.
    """

    shown: Example
    read: Example


def _warn_of_unreachable(split: EncodedSplit, settings: GenerationSettings) -> None:
    """Say how many right answers the model cannot write, because its answers end before."""
    num_stopped = 0
    num_long = 0
    for example, encoded in zip(split.examples, split.encoded, strict=True):
        if not example.references:
            continue
        cut = [any(stop in text for stop in settings.stops) for text in example.references]
        if all(cut):
            num_stopped += 1
        elif encoded.num_gold_tokens() - 1 > settings.max_new_tokens:  # the last one ends it
            num_long += 1
    if num_stopped:
        logger.warning(
            "%d of %d right answers to score have several lines or other texts that end an answer "
            "(%s): no answer can equal them; to end answers at the end of the sequence, set "
            "generation.stop=[]",
            num_stopped,
            len(split.examples),
            ", ".join(map(repr, settings.stops)),
        )
    if num_long:
        logger.warning(
            "%d of %d right answers to score have more than generation.max_new_tokens=%d tokens: "
            "no answer can equal them; set it higher",
            num_long,
            len(split.examples),
            settings.max_new_tokens,
        )


@dataclass(frozen=True)
class _Encoder:
    """Turns the examples of a run into token ids."""

    config: RunConfig
    task: Task
    objective: Objective
    tokenizer: PromptTokenizer
    model_config: Any
    named: set[str] = field(default_factory=set)
    """What records have and the model does not read, as far as the log says so."""

    def encode(self, examples: tuple[Example, ...], *, has_prompts: bool) -> EncodedSplit:
        """Encode examples that can be used, and with `has_prompts` also their prompts."""
        if not examples:
            return EncodedSplit((), ())
        data = self.config.data
        if not data.in_chat and any(example.messages for example in examples):
            self._refuse_turns()
        max_new_tokens = self.config.generation.max_new_tokens
        max_length = data.max_length
        if data.protocol == "mezo" and self.task.kind == "generation":
            # MeZO's code cuts a text with its gold answer like a prompt whose answer is yet to
            # come.
            max_length = prompt_room(max_length, max_new_tokens)
        is_chat = self.task.kind == "chat"

        def encode_candidates(texts: _Texts) -> EncodedExample:
            example = texts.read
            if example.messages and self.task.has_answers:
                return encode_conversation(
                    self.tokenizer, example, max_length, keep_end=not is_chat
                )
            return encode_example(self.tokenizer, example, max_length)

        pairs = usable(self._texts(examples), encode_candidates, skip=data.skip_unusable)
        where = "at their end" if is_chat else "on the left"
        warn_of_cuts([encoded.truncated for _, encoded in pairs], max_length, where)
        self._warn_of_unread([texts.read for texts, _ in pairs])
        prompts: tuple[TokenIds, ...] = ()
        if has_prompts:
            encode = encode_question if examples[0].messages else encode_prompt
            asked = [encode(self.tokenizer, texts.read) for texts, _ in pairs]
            prompts = cut_prompts(self.tokenizer, asked, data.max_length, max_new_tokens)
        split = EncodedSplit(
            tuple(texts.shown for texts, _ in pairs),
            tuple(encoded for _, encoded in pairs),
            prompts,
            reads_records=self.objective.is_reward,
        )
        self._check_model(split)
        return split

    def _refuse_turns(self) -> None:
        """Refuse conversations that no chat template is asked to write."""
        fix = "set data.chat_template=true"
        if not self.tokenizer.backend.chat_template:
            fix = "use a model with a chat template: this one has none; or write texts, not turns"
        fields = " or ".join(self.task.fields)
        raise UserError(f"field {fields} has lists of turns, as conversations have", fix=fix)

    def _warn_of_unread(self, examples: Sequence[Example]) -> None:
        """Log what records have, and the model does not read."""
        task = self.task
        read = {*task.fields, *task.answer_fields}
        read |= {name.partition(".")[0] for name in read}
        counts: Counter[str] = Counter()
        others: Counter[str] = Counter()
        for example in examples:
            counts.update(not_written(self.tokenizer, example, read))
            if task.hub_id is None and not self.objective.is_reward:
                filled = {name for name, value in example.record.items() if value not in _EMPTY}
                others.update(filled - read - OF_CONVERSATIONS)
        for name in sorted(counts.keys() - self.named):
            message = "the model does not read %s, which %d of %d records have"
            logger.warning(message, name, counts[name], len(examples))
        new = [f"{name} ({others[name]})" for name in others if name not in self.named]
        if new:
            logger.info("fields that the recipe leaves out (records): %s", ", ".join(new))
        self.named.update(counts, others)

    def _texts(self, examples: tuple[Example, ...]) -> list[_Texts]:
        """Return the texts of examples, and log which control tokens are in their records."""
        control_tokens = ControlTokens(self.tokenizer.backend, self.config.data.in_chat)
        texts = []
        found = []
        for example in examples:
            marked, tokens = control_tokens.mark_example(self.task, example)
            read = self._worded(marked)
            texts.append(_Texts(read if marked is example else self._worded(example), read))
            if tokens:
                found.append(tokens)
        if found:
            names = set().union(*found)
            are_tokens = control_tokens.become_tokens(names)
            how = "the model reads it as text"
            if are_tokens:
                how = "this tokenizer cannot read it as text, so the model reads the token"
            listed = ", ".join(are_tokens or sorted(names))
            logger.warning(
                "%d of %d records have the text of a control token (%s); %s",
                len(found),
                len(examples),
                listed,
                how,
            )
        return texts

    def _worded(self, example: Example) -> Example:
        """Return an example in the words that the recipe asks for: in a chat, or as MeZO's code."""
        data = self.config.data
        if data.chat_template and self.task.kind in ("classification", "multiple_choice"):
            example = ask_in_chat(self.tokenizer, example, data.system_prompt)
        if data.protocol == "mezo" and not example.demonstrations:
            # MeZO's code strips white space of any kind before the whole text. Demonstrations begin
            # without white space.
            example = replace(example, prompt=example.prompt.lstrip())
        stop = self.config.generation.stop
        if stop is not None and self.task.kind == "generation":
            # A gold answer ends with what ends generated ones, in the place of the newline.
            ending = stop[0] if stop else self.tokenizer.end_text
            candidates = [each.removesuffix(NEWLINE) + ending for each in example.candidates]
            example = replace(example, candidates=tuple(candidates))
        return example

    def _check_model(self, split: EncodedSplit) -> None:
        """Refuse inputs that are too long for the model's positions, or tokens that it lacks."""
        model_config = self.model_config.get_text_config()
        sequences = list(split.prompts)
        lengths = [len(ids) + self.config.generation.max_new_tokens for ids in split.prompts]
        for encoded in split.encoded:
            sequences += encoded.sequences
            lengths.append(encoded.num_tokens)
        longest = max(lengths)
        num_positions = getattr(model_config, "max_position_embeddings", None)
        if num_positions is not None and longest > num_positions:
            raise UserError(
                f"an input has {longest} tokens, and the model has {num_positions} positions",
                fix=f"set data.max_length={num_positions}",
            )
        largest = max(max(ids) for ids in sequences)
        if largest >= model_config.vocab_size:
            token = self.tokenizer.backend.convert_ids_to_tokens(largest)
            raise UserError(
                f"the tokenizer writes {token!r}, id {largest}, "
                f"and the model has {model_config.vocab_size}",
                fix="use the tokenizer of the model, or resize its embedding",
            )


def _check_objective(config: RunConfig, task: Task, objective: Objective) -> None:
    """Refuse an objective that does not fit the method or the task."""
    name = f"train.objective={config.train.objective}"
    if config.method == "adamw" and objective.reads_answers:
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
    if config.method == "icl" and not task.has_answers:
        raise UserError(
            "method icl shows solved examples, and the task has none", fix="set method=zero_shot"
        )
