"""The definition of a task: data only, no behavior. Each task of the protocol is one `Task` in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Record = Mapping[str, Any]
"""One row of a data set, with the fields that its hub page describes."""

TaskKind = Literal["classification", "multiple_choice", "generation", "chat"]
"""How a task is trained and scored (MeZO: Malladi et al. 2023).

classification: trained by cross-entropy over candidates, scored by the best candidate.
multiple_choice: trained by teacher forcing on the gold candidate, scored by the best candidate.
generation: trained by teacher forcing on the gold text, scored on the text that the model generates.
chat: trained by teacher forcing on every turn of the assistant in a conversation, scored on their tokens.
"""

Protocol = Literal["clean", "mezo"]
"""Default split sizes: clean uses sizes that fit each task, mezo uses those of MeZO's published scripts."""


class Message(NamedTuple):
    """One turn of a conversation.

    Attributes:
        role: system, user or assistant.
        content: what is said.
    """

    role: str
    content: str


@dataclass(frozen=True)
class Example:
    """One record as text.

    Attributes:
        prompt: the text that the model reads first.
        candidates: the possible continuations, each with its leading space or newline. A generation task
            has only the gold text here, with the newline that ends it, or nothing if it has no gold texts.
        label: index of the right candidate, which is the one to train on; None if there is none.
        index: row of the record in its split, from 0.
        references: every text that counts as right, if candidates[label] is not the only one (ReCoRD's
            answers in the form of its candidates, the gold answers of SQuAD and DROP).
        null_prompt: the prompt without its content, for calibration; None if the task has none.
        demonstrations: solved examples that the model reads before the prompt, each followed by a blank line.
        messages: the conversation, if the tokenizer's chat template writes the example. It ends with a turn
            of the assistant, whose content is candidates[label], if the record has a right answer. The prompt
            is the turn before it.
        place: where the record is, such as " (train.jsonl line 3)"; "" if that is not known.
        record: the record with all its fields, also those that the task does not read.
    """

    prompt: str
    candidates: tuple[str, ...]
    label: int | None
    index: int
    references: tuple[str, ...] = ()
    null_prompt: str | None = None
    demonstrations: str = ""
    messages: tuple[Message, ...] = ()
    record: Record = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False)

    @property
    def where(self) -> str:
        """The record, as an error names it: by its number in its split, and by its place."""
        return f"record {self.index + 1}{self.place}"

    @property
    def solution(self) -> str:
        """The prompt with its right candidate, without white space at both ends; the label must be known."""
        assert self.label is not None
        return (self.prompt + self.candidates[self.label]).strip()


@dataclass(frozen=True)
class SplitSizes:
    """Number of examples in each split, unless the user sets one."""

    num_train: int = 1000
    num_dev: int = 500
    num_test: int = 1000


@dataclass(frozen=True)
class Task:
    """Everything that is specific to one task.

    Attributes:
        name: the name in configurations, lower case.
        hub_id: data set on the Hugging Face hub. It must hold parquet files, because no script is run. None
            if the task's records are only in files of the user.
        hub_config: configuration of that data set, None if it has only one.
        kind: how the task is trained and scored.
        fields: every field that `build_example` reads, with its type: str, int, bool or list[str]; object
            for any type. A dot leads into a nested field.
        build_example: function (record, row in its split) -> Example.
        has_answers: whether records have right answers. If not, a reward alone judges the model's answers.
        metric: name of the score, a key of `lezo_ds.tasks.metrics.METRICS`.
        sizes: default split sizes of the clean protocol. The data set is large enough for them.
        mezo_sizes: split sizes in MeZO's scripts, which may ask for more than the data set has.
        train_split: name of the split that train and dev are drawn from.
        validation_split: name of the split that test is drawn from.
    """

    name: str
    hub_id: str | None
    hub_config: str | None
    kind: TaskKind
    fields: Mapping[str, type]
    build_example: Callable[[Record, int], Example]
    has_answers: bool = True
    metric: str = "accuracy"
    sizes: SplitSizes = SplitSizes()
    mezo_sizes: SplitSizes = SplitSizes()
    train_split: str = "train"
    validation_split: str = "validation"


def answer_example(prompt: str, answers: Sequence[str], index: int) -> Example:
    """Return an example of a generation task. It trains on the first answer and is scored against all.

    Args:
        prompt: ends where the answer begins, without the space before the answer.
        answers: all answers that count as right. If there is none, the example has no label.
        index: row of the record in its split.
    """
    return Example(
        prompt=prompt,
        candidates=tuple(f" {answer}\n" for answer in answers[:1]),
        label=0 if answers else None,
        index=index,
        references=tuple(answers),
    )
