"""What a task is: where its records are, and all that its kind decides.

    record                      what a file or the hub holds: fields by name
      |  Task.example
    Example                     texts: a prompt, and the candidates or answers that follow it
      |  Task.worded            in the words of the recipe, such as a chat template's
      |  Task.encode
    EncodedExample              token ids
      |  Task.loss              the objective with which the task is trained
      |  Task.score             the predictions that a metric compares with the right answers
      |  Task.predict           what `lezo-ds predict` writes of a record
    numbers

This room has texts and token ids alone. What needs a tokenizer or a model is asked of an `Encoder`
or a `Scorer`, which lezo_ds/data passes in.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple
from typing import Protocol as Interface

Record = Mapping[str, Any]
"""One row of a data set."""


class ArrowRecord(dict[str, Any]):
    """A row of Arrow. Its structs have the keys of all rows, with null where this row has none.

    Attributes:
        class_names: by column, the names of the classes whose numbers it holds, as `datasets` has
            stored them.
    """

    class_names: Mapping[str, Sequence[str]] = MappingProxyType({})


def with_fields(record: Record, fields: Record) -> Record:
    """Return a record with other values of some fields. It stays a row of Arrow if it is one."""
    kind = ArrowRecord if isinstance(record, ArrowRecord) else dict
    return kind({**record, **fields})


Protocol = Literal["clean", "mezo"]
"""How examples are drawn and texts are cut.

clean: split sizes that fit each task.
mezo: what MeZO's scripts and code do (docs/protocol.md).
"""


class Message(NamedTuple):
    """One turn of a conversation.

    Attributes:
        role: system, user, assistant, or another one that the chat template knows, such as tool.
        content: the text of the turn.
        weight: 0 for a turn of the assistant that is context only, otherwise 1.
        others: what else the template may read, such as tool_calls.
    """

    role: str
    content: str
    weight: int = 1
    others: Mapping[str, Any] = {}  # no view of it: a metric of the user gets a deep copy

    @property
    def is_trained(self) -> bool:
        """Whether the model learns to write this turn."""
        return self.role == "assistant" and self.weight == 1

    def as_dict(self) -> dict[str, Any]:
        """Return the turn in transformers' layout."""
        others = copy.deepcopy(dict(self.others))
        return {"role": self.role, "content": self.content, **others}


Turns = tuple[Message, ...]
"""The turns of a conversation."""


@dataclass(frozen=True)
class Example:
    """One record as texts.

    Attributes:
        prompt: what the model reads.
        candidates: the possible continuations of the prompt, each with its leading space or
            newline. A generation task has only the gold text, with the newline that ends it, or
            nothing if the record has no gold text.
        label: index of the right candidate, which is the one to train on; None if there is none.
        index: row of the record in its split, from 0.
        references: every text that counts as right, if candidates[label] is not the only one.
        demonstrations: solved examples that the model reads before the prompt, each followed by a
            blank line.
        messages: the conversation, if the tokenizer's chat template writes the example. Its last
            turn is the gold text of the assistant, if there is one.
        is_written: whether a chat template has written the prompt, with all tokens that a text
            begins with.
        record: all fields of the record, including those that the task does not read.
        place: what messages call the record, such as "record 3 of the train split of custom
            (train.jsonl line 3)"; "" numbers it by its index.
    """

    prompt: str
    candidates: tuple[str, ...]
    label: int | None
    index: int = 0
    references: tuple[str, ...] = ()
    demonstrations: str = ""
    messages: Turns = ()
    is_written: bool = False
    record: Record = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False)

    @property
    def where(self) -> str:
        """What messages call the record."""
        return self.place or f"record {self.index + 1}"

    @property
    def gold_texts(self) -> tuple[str, ...]:
        """The right candidate, or nothing."""
        if self.label is None:
            return ()
        return (self.candidates[self.label],)


TokenIds = tuple[int, ...]
"""The tokens of one sequence."""


