"""The data of a run: record (tables) -> example (splits) -> encoded (encoding, chat) -> batch (batches)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config import RunConfig, find_task
from lezo_ds.data.batches import batch_indices
from lezo_ds.data.chat import ask_in_chat, encode_conversation, encode_questions
from lezo_ds.data.encoding import (
    NEWLINE,
    EncodedExample,
    PromptTokenizer,
    encode_example,
    encode_prompts,
    load_tokenizer,
    prompt_room,
    warn_of_cuts,
)
from lezo_ds.data.generation import SAMPLE_KEYS, generation_settings, prompt_batch, read_answers
from lezo_ds.data.metrics import try_metric
from lezo_ds.data.objectives import Objective, load_objective, training_objective, try_reward
from lezo_ds.data.packing import FEWEST_DEALT, can_pack, deal, pack
from lezo_ds.data.splits import Splits, load_splits, usable, with_demonstrations
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings, MicroBatch, Sampling, StepBatch
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.zo.keys import sample_key

FEWEST_COMMON = 8  # tokens; a pass over fewer is not worth it


@dataclass(frozen=True)
class EncodedSplit:
    """The examples of one split and their tokens, in the same order."""

    examples: tuple[Example, ...]
    encoded: tuple[EncodedExample, ...]
    prompts: tuple[tuple[int, ...], ...] = ()
    """Empty if the model generates no answers."""
    reads_records: bool = False

    @cached_property
    def num_common(self) -> int:
        """Number of tokens with which all prompts begin; 0 if they are few."""
        pairs = zip(
            min(self.prompts)[:-1], max(self.prompts), strict=False
        )  # one token is left to continue
        number = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return number if number >= FEWEST_COMMON else 0

    def fingerprint(self) -> str:
        """Return a hash of all that decides losses and scores, in its order: 32 hex digits."""
        digest = hashlib.sha256()
        for example, encoded in zip(self.examples, self.encoded, strict=True):
            facts = [encoded.sequences, encoded.option_lengths, encoded.label, example.references]
            facts += [encoded.spans] if encoded.spans else []
            digest.update(json.dumps(facts).encode())
            if self.reads_records:  # values of parquet files, such as dates, are hashed as text
                digest.update(json.dumps(example.record, sort_keys=True, default=str).encode())
        # Journals of versions up to 0.4 have a list of null prompts here, which was mostly empty.
        digest.update(json.dumps((self.prompts, [])).encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class TaskData:
    """The encoded splits of a task, with the objective and the settings to run them."""

    task: Task
    tokenizer: PromptTokenizer
    train: EncodedSplit
    dev: EncodedSplit
    test: EncodedSplit
    objective: Objective
    encode: Callable[[tuple[Example, ...]], EncodedSplit]
    """Encodes other examples as those of `test`."""
    generation: GenerationSettings | None = None
    """None if neither the task nor the objective needs answers."""
    packed: bool = False
    loss_batch: int | None = None
    """Average a validation loss over parts of this number of examples first; None averages over all terms."""

    def step_batch(self, config: RunConfig, step: int) -> StepBatch:
        """Return the micro-batches of a step, a function of the seed and the step, laid out when read."""
        drawn, size = np.array(self.step_rows(config, step)), config.train.micro_batch_size
        # Sorting by length first reduces padding: a micro-batch is padded to its longest example.
        rows = drawn[np.lexsort((drawn, self._lengths[drawn]))]
        shares_rows = self.packed and not self.objective.reads_answers
        if shares_rows and FEWEST_DEALT <= size < len(rows):
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

    def step_rows(self, config: RunConfig, step: int) -> list[int]:
        """Return the indices in `train` of a step's examples, in the order in which they are drawn."""
        return batch_indices(config.seed, step, len(self.train.examples), config.train.batch_size)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """int64 [training examples], the tokens that a forward pass runs for each."""
        if self.objective.reads_answers:
            return np.array([len(ids) for ids in self.train.prompts])
        return np.array([example.num_tokens for example in self.train.encoded])

    @cached_property
    def _num_terms(self) -> np.ndarray:
        """int64 [training examples], the weight of each in its micro-batch."""
        return np.array([self.objective.num_terms(example) for example in self.train.encoded])

    def objective_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        if self.objective.build_batch is None:
            batch = self.prompt_batch(split, rows)
        else:
            batch = self.objective.build_batch(
                [split.encoded[row] for row in rows], self.tokenizer.pad_id
            )
        return replace(batch, examples=tuple(split.examples[row] for row in rows))

    def prompt_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        assert self.generation is not None
        return prompt_batch([split.prompts[row] for row in rows], self.generation, split.num_common)

    def _answer_batch(self, config: RunConfig, step: int, rows: Sequence[int]) -> MicroBatch:
        assert self.generation is not None
        keys, samples = config.generation, range(config.generation.num_samples)
        batch = self.objective_batch(self.train, [row for row in rows for _ in samples])
        if keys.temperature == 0:
            return batch
        indices = [self.train.examples[row].index for row in rows]
        drawn = [
            sample_key(config.seed, step, index, sample) for index in indices for sample in samples
        ]
        settings = replace(self.generation, sampling=Sampling(keys.temperature, keys.top_p))
        inputs = {**batch.inputs, SAMPLE_KEYS: torch.tensor(drawn)}
        return replace(batch, inputs=inputs, generation=settings)

    def answers(self, tokens: Tensor) -> list[str]:
        """Return the answers in the new tokens [examples, n] of a `prompt_batch`."""
        assert self.generation is not None
        return read_answers(tokens, self.generation, self.tokenizer)

    def loss(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example of an `objective_batch`: a LossFunction."""
        return self.objective.loss(
            self.answers(outputs) if self.objective.reads_answers else outputs, batch
        )


def load_task_data(config: RunConfig, task_alone: Task | None = None) -> TaskData:
    """Load the splits of a task, or for `task_alone` none: what `encode` returns takes their place."""
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
        splits = with_demonstrations(task, config.data, splits)
    directory = resolve_model(config.model.path)
    tokenizer, model_config = load_tokenizer(str(directory)), load_model_config(directory)
    keys, length = config.generation, config.data.max_length
    generation = None
    if task.kind == "generation" or objective.reads_answers:
        stops = (NEWLINE,) if keys.stop is None else keys.stop
        generation = generation_settings(tokenizer, keys.max_new_tokens, stops)

    def encode(examples: tuple[Example, ...], *, scored: bool = True) -> EncodedSplit:
        if not examples:
            return EncodedSplit((), ())
        examples, encoded = _encode(config, task, tokenizer, examples)
        prompts: tuple[tuple[int, ...], ...] = ()
        answers = generation is not None if scored else objective.reads_answers
        if answers:
            encode_questioned = encode_questions if examples[0].messages else encode_prompts
            prompts = encode_questioned(tokenizer, examples, length, keys.max_new_tokens)
        split = EncodedSplit(examples, encoded, prompts, reads_records=objective.is_reward)
        _check_model(split, tokenizer, keys.max_new_tokens, model_config.get_text_config())
        return split

    return TaskData(
        task=task,
        tokenizer=tokenizer,
        train=encode(splits.train, scored=False),
        dev=encode(splits.dev),
        test=encode(splits.test),
        objective=objective,
        generation=generation,
        # The mask of packed rows has no columns for the keys of a prefix.
        packed=config.peft.kind != "prefix" and can_pack(model_config, length),
        loss_batch=8
        if config.data.protocol == "mezo"
        else None,  # MeZO's code: transformers' default
        encode=encode,
    )


def _encode(
    config: RunConfig, task: Task, tokenizer: PromptTokenizer, examples: tuple[Example, ...]
) -> tuple[tuple[Example, ...], tuple[EncodedExample, ...]]:
    """Return the examples that can be used, and their tokens."""
    keys, length = config.generation, config.data.max_length
    if config.data.chat_template and task.kind in ("classification", "multiple_choice"):
        examples = tuple(
            ask_in_chat(tokenizer, example, config.data.system_prompt) for example in examples
        )
    if config.data.protocol == "mezo":
        # MeZO's code strips white space of any kind before the whole text, and cuts a text with its gold
        # answer like a prompt whose answer is yet to come. Demonstrations begin without white space.
        examples = tuple(
            e if e.demonstrations else replace(e, prompt=e.prompt.lstrip()) for e in examples
        )
        if task.kind == "generation":
            length = prompt_room(length, keys.max_new_tokens)
    if keys.stop is not None and task.kind == "generation":
        ending = keys.stop[0] if keys.stop else str(tokenizer.backend.eos_token)
        examples = tuple(
            replace(
                e, candidates=tuple(text.removesuffix(NEWLINE) + ending for text in e.candidates)
            )
            for e in examples
        )
    encode: Callable[[PromptTokenizer, Example, int], EncodedExample] = encode_example
    if examples[0].messages and task.has_answers:
        encode = partial(encode_conversation, keep_end=task.kind != "chat")
    pairs = usable(examples, lambda e: encode(tokenizer, e, length), skip=config.data.skip_unusable)
    where = "at their end" if task.kind == "chat" else "on the left"
    warn_of_cuts(sum(encoded.truncated for _, encoded in pairs), len(pairs), length, where)
    return tuple(example for example, _ in pairs), tuple(encoded for _, encoded in pairs)


def _check_objective(config: RunConfig, task: Task, objective: Objective) -> None:
    name = f"train.objective={config.train.objective}"
    if config.method == "adamw" and objective.reads_answers:
        raise UserError(
            f"method adamw cannot use {name}, which has no gradient", fix="set method=lezo"
        )
    if (task.metric == REWARD or not task.has_answers) and not objective.is_reward:
        needs = "data.metric=reward" if task.has_answers else "a task without right answers"
        fix = "set train.objective=package.module:function, a function with the decorator `reward`"
        raise UserError(f"{needs} needs a reward, not {name}", fix=fix)
    if config.method == "icl" and not task.has_answers:
        what = "method icl shows solved examples, and the task has none"
        raise UserError(what, fix="set method=zero_shot")


def _check_model(
    split: EncodedSplit, tokenizer: PromptTokenizer, num_new: int, model_config: Any
) -> None:
    """Refuse inputs that are longer than the model's positions, or tokens that its embedding lacks."""
    sequences = [ids for e in split.encoded for ids in e.sequences]
    longest = max([*map(len, sequences), *(len(ids) + num_new for ids in split.prompts)])
    largest = max(map(max, (*sequences, *split.prompts)))
    num_positions = getattr(model_config, "max_position_embeddings", None)
    if num_positions is not None and longest > num_positions:
        what = f"an input has {longest} tokens, and the model has {num_positions} positions"
        raise UserError(what, fix=f"set data.max_length={num_positions}")
    if largest >= model_config.vocab_size:
        token = tokenizer.backend.convert_ids_to_tokens(largest)
        what = f"the tokenizer writes {token!r}, id {largest}, and the model has {model_config.vocab_size}"
        raise UserError(what, fix="use the tokenizer of the model, or resize its embedding")
