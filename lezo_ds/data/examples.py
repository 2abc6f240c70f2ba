"""Examples: a record as texts, and as token ids with masks of those that are learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lezo_ds.data.template import Record

Turn = dict[str, Any]
"""One turn of a conversation, as chat templates read it: role, content and further keys."""
ASSISTANT = "assistant"
TokenIds = tuple[int, ...]
"""The tokens of one sequence."""


@dataclass(frozen=True)
class Example:
    """One record as texts.

    Attributes:
        prompt: what the model reads.
        candidates: the possible continuations of the prompt, each with its leading space or
            newline. A generation task has only the gold text, or nothing if the record has none.
        label: index of the right candidate, which is the one to train on; None if there is none.
        index: number of the record in its file, from 0.
        references: every text that counts as right, if candidates[label] is not the only one.
        demonstrations: solved examples that the model reads before the prompt, each followed by a
            blank line.
        messages: the turns of a conversation, if the tokenizer's chat template writes the example.
        learned: the indices of the turns in `messages` that the model learns.
        record: all fields of the record, including those that the task does not read.
    """

    prompt: str
    candidates: tuple[str, ...]
    label: int | None
    index: int = 0
    references: tuple[str, ...] = ()
    demonstrations: str = ""
    messages: tuple[Turn, ...] = ()
    learned: tuple[int, ...] = ()
    record: Record = field(default_factory=dict, compare=False, repr=False)

    @property
    def gold_texts(self) -> tuple[str, ...]:
        """The right candidate, or nothing."""
        if self.label is None:
            return ()
        return (self.candidates[self.label],)

    @property
    def right_texts(self) -> tuple[str, ...]:
        """Every text that counts as right."""
        return self.references or self.gold_texts

    @property
    def asked(self) -> tuple[Turn, ...]:
        """The turns before the last one to learn, or all."""
        return self.messages[: self.learned[-1]] if self.learned else self.messages

    def at_turn(self, turn: int) -> Example:
        """Return the example of a conversation that ends with one turn, and learns only that."""
        answer = (self.messages[turn]["content"],)
        return replace(
            self,
            prompt=self.messages[turn - 1]["content"],
            candidates=answer,
            label=0,
            references=answer,
            messages=self.messages[: turn + 1],
            learned=(turn,),
        )


@dataclass(frozen=True)
class EncodedExample:
    """The candidates of one example as token sequences.

    Attributes:
        sequences: prompt and candidate for each candidate; empty if the record has no right answer.
        masks: for each sequence, which of its tokens belong to the candidate, or are learned.
        label: index of the right candidate; None if there is none.
        truncated: whether a sequence was cut.
    """

    sequences: tuple[TokenIds, ...]
    masks: tuple[tuple[bool, ...], ...]
    label: int | None
    truncated: bool = False

    def targets(self, candidate: int) -> list[int]:
        """Return the positions in a candidate's sequence of the tokens that belong to it."""
        return [place for place, is_own in enumerate(self.masks[candidate]) if is_own]

    @property
    def option_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence that belong to its candidate."""
        return tuple(map(sum, self.masks))

    @property
    def num_tokens(self) -> int:
        """Length of the longest sequence; 0 without sequences."""
        return max(map(len, self.sequences), default=0)

    @property
    def gold(self) -> int:
        """Index of the right candidate of a labeled example."""
        assert self.label is not None
        return self.label


class TokenCounts(NamedTuple):
    """Of the learned tokens of a conversation, how many the model predicts.

    Attributes:
        right: number of tokens that are the model's first choice.
        total: number of tokens.
    """

    right: int
    total: int


Prediction = int | float | str | TokenCounts
"""A model's prediction for an example: the index of a candidate, a number, an answer, or counts of
tokens."""


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
