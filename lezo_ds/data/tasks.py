"""Tasks: what becomes of a record, as texts, as token ids and as a score.

    record                      values by column (records.py)
      |  Task.example
    Example                     texts: a prompt, and the candidates or answers that follow it
      |  Task.encode            a tokenizer and a recipe say how (encode.py, chat.py)
    EncodedExample              token ids, and masks of those that are learned
      |  Task.loss              the objective with which the task is trained (objectives.py)
      |  Task.score             the predictions that a metric compares with the right answers
      |  Task.predict           what `lezo-ds predict` writes of a record

The four kinds of tasks, as MeZO trains and scores them (Malladi et al. 2023):

    kind             is trained by                           is scored by
    Classification   cross-entropy over candidates           the best candidate
    MultipleChoice   teacher forcing on the gold candidate   the best candidate
    Generation       teacher forcing on the gold text        the text that the model writes
    Chat             teacher forcing on learned turns        its tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Protocol

from lezo_ds.config import RunConfig
from lezo_ds.data.chat import encode_choices, encode_turns
from lezo_ds.data.encode import PromptTokenizer, encode_candidates
from lezo_ds.data.examples import EncodedExample, Example, Predicted, Prediction, TokenCounts
from lezo_ds.data.template import Record, field_value, shown
from lezo_ds.errors import UserError

TRIED_ANSWERS = ("", "A first answer, with words and 2 numbers: 3.")
"""What a user's reward or metric judges before weights are loaded."""


class Scorer(Protocol):
    """A model's outputs for the examples of a split; `lezo_ds.data.score.Scorer` computes them."""

    def choices(self) -> list[int]:
        """Return the best candidate of each example."""

    def choice_probabilities(self) -> list[list[float]]:
        """Return the probability of each candidate among those of its example."""

    def choice_loss(self) -> float:
        """Return the mean cross-entropy over candidates."""

    def gold_loss(self) -> float:
        """Return the mean loss of the right candidates' tokens."""

    def answers(self) -> list[str]:
        """Return what the model writes after each prompt."""

    def objective_loss(self) -> float:
        """Return the mean of the training objective."""

    def token_loss(self) -> float:
        """Return the mean loss of the learned tokens of conversations."""

    def token_counts(self) -> list[TokenCounts]:
        """Return how many of them are the model's first choice."""


@dataclass(frozen=True)
class SplitSizes:
    """Number of examples in each split, unless the user sets one. None takes all or a fifth."""

    num_train: int | None = 1000
    num_dev: int | None = 500
    num_test: int | None = 1000


