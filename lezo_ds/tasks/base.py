"""What a task is: data and one function, record -> example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Record = Mapping[str, Any]
"""One row of a data set."""

TaskKind = Literal["classification", "multiple_choice", "generation", "chat"]
"""How a task is trained and scored (MeZO: Malladi et al. 2023).

classification: trained by cross-entropy over candidates, scored by the best candidate.
multiple_choice: trained by teacher forcing on the gold candidate, scored by the best candidate.
generation: trained by teacher forcing on the gold text, scored on the text that the model generates.
chat: trained by teacher forcing on every turn of the assistant in a conversation, scored on their tokens.
"""

Protocol = Literal["clean", "mezo"]
"""mezo does all that MeZO's scripts and code do; clean has split sizes that fit each task."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """system, user, assistant, or another one that the chat template knows, such as tool."""
    content: str
    weight: int = 1
    """0 for a turn of the assistant that is context only, and else 1."""
    others: Mapping[str, Any] = MappingProxyType({})
    """What else the template may read, such as tool_calls."""

    @property
    def is_trained(self) -> bool:
        return self.role == "assistant" and self.weight == 1


@dataclass(frozen=True)
class Example:
    """One record as text."""

    prompt: str
    candidates: tuple[str, ...]
    """The possible continuations of the prompt, each with its leading space or newline. A generation task has
    only the gold text, with the newline that ends it, or nothing if it has no gold texts."""
    label: int | None
    """Index of the right candidate, which is the one to train on; None if there is none."""
    index: int
    """Row of the record in its split, from 0."""
    references: tuple[str, ...] = ()
    """Every text that counts as right, if candidates[label] is not the only one."""
    demonstrations: str = ""
    """Solved examples that the model reads before the prompt, each followed by a blank line."""
    messages: tuple[Message, ...] = ()
    """The conversation, if the tokenizer's chat template writes the example. Its last turn is the gold text
    of the assistant, if there is one."""
    record: Record = field(default_factory=dict, compare=False, repr=False)
    """All fields of the record, also those that the task does not read."""
    place: str = field(default="", compare=False)
    """Where the record is, such as " (train.jsonl line 3)"; "" if unknown."""

    @property
    def where(self) -> str:
        return f"record {self.index + 1}{self.place}"

    @property
    def gold_texts(self) -> tuple[str, ...]:
        return () if self.label is None else (self.candidates[self.label],)


@dataclass(frozen=True)
class SplitSizes:
    """Number of examples in each split, unless the user sets one."""

    num_train: int = 1000
    num_dev: int = 500
    num_test: int = 1000


@dataclass(frozen=True)
class Task:
    """Where the records are, and how one becomes text. data.task=package.module:NAME names your own task."""

    name: str
    """Lower case."""
    hub_id: str | None
    """Data set on the Hugging Face hub, as parquet: no script is run. None if only files have the records."""
    hub_config: str | None
    """Configuration of that data set; None if it has only one."""
    kind: TaskKind
    fields: Mapping[str, type]
    """Every field that `build_example` reads, with its type: str, int, bool, list[str], or object for any.
    A dot leads into a nested field."""
    build_example: Callable[[Record, int], Example]
    """(record, row in its split) -> Example."""
    has_answers: bool = True
    """Whether records have right answers. If not, a reward alone judges the model's answers."""
    metric: str = "accuracy"
    """A name in `lezo_ds.tasks.metrics.METRICS`, or package.module:function."""
    answer_fields: tuple[str, ...] = ("label",)
    """The fields that hold nothing but the right answer."""
    labels: Sequence[object] = ()
    """What records hold for the candidates; () if their texts."""
    sizes: SplitSizes = SplitSizes()
    """Default split sizes of the clean protocol. The data set is large enough for them."""
    mezo_sizes: SplitSizes = SplitSizes()
    """Split sizes in MeZO's scripts, which may ask for more than the data set has."""