@dataclass(frozen=True)
class EncodedExample:
    """The candidates of one example as token sequences.

    Attributes:
        sequences: prompt and candidate for each candidate; empty if the record has no right
            answer.
        option_lengths: number of tokens of each sequence that belong to its candidate. They are at
            its end, or in `spans`.
        label: index of the right candidate; None if there is none.
        truncated: whether a sequence was cut.
        spans: the pairs (start, stop) of the assistant's turns in the only sequence of a
            conversation, in tokens; otherwise empty.
    """

    sequences: tuple[TokenIds, ...]
    option_lengths: tuple[int, ...]
    label: int | None
    truncated: bool
    spans: tuple[tuple[int, int], ...] = ()

    def targets(self, candidate: int) -> list[int]:
        """Return the positions in a candidate's sequence of the tokens that belong to it."""
        if self.spans:
            return [position for start, stop in self.spans for position in range(start, stop)]
        length = len(self.sequences[candidate])
        return list(range(length - self.option_lengths[candidate], length))

    @property
    def num_tokens(self) -> int:
        """Length of the longest sequence; 0 without sequences."""
        return max(map(len, self.sequences), default=0)

    @property
    def gold(self) -> int:
        """Index of the right candidate of a labeled example."""
        assert self.label is not None
        return self.label

    def num_gold_tokens(self) -> int:
        """Return the number of tokens of the right candidate."""
        return self.option_lengths[self.gold]


class TokenCounts(NamedTuple):
    """Of the tokens in the assistant's turns of a conversation, how many the model predicts.

    Attributes:
        right: number of tokens that are the model's first choice.
        total: number of tokens.
    """

    right: int
    total: int


Prediction = int | float | str | TokenCounts
"""What a model makes of an example: the index of a candidate, a number, an answer, or counts of
tokens."""

LossAndPredictions = tuple[float, Sequence[Prediction]]
"""The mean of a task's own loss over a split, and a prediction for each example."""


class Predicted(NamedTuple):
    """What `lezo-ds predict` writes of a record.

    Attributes:
        answer: what the record holds for the best candidate, or the text that the model wrote.
        probability: of this candidate among all; None for a text.
        by_name: the probability of each candidate, by what records hold for it.
    """

    answer: Any
    probability: float | None = None
    by_name: Mapping[Any, float] = {}


class Encoder(Interface):
    """Writes examples in the words that a recipe asks for, and turns them into token ids."""

    def ask_in_chat(self, example: Example) -> Example:
        """Return an example whose candidates are answers in a chat, if the recipe wants one."""

    def end_answers(self, example: Example) -> Example:
        """Return an example whose gold text ends with what ends generated ones."""

    def encode_candidates(self, example: Example) -> EncodedExample:
        """Return each candidate after the prompt."""

    def encode_conversation(self, example: Example, *, keep_end: bool) -> EncodedExample:
        """Return the turns of a conversation; one that is too long keeps its end or its start."""


class Scorer(Interface):
    """What a model makes of the examples of a split. Each method is a collective."""

    def choices(self) -> Sequence[int]:
        """Return the best candidate of each example: that of the largest mean log-probability."""

    def choice_probabilities(self) -> Sequence[Sequence[float]]:
        """Return the softmax of the scores of each example's candidates."""

    def choice_loss(self) -> float:
        """Return the mean cross-entropy over candidates."""

    def gold_loss(self) -> float:
        """Return the mean loss of the right candidates, of many candidates that were scored."""

    def answers(self) -> Sequence[str]:
        """Return what the model writes after each prompt."""

    def objective_loss(self) -> float:
        """Return the mean of the training objective, by forward passes of its own."""

    def token_counts(self) -> Sequence[TokenCounts]:
        """Return how many tokens of each conversation's turns are the model's first choice."""

    def token_loss(self) -> float:
        """Return the mean loss of these tokens."""


@dataclass(frozen=True)
class SplitSizes:
    """Number of examples in each split, unless the user sets one."""

    num_train: int = 1000
    num_dev: int = 500
    num_test: int = 1000


