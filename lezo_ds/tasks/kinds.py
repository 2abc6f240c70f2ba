"""The four kinds of tasks, as MeZO trains and scores them (Malladi et al. 2023).

kind             is trained by                           is scored by
Classification   cross-entropy over candidates           the best candidate
MultipleChoice   teacher forcing on the gold candidate   the best candidate
Generation       teacher forcing on the gold text        the text that the model writes
Chat             teacher forcing on every turn of the    its tokens
assistant in a conversation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lezo_ds.tasks.base import (
    Encoder,
    Example,
    LossAndPredictions,
    Predicted,
    Prediction,
    Record,
    Scorer,
    Task,
    TokenCounts,
    with_fields,
)
from lezo_ds.tasks.conversations import ASSISTANT, SYSTEM_FIELDS, read_messages
from lezo_ds.tasks.template import field_value

TRIED_ANSWERS = ("", "A first answer, with words and 2 numbers: 3.")
"""What a user's reward or metric judges before weights are loaded."""


@dataclass(frozen=True, kw_only=True)
class _Choice(Task):
    """A task whose answer is one of the candidates of an example."""

    def reworded(self, record: Record) -> Example:
        # The right answer is one of the candidates, and its own text may be another now.
        return self.question(record)

    def worded(self, encoder: Encoder, example: Example) -> Example:
        return encoder.ask_in_chat(example)

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

    def score(self, scorer: Scorer) -> LossAndPredictions:
        return scorer.choice_loss(), scorer.choices()


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(_Choice):
    """Each record has candidates of its own."""

    kind = "multiple_choice"
    metrics = ("accuracy",)

    def score(self, scorer: Scorer) -> LossAndPredictions:
        return scorer.gold_loss(), scorer.choices()


@dataclass(frozen=True, kw_only=True)
class Generation(Task):
    """The model writes an answer."""

    metric: str = "f1"

    kind = "generation"
    metrics = ("f1", "exact_match")
    writes_answers = True

    def question(self, record: Record) -> Example:
        return replace(super().question(record), candidates=())

    def worded(self, encoder: Encoder, example: Example) -> Example:
        return encoder.end_answers(example)

    def score(self, scorer: Scorer) -> LossAndPredictions:
        return scorer.objective_loss(), scorer.answers()

    def predict(self, scorer: Scorer, examples: Sequence[Example]) -> list[Predicted]:
        del examples
        return [Predicted(answer) for answer in scorer.answers()]

    def tried_predictions(self, examples: Sequence[Example]) -> list[Prediction]:
        answers = [(*example.references, TRIED_ANSWERS[1])[0] for example in examples]
        return ["", *answers[1:]]  # models write empty answers, too


@dataclass(frozen=True, kw_only=True)
class Chat(Task):
    """A record has a conversation in its only field."""

    metric: str = "token_accuracy"
    answer_fields: tuple[str, ...] = ()

    kind = "chat"
    metrics = ("token_accuracy",)
    keeps_end = False
    reads_first_choices = True

    @property
    def field(self) -> str:
        """The field with the turns."""
        (field,) = self.fields
        return field

    @property
    def texts_read(self) -> tuple[str, ...]:
        return (self.field, *SYSTEM_FIELDS)

    @property
    def fix_without_answers(self) -> str:
        return (
            "correct the file; if a reward judges the answers, set "
            f"data.prompt={{{self.field}}} and data.chat_template=true instead of data.messages"
        )

    def unanswered(self) -> Task:
        return _Question(name=self.name, fields=self.fields, has_answers=False, chat=self)

    def score(self, scorer: Scorer) -> LossAndPredictions:
        return scorer.token_loss(), scorer.token_counts()

    def shown(self, example: Example, predicted: Any) -> str:
        del example
        return f"{predicted.right} of {predicted.total} tokens"

    def tried_predictions(self, examples: Sequence[Example]) -> list[Prediction]:
        return [TokenCounts(right=1, total=1)] * len(examples)


@dataclass(frozen=True, kw_only=True)
class _Question(Generation):
    """A conversation whose next turn the model writes.

    Attributes:
        chat: the task of conversations whose last turn is an answer.
    """

    chat: Chat
    answer_fields: tuple[str, ...] = ()

    @property
    def texts_read(self) -> tuple[str, ...]:
        return self.chat.texts_read

    def build_example(self, record: Record) -> Example:
        field = self.chat.field
        turns = field_value(record, field)
        messages = read_messages(record, field)
        num_read = len(messages)
        if messages[-1].role == ASSISTANT:
            num_read -= 1
        # An answer may have several turns of a file: a text and each call.
        while turns and len(read_messages(with_fields(record, {field: turns}), field)) > num_read:
            turns = turns[:-1]
        # The last turn is an answer that the model does not read.
        turns = [*turns, {"role": ASSISTANT, "content": "?"}]
        return self.chat.build_example(with_fields(record, {field: turns}))
