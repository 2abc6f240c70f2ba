"""What a task is: data and one function, record -> example.

record                          what a file or the hub holds: fields by name
  |  Task.build_example
Example                         texts: a prompt, and the candidates or answers that follow it
  |  lezo_ds/data/encoding.py
tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Record = Mapping[str, Any]
"""One row of a data set."""


class ArrowRecord(dict[str, Any]):
    """A row of Arrow. Its structs have the keys of all rows, with null where this row has none."""


def with_fields(record: Record, fields: Record) -> Record:
    """Return a record with other values of some fields. It stays a row of Arrow if it is one."""
    kind = ArrowRecord if isinstance(record, ArrowRecord) else dict
    return kind({**record, **fields})


TaskKind = Literal["classification", "multiple_choice", "generation", "chat"]
"""How a task is trained and scored (MeZO: Malladi et al. 2023).

classification: trained by cross-entropy over candidates, scored by the best candidate.
multiple_choice: trained by teacher forcing on the gold candidate, scored by the best candidate.
generation: trained by teacher forcing on the gold text, scored on the text that the model
generates. chat: trained by teacher forcing on every turn of the assistant in a conversation, scored
on their
    tokens.
"""

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
    index: int
    references: tuple[str, ...] = ()
    demonstrations: str = ""
    messages: tuple[Message, ...] = ()
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


BuildExample = Callable[[Record, int], Example]
"""(record, index) -> Example. A run passes the index 0, and sets Example.index when it knows the
row of the record in its split."""

Survey = Callable[[Sequence[Record]], BuildExample]
"""(all records of a run) -> what builds their examples. It may raise a UserError."""


@dataclass(frozen=True)
class SplitSizes:
    """Number of examples in each split, unless the user sets one."""

    num_train: int = 1000
    num_dev: int = 500
    num_test: int = 1000


@dataclass(frozen=True)
class Task:
    """Where records are, and how one becomes texts. data.task=package.module:NAME names your own.

    Attributes:
        name: in lower case.
        hub_id: data set on the Hugging Face hub, as parquet: no script is run. None if only files
            have the records.
        hub_config: configuration of that data set; None if it has only one.
        kind: how the task is trained and scored.
        fields: every field that `build_example` reads, with its type: str, int, bool, list[str], or
            object for any. A dot leads into a nested field.
        build_example: makes an example of a record.
        survey: looks at all records before any becomes an example, where one record alone does not
            say how it is meant. Records may lack fields. None: each record says all.
        has_answers: whether records have right answers. If not, a reward alone judges the model's
            answers.
        metric: a name in `lezo_ds.tasks.metrics.METRICS`, or package.module:function.
        answer_fields: the fields that hold nothing but the right answer.
        labels: what records hold for the candidates; () if their texts.
        sizes: default split sizes of the clean protocol. The data set is large enough for them.
        mezo_sizes: split sizes in MeZO's scripts, which may ask for more than the data set has.
    """

    name: str
    hub_id: str | None
    hub_config: str | None
    kind: TaskKind
    fields: Mapping[str, type]
    build_example: BuildExample
    survey: Survey | None = None
    has_answers: bool = True
    metric: str = "accuracy"
    answer_fields: tuple[str, ...] = ("label",)
    labels: Sequence[object] = ()
    sizes: SplitSizes = SplitSizes()
    mezo_sizes: SplitSizes = SplitSizes()