_NO_ANSWER: Mapping[type, object] = {int: -1, bool: False, list: []}
"""Values without meaning, by the type of the field. Others are ""."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Where records are, and what becomes of one.

    A task of your own is a subclass of one of the four kinds: `Classification`, `MultipleChoice`,
    `Generation` and `Chat`. A new kind is a subclass of this class. data.task=package.module:NAME
    names an instance, or a class whose fields all have defaults.

    Attributes:
        name: in lower case.
        fields: every field that `build_example` reads, with its type: str, int, bool, list, or
            object for any. A dot leads into a nested field.
        hub_id: data set on the Hugging Face hub, as parquet: no script is run. None if only files
            have the records.
        hub_config: configuration of that data set; None if it has only one.
        has_answers: whether records have right answers. If not, they are not read, and a reward
            alone judges the model's answers.
        metric: one of `metrics`, `lezo_ds.data.metrics.REWARD`, or package.module:function.
        answer_fields: the fields that hold nothing but the right answer.
        labels: what records hold for the candidates; () if their texts.
        sizes: default split sizes of the clean protocol.
        mezo_sizes: split sizes in MeZO's scripts, which may ask for more than the data set has.
        keeps_shares: whether splits that are drawn have about the same share of every label.

    What a kind decides, besides the methods:

    Attributes:
        kind: what messages call it.
        metrics: the names in `lezo_ds.data.metrics.METRICS` that can score it.
        loss: a name in `lezo_ds.data.objectives.LOSSES`, or package.module:OBJECTIVE.
        has_classes: whether all examples have the same candidates: labels, in other words.
        writes_answers: whether the model writes answers to be scored.
        reads_first_choices: whether a score reads all logits of a token, not only the right one's.
    """

    name: str
    fields: Mapping[str, type] = field(default_factory=dict)
    hub_id: str | None = None
    hub_config: str | None = None
    has_answers: bool = True
    metric: str = "accuracy"
    answer_fields: tuple[str, ...] = ("label",)
    labels: Sequence[object] = ()
    sizes: SplitSizes = SplitSizes()
    mezo_sizes: SplitSizes = SplitSizes()
    keeps_shares: bool = False

    kind: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[str] = "tokens"
    has_classes: ClassVar[bool] = False
    writes_answers: ClassVar[bool] = False
    reads_first_choices: ClassVar[bool] = False

    def build_example(self, record: Record) -> Example:
        """Return the example of a record. A subclass has this method."""
        raise NotImplementedError

    def example(self, record: Record) -> Example:
        """Return the example of a record, with the record.

        Raises:
            UserError: the record does not fit the task.
        """
        if not self.has_answers:
            blanks = {
                name: _NO_ANSWER.get(self.fields.get(name, object), "")
                for name in self.answer_fields
            }
            record = {**record, **blanks}  # which need not have an answer
        for name, kind in self.fields.items():
            value = field_value(record, name)
            is_truth_for_number = kind is int and isinstance(value, bool)
            if not isinstance(value, kind) or is_truth_for_number:
                raise UserError(
                    f"column `{name}` is {shown(value)}, not of type {kind.__name__}",
                    fix=f"use the types of {self.hub_id or 'the task'}",
                )
        try:
            example = self.build_example(record)
            _check_texts(example)
            if not self.has_answers:
                example = self.without_answer(example)
            if example.label is not None and not 0 <= example.label < len(example.candidates):
                raise UserError(
                    f"the label is {example.label}, not 0 to {len(example.candidates) - 1}",
                    fix="remove records without a label (-1 in the test splits of the hub)",
                )
        except UserError:
            raise
        except Exception as error:  # raised by a user-defined task
            raise UserError(
                f"it does not fit the task {self.name}: {type(error).__name__}: {error}",
                fix=f"correct the record, or build_example of {self.name}",
            ) from error
        return replace(example, record=record)

    def without_answer(self, example: Example) -> Example:
        """Return an example without its right answer."""
        return replace(example, label=None, references=())

    def unanswered(self) -> Task:
        """Return the task of records without right answers, for the model to answer."""
        return replace(self, has_answers=False)

    def names(self, example: Example) -> Sequence[Any]:
        """Return what the records hold for the candidates of an example, or else their texts."""
        return self.labels or [text.strip() for text in example.candidates]

    def encode(
        self, tokenizer: PromptTokenizer, config: RunConfig, example: Example
    ) -> list[EncodedExample]:
        """Return an example as token ids: one sequence for each candidate."""
        return [encode_candidates(tokenizer, example, config.data.max_length)]

    def score(self, scorer: Scorer) -> tuple[float, Sequence[Prediction]]:
        """Return the mean of the task's own loss over a split, and a prediction for each example.

        A collective.
        """
        raise NotImplementedError

    def predict(self, scorer: Scorer, examples: Sequence[Example]) -> list[Predicted]:
        """Return the model's predictions for examples without right answers. A collective."""
        raise NotImplementedError

    def shown(self, example: Example, predicted: Prediction) -> str:
        """Return a prediction as a reader sees it."""
        del example
        return str(predicted).strip()

    def tried_predictions(self, examples: Sequence[Example]) -> list[Prediction]:
        """Return predictions, right ones where there are any, to try a user's metric on."""
        raise NotImplementedError


def _check_texts(example: Example) -> None:
    """Raise TypeError if an example has other values than texts, or a text for a tuple of texts."""
    several = (example.candidates, example.references)
    texts = [example.prompt, *chain(*several)]
    is_one = any(isinstance(each, str) for each in several)
    if is_one or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            "an Example has a text as its prompt, and tuples of texts as candidates and references"
        )


