"""How a model reads the examples of a task, and how its outputs are read.

    examples   -- in the words of the recipe, then as tokens -->  EncodedSplit
    outputs    -- as answers, and as losses of the objective -->  numbers

A `Reader` is a function of the task, the recipe's sections data and generation, and the model's
tokenizer. It needs neither weights nor a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config.schema import DataConfig, GenerationConfig
from lezo_ds.data.batches import all_candidates
from lezo_ds.data.chat import (
    TurnEnd,
    TurnsChangedError,
    ask_in_chat,
    encode_conversation,
    encode_question,
    end_of_turn,
    find_thought,
    not_written,
    turns_apart,
)
from lezo_ds.data.control_tokens import ControlTokens
from lezo_ds.data.encoding import (
    NEWLINE,
    PromptTokenizer,
    cut_prompts,
    encode_example,
    encode_prompt,
    load_tokenizer,
    num_alike,
    prompt_room,
    refuse_unknown,
    warn_of_cuts,
)
from lezo_ds.data.generation import generation_settings, prompt_batch, read_answers
from lezo_ds.data.objectives import Objective, training_objective
from lezo_ds.data.splits import Examples, usable
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings, MicroBatch
from lezo_ds.tasks.base import EncodedExample, Example, Task, TokenIds
from lezo_ds.tasks.conversations import OF_CONVERSATIONS

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

    examples: Examples
    encoded: tuple[EncodedExample, ...]
    prompts: tuple[TokenIds, ...] = ()
    reads_records: bool = False

    @cached_property
    def num_common(self) -> int:
        """Number of tokens with which all prompts begin; 0 if they are few."""
        return _num_common([ids[:-1] for ids in self.prompts])  # a token is left to continue

    @cached_property
    def num_start(self) -> int:
        """Number of tokens with which all sequences begin before any that count; 0 if few."""
        starts = [
            encoded.sequences[number][: encoded.targets(number)[0] - 1]
            for encoded, number in all_candidates(self.encoded)
        ]
        return _num_common(starts)

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


def _num_common(sequences: Sequence[TokenIds]) -> int:
    """Return the number of tokens with which all sequences begin; 0 if they are few."""
    # All lie between the first and the last in lexical order, and begin as these two do.
    number = num_alike(min(sequences), max(sequences))
    return number if number >= FEWEST_COMMON else 0


def warn_of_unlike_ends(split: EncodedSplit, room: int) -> None:
    """Log if most prompts end in other tokens where an answer follows.

    GPT-2's tokenizer has a token for two line breaks, and reads them one by one before a word. A
    prompt of `room` tokens may have been cut.
    """
    if not split.prompts or split.examples[0].messages:
        return
    pairs = zip(split.encoded, split.prompts, strict=True)
    starts = [
        (encoded.sequences[0][: len(ids)], ids)
        for encoded, ids in pairs
        if encoded.sequences and not encoded.truncated and len(ids) < room
    ]
    num_unlike = sum(start != ids for start, ids in starts)
    if 2 * num_unlike > len(split.prompts):
        logger.warning(
            "%d of %d prompts end in other tokens in training, where an answer follows, than where "
            "the model writes one; end data.prompt with a word or one line break",
            num_unlike,
            len(split.prompts),
        )


class _Texts(NamedTuple):
    """An example in the words that the recipe asks for.

    Attributes:
        shown: as it is shown to the user.
        read: as the model reads it, with marks at the text of control tokens.
    """

    shown: Example
    read: Example


@dataclass(frozen=True)
class Reader:
    """How a model reads the examples of a task: the `Encoder` of `Task.encode`.

    Attributes:
        task: the task.
        objective: the loss to minimize, which decides with the task what is read.
        tokenizer: the model's tokenizer.
        model_config: the model's configuration, of transformers.
        data: what the recipe says of records and their texts.
        answers_config: what it says of written answers.
        generation: how answers are written; None if neither the task nor the objective needs them.
    """

    task: Task
    objective: Objective
    tokenizer: PromptTokenizer
    model_config: Any
    data: DataConfig
    answers_config: GenerationConfig
    generation: GenerationSettings | None
    _named: set[str] = field(default_factory=set)
    """What records have and the model does not read, as far as the log says so."""

    def encode(self, examples: Examples, *, is_training: bool = False) -> EncodedSplit:
        """Encode examples that can be used.

        Args:
            examples: of one split.
            is_training: whether they are trained on. The model then writes answers to them only if
                the objective reads answers.
        """
        if not self.data.in_chat and any(example.messages for example in examples):
            self._refuse_turns()
        system_prompt = self.data.system_prompt or ""
        fields = [f"{{{name}}}" for name in examples[0].record if f"{{{name}}}" in system_prompt]
        if fields:
            raise UserError(
                f"data.system_prompt is no template, and has {', '.join(fields)}",
                fix="put fields into data.prompt, or a text of its own into the field system of "
                "each conversation",
            )

        found = usable(self._texts(examples), self._encoded, skip=self.data.skip_unusable)
        pairs = list(chain.from_iterable(found))
        if len(pairs) > len(found):
            logger.info(
                "%d conversations are %d sequences, one for each turn to learn: the chat template "
                "changes earlier turns",
                len(found),
                len(pairs),
            )
        texts, encoded = zip(*pairs, strict=True)
        where = "on the left" if self.task.keeps_end else "at their end"
        warn_of_cuts([each.truncated for each in encoded], self._max_length, where)
        read = [each.read for each in texts]
        self._warn_of_unread(read)
        prompts: tuple[TokenIds, ...] = ()
        is_answered = self.generation is not None and not is_training
        if is_answered or self.objective.reads_answers:
            prompts = self._prompts(read)
        shown = tuple(each.shown for each in texts)
        split = EncodedSplit(shown, encoded, prompts, reads_records=self.objective.is_reward)
        self._check_model(split)
        warn_of_unlike_ends(split, self.data.max_length - self.answers_config.max_new_tokens)
        return split

    def _encoded(self, texts: _Texts) -> list[tuple[_Texts, EncodedExample]]:
        """Return an example as it is encoded, or the parts of one that cannot be one sequence."""
        try:
            return [(texts, self.task.encode(self, texts.read))]
        except TurnsChangedError:
            parts = map(_Texts, turns_apart(texts.shown), turns_apart(texts.read))
            return [(part, self.task.encode(self, part.read)) for part in parts]

    def objective_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of some examples of a split whose outputs the objective reads."""
        if self.objective.build_batch is None:
            batch = self.prompt_batch(split, rows)
        else:
            encoded = [split.encoded[row] for row in rows]
            batch = self.objective.build_batch(encoded, self.tokenizer.pad_id)
        examples = tuple(split.examples[row] for row in rows)
        return replace(batch, examples=examples)

    def prompt_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of the prompts of some examples, for the model to continue."""
        assert self.generation is not None
        prompts = [split.prompts[row] for row in rows]
        return prompt_batch(prompts, self.generation, split.num_common)

    def answers(self, tokens: Tensor, *, as_written: bool = False) -> list[str]:
        """Return the answers in the new tokens [examples, n] of a `prompt_batch`."""
        assert self.generation is not None
        return read_answers(tokens, self.generation, self.tokenizer, as_written=as_written)

    def loss(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example of an `objective_batch`: a LossFunction."""
        if self.objective.reads_answers:
            # A reward may judge thoughts, too.
            answers = self.answers(outputs, as_written=self.objective.is_reward)
            return self.objective.loss(answers, batch)
        return self.objective.loss(outputs, batch)

    @property
    def loss_batch(self) -> int | None:
        """Examples of a validation loss that are averaged first; None averages over all terms."""
        return _MEZO_LOSS_BATCH if self.data.protocol == "mezo" else None

    def ask_in_chat(self, example: Example) -> Example:
        """Return an example whose candidates are answers in a chat, if the recipe wants one."""
        if not self.data.chat_template:
            return example
        return ask_in_chat(self.tokenizer, example, self.data.system_prompt)

    def end_answers(self, example: Example) -> Example:
        """Return an example whose gold text ends with what ends generated ones."""
        stop = self.answers_config.stop
        if stop is None:  # a newline, which it has
            return example
        ending = stop[0] if stop else self.tokenizer.end_text
        candidates = [each.removesuffix(NEWLINE) + ending for each in example.candidates]
        return replace(example, candidates=tuple(candidates))

    def encode_candidates(self, example: Example) -> EncodedExample:
        """Return each candidate after the prompt."""
        return encode_example(self.tokenizer, example, self._max_length)

    def encode_conversation(self, example: Example, *, keep_end: bool) -> EncodedExample:
        """Return the turns of a conversation; one that is too long keeps its end or its start."""
        return encode_conversation(self.tokenizer, example, self._max_length, keep_end=keep_end)

    @property
    def _max_length(self) -> int:
        """The most tokens of a text with its answer."""
        if self.data.protocol == "mezo" and self.task.writes_answers:
            # MeZO's code cuts a text with its gold answer like a prompt whose answer is yet to
            # come.
            return prompt_room(self.data.max_length, self.answers_config.max_new_tokens)
        return self.data.max_length

    def _prompts(self, examples: Sequence[Example]) -> tuple[TokenIds, ...]:
        encode = encode_question if examples[0].messages else encode_prompt
        return cut_prompts(
            self.tokenizer,
            [encode(self.tokenizer, example) for example in examples],
            self.data.max_length,
            self.answers_config.max_new_tokens,
        )

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
        for name in sorted(counts.keys() - self._named):
            message = "the model does not read %s, which %d of %d records have"
            logger.warning(message, name, counts[name], len(examples))
        new = [f"{name} ({others[name]})" for name in others if name not in self._named]
        if new:
            logger.info("fields that the recipe leaves out (records): %s", ", ".join(new))
        self._named.update(counts, others)

    def _texts(self, examples: Examples) -> list[_Texts]:
        """Return the texts of examples, and log which control tokens are in their records."""
        control_tokens = ControlTokens(self.tokenizer.backend, self.data.in_chat)
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
        """Return an example in the words that the recipe asks for."""
        example = self.task.worded(self, example)
        if self.data.protocol == "mezo" and not example.demonstrations:
            # MeZO's code strips white space of any kind before the whole text. Demonstrations begin
            # without white space.
            example = replace(example, prompt=example.prompt.lstrip())
        return example

    def _check_model(self, split: EncodedSplit) -> None:
        """Refuse inputs that are too long for the model's positions, or tokens that it lacks."""
        sequences = list(split.prompts)
        lengths = [len(ids) + self.answers_config.max_new_tokens for ids in split.prompts]
        for encoded in split.encoded:
            sequences += encoded.sequences
            lengths.append(encoded.num_tokens)
        longest = max(lengths)
        text_config = self.model_config.get_text_config()
        num_positions = getattr(text_config, "max_position_embeddings", None)
        if num_positions is not None and longest > num_positions:
            raise UserError(
                f"an input has {longest} tokens, and the model has {num_positions} positions",
                fix=f"set data.max_length={num_positions}",
            )
        refuse_unknown(self.tokenizer, sequences, self.model_config)