_NO_ANSWER: Mapping[type, object] = {int: -1, bool: False, list[str]: []}
"""Values without meaning, by the type of the field. Others are ""."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Where records are, and what becomes of one.

    A task of your own is a subclass of one of the four kinds: `Classification`, `MultipleChoice`,
    `Generation` and `Chat`. A new kind is a subclass of this class. data.task=package.module:NAME
    names an instance, or a class whose fields all have defaults.

    Attributes:
        name: in lower case.
        fields: every field that `build_example` reads, with its type: str, int, bool, list[str], or
            object for any. A dot leads into a nested field.
        hub_id: data set on the Hugging Face hub, as parquet: no script is run. None if only files
            have the records.
        hub_config: configuration of that data set; None if it has only one.
        has_answers: whether records have right answers. If not, they are not read, and a reward
            alone judges the model's answers.
        metric: one of `metrics`, `lezo_ds.tasks.metrics.REWARD`, or package.module:function.
        answer_fields: the fields that hold nothing but the right answer.
        labels: what records hold for the candidates; () if their texts.
        sizes: default split sizes of the clean protocol. The data set is large enough for them.
        mezo_sizes: split sizes in MeZO's scripts, which may ask for more than the data set has.

    What a kind decides, besides the methods:

    Attributes:
        kind: what messages call it.
        metrics: the names in `lezo_ds.tasks.metrics.METRICS` that can score it.
        loss: a name in `lezo_ds.data.objectives.LOSSES`, or package.module:OBJECTIVE.
        has_classes: whether all examples have the same candidates: labels, in other words.
        writes_answers: whether the model writes answers to be scored.
        keeps_end: whether a text that is too long is cut on the left, and not at its end.
        reads_first_choices: whether a score reads all logits of a token, not only the right one's.
    """

    name: str
    fields: Mapping[str, type]
    hub_id: str | None = None
    hub_config: str | None = None
    has_answers: bool = True
    metric: str = "accuracy"
    answer_fields: tuple[str, ...] = ("label",)
    labels: Sequence[object] = ()
    sizes: SplitSizes = SplitSizes()
    mezo_sizes: SplitSizes = SplitSizes()

    kind: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[str] = "tokens"
    has_classes: ClassVar[bool] = False
    writes_answers: ClassVar[bool] = False
    keeps_end: ClassVar[bool] = True
    reads_first_choices: ClassVar[bool] = False

    def build_example(self, record: Record) -> Example:
        """Return the example of a record. A subclass has this method."""
        raise NotImplementedError

    def survey(self, records: Sequence[Record]) -> Task:
        """Return the task once it has seen all records of a run, which may lack fields.

        It is another one where a record alone does not say how it is meant. It may raise a
        UserError.
        """
        del records
        return self

    def example(self, record: Record) -> Example:
        """Return the example of a record, with its right answer if the task has answers."""
        return self.build_example(record) if self.has_answers else self.question(record)

    def question(self, record: Record) -> Example:
        """Return the example of a record whose right answer is not read: a blank is in its place.

        The record need not have the field.
        """
        blanks = {
            name: _NO_ANSWER.get(self.fields.get(name, object), "") for name in self.answer_fields
        }
        example = self.build_example(with_fields(record, blanks))
        return replace(example, label=None, references=())

    def reworded(self, record: Record) -> Example:
        """Return the example of a record in other spellings. Its label is not read."""
        return self.example(record)

    def unanswered(self) -> Task:
        """Return the task of records without right answers, for the model to answer."""
        fields = {
            name: kind for name, kind in self.fields.items() if name not in self.answer_fields
        }
        return replace(self, fields=fields, has_answers=False)

    @property
    def texts_read(self) -> tuple[str, ...]:
        """The fields whose texts the model may read, if a record has them."""
        return tuple(self.fields)

    @property
    def fix_without_answers(self) -> str:
        """What helps if no record has an answer."""
        return "correct the file"

    def names(self, example: Example) -> Sequence[Any]:
        """Return what the records hold for the candidates of an example, or else their texts."""
        return self.labels or [text.strip() for text in example.candidates]

    def worded(self, encoder: Encoder, example: Example) -> Example:
        """Return an example in the words that the recipe asks for."""
        del encoder
        return example

    def encode(self, encoder: Encoder, example: Example) -> EncodedExample:
        """Return an example as token ids."""
        if example.messages and self.has_answers:
            return encoder.encode_conversation(example, keep_end=self.keeps_end)
        return encoder.encode_candidates(example)

    def score(self, scorer: Scorer) -> LossAndPredictions:
        """Return the mean of the task's own loss over a split, and a prediction for each example.

        A collective.
        """
        raise NotImplementedError

    def predict(self, scorer: Scorer, examples: Sequence[Example]) -> list[Predicted]:
        """Return what the model makes of examples without right answers. A collective."""
        raise NotImplementedError

    def shown(self, example: Example, predicted: Prediction) -> str:
        """Return a prediction as a reader sees it."""
        del example
        return str(predicted).strip()

    def tried_predictions(self, examples: Sequence[Example]) -> list[Prediction]:
        """Return predictions, right ones where there are any, to try a user's metric on."""
        raise NotImplementedError