@dataclass(frozen=True, kw_only=True)
class _Choice(Task):
    """A task whose answer is one of the candidates of an example."""

    def encode(
        self, tokenizer: PromptTokenizer, config: RunConfig, example: Example
    ) -> list[EncodedExample]:
        if not config.data.chat_template:
            return super().encode(tokenizer, config, example)
        return [encode_choices(tokenizer, config, example)]

    def predict(self, scorer: Scorer, examples: Sequence[Example]) -> list[Predicted]:
        rows = []
        for example, choice, shares in zip(
            examples, scorer.choices(), scorer.choice_probabilities(), strict=True
        ):
            names = self.names(example)
            # Shares beyond the candidates of an example are 0.
            by_name = dict(zip(names, shares, strict=False))
            rows.append(Predicted(names[choice], shares[choice], by_name))
        return rows

    def shown(self, example: Example, predicted: Any) -> str:
        text: str = example.candidates[predicted]
        return text.strip()

    def tried_predictions(self, examples: Sequence[Example]) -> list[Prediction]:
        return [example.label or 0 for example in examples]


@dataclass(frozen=True, kw_only=True)
class Classification(_Choice):
    """All records have the same candidates: labels."""

    kind = "classification"
    metrics = ("accuracy", "macro_f1")
    loss = "candidates"
    has_classes = True

    def score(self, scorer: Scorer) -> tuple[float, Sequence[Prediction]]:
        return scorer.choice_loss(), scorer.choices()


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(_Choice):
    """Each record has candidates of its own."""

    kind = "multiple_choice"
    metrics = ("accuracy",)

    def score(self, scorer: Scorer) -> tuple[float, Sequence[Prediction]]:
        return scorer.gold_loss(), scorer.choices()


@dataclass(frozen=True, kw_only=True)
class Generation(Task):
    """The model writes an answer."""

    metric: str = "f1"

    kind = "generation"
    metrics = ("f1", "exact_match")
    writes_answers = True

    def without_answer(self, example: Example) -> Example:
        without = super().without_answer(example)
        messages = without.messages[: example.learned[0]] if example.learned else without.messages
        return replace(without, candidates=(), messages=messages, learned=())

    def encode(
        self, tokenizer: PromptTokenizer, config: RunConfig, example: Example
    ) -> list[EncodedExample]:
        if example.learned:
            return encode_turns(tokenizer, config, example)
        stop = config.generation.stop
        if stop is not None:  # the gold text ends with what ends generated ones, if not a newline
            ending = stop[0] if len(stop) == 1 else tokenizer.end_text
            candidates = [text.removesuffix("\n") + ending for text in example.candidates]
            example = replace(example, candidates=tuple(candidates))
        return super().encode(tokenizer, config, example)

    def score(self, scorer: Scorer) -> tuple[float, Sequence[Prediction]]:
        return scorer.objective_loss(), scorer.answers()

    def predict(self, scorer: Scorer, examples: Sequence[Example]) -> list[Predicted]:
        del examples
        return [Predicted(answer) for answer in scorer.answers()]

    def tried_predictions(self, examples: Sequence[Example]) -> list[Prediction]:
        answers = [(*example.right_texts, TRIED_ANSWERS[1])[0] for example in examples]
        return ["", *answers[1:]]  # models write empty answers, too


@dataclass(frozen=True, kw_only=True)
class Chat(Task):
    """A record has a conversation in its only field."""

    metric: str = "token_accuracy"
    answer_fields: tuple[str, ...] = ()

    kind = "chat"
    metrics = ("token_accuracy",)
    reads_first_choices = True

    def encode(
        self, tokenizer: PromptTokenizer, config: RunConfig, example: Example
    ) -> list[EncodedExample]:
        return encode_turns(tokenizer, config, example)

    def score(self, scorer: Scorer) -> tuple[float, Sequence[Prediction]]:
        return scorer.token_loss(), scorer.token_counts()

    def shown(self, example: Example, predicted: Any) -> str:
        del example
        return f"{predicted.right} of {predicted.total} tokens"

    def tried_predictions(self, examples: Sequence[Example]) -> list[Prediction]:
        return [TokenCounts(right=1, total=1)] * len(examples)