def load_reader(
    task: Task,
    model: str,
    data: DataConfig,
    generation: GenerationConfig,
    objective: Objective | None = None,
) -> Reader:
    """Return how a model reads the examples of a task.

    Args:
        task: of the examples.
        model: its directory, or its id on the hub.
        data: the section data of a recipe.
        generation: its section generation.
        objective: the loss to minimize; None for the task's own.

    Raises:
        UserError: the tokenizer cannot be loaded, or does not fit the recipe.
    """
    objective = objective or training_objective(task)
    directory = resolve_model(model)
    tokenizer = load_tokenizer(str(directory), data.date, data.chat_template_kwargs)
    thought = find_thought(tokenizer) if data.in_chat else None
    if thought is not None and thought.is_open and task.has_answers and not objective.reads_answers:
        logger.warning(
            "the chat template begins each answer with a thought (%s); "
            "where a record has none, the model learns an empty one",
            thought.opening,
        )
    if data.in_chat and generation.stop is None:  # only the end of its turn ends an answer
        generation = generation.model_copy(update={"stop": []})
    settings = None
    if task.writes_answers or objective.reads_answers:
        end = end_of_turn(tokenizer) if data.in_chat else TurnEnd()
        settings = replace(generation_settings(tokenizer, generation, *end), thought=thought)
    return Reader(
        task, objective, tokenizer, load_model_config(directory), data, generation, settings
    )
