"""How a model reads the examples of a task, and how its outputs are read.

    examples   -- as token ids and masks     -->   rows of an EncodedSplit
    outputs    -- as answers, and as losses  -->   numbers

A row is one sequence of an example, or its candidates. The rows of a split are a `datasets.Dataset`
in an Arrow file, so that all ranks of a machine share them. A `Reader` needs neither weights nor a
run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset, Features, List, Value
from torch import Tensor

from lezo_ds.checkpoints.checkpoint import load_model_config, num_positions, resolve_model
from lezo_ds.checkpoints.tokenizer_check import refuse_second_begin
from lezo_ds.config import RunConfig
from lezo_ds.data.chat import encode_question
from lezo_ds.data.encode import (
    PromptTokenizer,
    common_start,
    encode_prompt,
    load_tokenizer,
    prompt_room,
    refuse_unknown,
)
from lezo_ds.data.examples import EncodedExample, Example, TokenIds
from lezo_ds.data.generation import generation_settings, prompt_batch, read_answers
from lezo_ds.data.objectives import Objective, training_objective
from lezo_ds.data.tasks import Task
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import GenerationSettings, MicroBatch

logger = logging.getLogger(__name__)

T = TypeVar("T")

FEWEST_COMMON = 8
"""Tokens with which all prompts begin run on their own if they are at least this many."""

FEATURES = Features(
    {
        "place": Value("int64"),  # of the example in its split
        "index": Value("int64"),  # Example.index
        "turn": Value("int32"),  # the turn that the sequence ends with; -1 if it has all
        "sequences": List(List(Value("int32"))),
        "masks": List(List(Value("bool"))),
        "label": Value("int32"),  # -1 if there is none
        "prompt": List(Value("int32")),  # for the model to continue; [] if it writes no answer
        "truncated": Value("bool"),
        "length": Value("int32"),  # of the longest sequence
        "num_gold": Value("int32"),  # tokens of the right candidate
        "prompt_length": Value("int32"),
        "largest": Value("int32"),  # id of a token
        # What all sequences, or prompts, of some rows begin with; in the first of these.
        "common_start": List(Value("int32")),
        "common_prompt": List(Value("int32")),
        "digest": Value("string"),  # of all that decides losses and scores
    }
)


class Lazy(Sequence[T]):
    """A sequence whose items are made when they are read.

    Args:
        size: number of items.
        make: (index) -> item.
    """

    def __init__(self, size: int, make: Callable[[int], T]) -> None:
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(each) for each in range(self._size)[index]]
        return self._make(range(self._size)[index])


def column_of(rows: Dataset, name: str) -> np.ndarray:
    """Return the numbers of a column, int64 [rows]."""
    return np.asarray(rows.data.column(name).to_numpy(), dtype=np.int64)


class EncodedSplit:
    """The examples of one split and their tokens, in the same order.

    Attributes:
        rows: with the columns of FEATURES.
        examples: the example of each row.
        encoded: its candidates, or gold text, as token ids.
        prompts: its prompt as token ids; () if the model writes no answers to them.
        lengths: int64 [rows], tokens of the longest sequence.
        num_gold: int64 [rows], tokens of the right candidate.
        index: int64 [rows], of the example in its file.
    """

    def __init__(self, rows: Dataset, examples: Sequence[Example]) -> None:
        self.rows = rows
        self._of_places = examples
        size = len(rows)
        self.examples: Sequence[Example] = Lazy(size, self._example)
        self.encoded: Sequence[EncodedExample] = Lazy(size, self._encoded)
        self.prompts: Sequence[TokenIds] = Lazy(size, self._prompt)
        self.lengths = self.column("length")
        self.num_gold = self.column("num_gold")
        self.index = self.column("index")

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> np.ndarray:
        """Return the numbers of a column of FEATURES, int64 [rows]."""
        return column_of(self.rows, name)

    def _example(self, row: int) -> Example:
        values = self.rows[row]
        example: Example = self._of_places[values["place"]]
        turn = values["turn"]
        return example if turn < 0 else example.at_turn(turn)

    def _encoded(self, row: int) -> EncodedExample:
        values = self.rows[row]
        return EncodedExample(
            tuple(map(tuple, values["sequences"])),
            tuple(map(tuple, values["masks"])),
            None if values["label"] < 0 else values["label"],
            values["truncated"],
        )

    def _prompt(self, row: int) -> TokenIds:
        return tuple(self.rows[row]["prompt"])

    def first(self, size: int) -> EncodedSplit:
        """Return the first rows. If a row has no right candidate, its first one counts as right."""
        columns = self.rows[:size]
        columns["label"] = [max(label, 0) for label in columns["label"]]
        return EncodedSplit(Dataset.from_dict(columns, self.rows.features), self._of_places)

    @cached_property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt; 0 without prompts."""
        return int(self.column("prompt_length").max(initial=0))

    @cached_property
    def num_common(self) -> int:
        """Number of tokens with which all prompts begin; 0 if they are few."""
        return self._num_common("common_prompt")

    @cached_property
    def num_start(self) -> int:
        """Number of tokens with which all sequences begin before any that count; 0 if few."""
        return self._num_common("common_start")

    def _num_common(self, column: str) -> int:
        of_parts = self.rows.data.column(column).to_pylist()
        number = len(common_start([part for part in of_parts if part is not None]))
        return number if number >= FEWEST_COMMON else 0

    def fingerprint(self) -> str:
        """Return a hash of all that decides losses and scores, in its order: 32 hex digits."""
        digest = hashlib.sha256()
        for each in self.rows.data.column("digest").to_pylist():
            digest.update(each.encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Reader:
    """How a model reads the examples of a task.

    Attributes:
        task: the task.
        objective: the loss to minimize, which decides with the task what is read.
        tokenizer: the model's tokenizer.
        model_config: the model's configuration, of transformers.
        config: the recipe.
        generation: how answers are written; None if neither the task nor the objective needs them.
    """

    task: Task
    objective: Objective
    tokenizer: PromptTokenizer
    model_config: Any
    config: RunConfig
    generation: GenerationSettings | None

    def rows_of(
        self, example: Example, place: int, *, is_training: bool = False
    ) -> list[dict[str, Any]]:
        """Return the rows of an example: one, or one for each turn to learn.

        The model writes answers to examples that are trained on only if the objective reads them.

        Raises:
            UserError: the example cannot be encoded.
        """
        read = self.as_read(example)
        is_scored = self.generation is not None and not is_training
        is_answered = is_scored or self.objective.reads_answers
        # The model answers each turn to learn, whether or not the template marks them in one text.
        asked = [read.at_turn(turn) for turn in read.learned] if is_answered else []
        parts: list[EncodedExample] = []
        for each in asked or [read]:
            parts += self.task.encode(self.tokenizer, self._encoding_config, each)
        turns = example.learned if len(parts) > 1 else (-1,)
        rows = []
        for encoded, turn in zip(parts, turns, strict=True):
            prompt: TokenIds = ()
            is_cut = encoded.truncated
            if is_answered:
                whole = self._prompt(read if turn < 0 else read.at_turn(turn))
                prompt = self.tokenizer.cut_left(whole, self._prompt_room)
                is_cut |= len(prompt) < len(whole)
            label = -1 if encoded.label is None else encoded.label
            content: list[Any] = [encoded.sequences, encoded.masks, label]
            content += [example.references, prompt]
            if self.objective.is_reward:  # it reads the fields of records
                content.append(json.dumps(example.record, sort_keys=True, default=str))
            digest = hashlib.blake2b(repr(content).encode(), digest_size=16)
            row = {
                "place": place,
                "index": example.index,
                "turn": turn,
                "sequences": encoded.sequences,
                "masks": encoded.masks,
                "label": label,
                "prompt": prompt,
                "truncated": is_cut,
                "length": encoded.num_tokens,
                "num_gold": 0 if label < 0 else encoded.option_lengths[label],
                "prompt_length": len(prompt),
                "largest": max(chain(prompt, *encoded.sequences), default=0),
                "digest": digest.hexdigest(),
            }
            rows.append(row)
        return rows

    def columns_of(
        self, examples: Sequence[Example], places: Sequence[int], *, is_training: bool = False
    ) -> dict[str, list[Any]]:
        """Return the columns of FEATURES of some examples.

        One that cannot be encoded has the place -1 - place, and the problem as its digest.
        """
        rows: list[dict[str, Any]] = []
        usable: list[dict[str, Any]] = []
        for place in places:
            try:
                usable += self.rows_of(examples[place], place, is_training=is_training)
            except UserError as error:
                rows.append({"place": -1 - place, "digest": str(error)})
        if usable:
            starts = [
                ids[: mask.index(True) - 1]
                for row in usable
                for ids, mask in zip(row["sequences"], row["masks"], strict=True)
            ]
            usable[0]["common_start"] = common_start(starts)
            # A token is left to continue.
            prompts = [row["prompt"][:-1] for row in usable]
            usable[0]["common_prompt"] = common_start(prompts)
        rows += usable
        return {column: [row.get(column) for row in rows] for column in FEATURES}

    def as_read(self, example: Example) -> Example:
        """Return an example as the model reads it, with marks at the text of control tokens."""
        record = self.tokenizer.marked(example.record)
        if record != example.record:
            marked = self.task.example(record)
            example = replace(
                example,
                prompt=marked.prompt,
                candidates=marked.candidates,
                messages=marked.messages,
            )
        if self.config.data.protocol == "mezo" and not example.demonstrations:
            # MeZO's code strips white space of any kind before the whole text. Demonstrations begin
            # without white space.
            example = replace(example, prompt=example.prompt.lstrip())
        return example

    def _prompt(self, example: Example) -> TokenIds:
        if example.messages:
            return encode_question(self.tokenizer, self.config, example)
        return encode_prompt(self.tokenizer, example)

    @property
    def _prompt_room(self) -> int:
        max_new_tokens = self.config.generation.max_new_tokens
        return prompt_room(self.config.data.max_length, max_new_tokens)

    @cached_property
    def _encoding_config(self) -> RunConfig:
        """The recipe with the most tokens of a text with its answer."""
        if self.config.data.protocol != "mezo" or not self.task.writes_answers:
            return self.config
        # MeZO's code cuts a text with its gold answer like a prompt whose answer is yet to come.
        return self.config.with_section("data", max_length=self._prompt_room)

    def encode(self, examples: Sequence[Example]) -> EncodedSplit:
        """Encode a few examples in memory. UserError: one cannot be encoded, or does not fit."""
        columns = self.columns_of(examples, range(len(examples)))
        for place, problem in zip(columns["place"], columns["digest"], strict=True):
            if place < 0:
                raise UserError(problem)
        return self.checked(EncodedSplit(Dataset.from_dict(columns, FEATURES), examples))

    def checked(self, split: EncodedSplit) -> EncodedSplit:
        """Return a split, and say how many examples are cut.

        Raises:
            UserError: an input is too long for the model's positions, or it lacks a token.
        """
        num_cut = int(split.column("truncated").sum())
        if num_cut:
            logger.warning(
                "%d of %d examples are cut: with an answer, they have more than data.max_length=%d "
                "tokens",
                num_cut,
                len(split),
                self.config.data.max_length,
            )
        longest = int(split.lengths.max(initial=0))
        if self.generation is not None:
            longest = max(longest, split.longest_prompt + self.generation.max_new_tokens)
        most = num_positions(self.model_config)
        if most is not None and longest > most:
            raise UserError(
                f"an input has {longest} tokens, and the model has {most} positions",
                fix=f"set data.max_length={most}",
            )
        largest = int(split.column("largest").max(initial=0))
        refuse_unknown(self.tokenizer, largest, self.model_config)
        return split

    def warn_of_unreachable(self, split: EncodedSplit) -> None:
        """Say how many right answers the model cannot write, because its answers end before."""
        settings = self.generation
        if settings is None or not self.task.writes_answers:
            return
        written = zip(split.examples, split.num_gold.tolist(), strict=True)
        num_unreachable = 0
        for example, num_gold in written:
            right = [text.strip() for text in example.right_texts]
            are_stopped = [any(stop in text for stop in settings.stops) for text in right]
            is_long = num_gold - 1 > settings.max_new_tokens  # the last one ends it
            num_unreachable += bool(right) and (is_long or all(are_stopped))
        if num_unreachable:
            logger.warning(
                "no answer can equal %d of %d right answers to score: they have a text that ends "
                "one (%s; set generation.stop=[]), or more tokens than "
                "generation.max_new_tokens=%d",
                num_unreachable,
                len(split),
                ", ".join(map(repr, settings.stops)),
                settings.max_new_tokens,
            )

    def objective_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of some rows of a split whose outputs the objective reads."""
        if self.objective.build_batch is None:
            batch = self.prompt_batch(split, rows)
        else:
            encoded = [split.encoded[row] for row in rows]
            batch = self.objective.build_batch(encoded, self.tokenizer.pad_id)
        if not self.objective.reads_texts:
            return batch
        return replace(batch, examples=tuple(split.examples[row] for row in rows))

    def prompt_batch(self, split: EncodedSplit, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of the prompts of some rows, for the model to continue."""
        assert self.generation is not None
        prompts = [split.prompts[row] for row in rows]
        return prompt_batch(prompts, self.generation, split.num_common)

    def answers(self, tokens: Tensor, *, as_written: bool = False) -> list[str]:
        """Return the answers in the new tokens [examples, n] of a `prompt_batch`."""
        assert self.generation is not None
        return read_answers(tokens, self.generation, self.tokenizer, as_written=as_written)

    def loss(self, outputs: Any, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example of an `objective_batch`: a LossFunction."""
        if self.objective.reads_answers:
            # A reward may judge thoughts, too.
            outputs = self.answers(outputs, as_written=self.objective.is_reward)
        return self.objective.loss(outputs, batch)


def load_reader(
    task: Task,
    config: RunConfig,
    objective: Objective | None = None,
    *,
    shows_examples: bool = False,
) -> Reader:
    """Return how the model of a recipe reads the examples of a task.

    Args:
        task: of the examples.
        config: the recipe, with the model.
        objective: the loss to minimize; None for the task's own.
        shows_examples: whether questions may follow solved examples.

    Raises:
        UserError: the tokenizer cannot be loaded, or does not fit the recipe; or the recipe asks
            for solved examples where none are shown.
    """
    data = config.data
    if data.num_demonstrations and not (shows_examples and task.has_answers):
        raise UserError(
            f"data.num_demonstrations={data.num_demonstrations} is for lezo-ds evaluate, and for a "
            "task with right answers",
            fix="remove it",
        )
    objective = objective or training_objective(task)
    directory = resolve_model(config.model.path)
    tokenizer = load_tokenizer(str(directory), data.date, data.chat_template_kwargs)
    if data.prompt is not None and not data.in_chat:
        refuse_second_begin(tokenizer.backend, data.prompt, tokenizer.begin_ids)
    settings = None
    if task.writes_answers or objective.reads_answers:
        settings = generation_settings(tokenizer, config.generation, in_chat=data.in_chat)
    return Reader(task, objective, tokenizer, load_model_config(directory), config, settings)
