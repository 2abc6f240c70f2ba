"""What a task is: data, not behaviour. Each task of the protocol is one `Task` in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Record = Mapping[str, Any]
"""One row of a data set, as its hub page describes it."""

TaskKind = Literal["classification", "multiple_choice", "generation"]
"""How a task is trained and scored (MeZO: Malladi et al. 2023).

classification: trained by cross-entropy over candidates, scored by the best candidate.
multiple_choice: trained by teacher forcing on the gold candidate, scored by the best candidate.
generation: trained by teacher forcing on the gold text, scored on what the model writes.
"""

Protocol = Literal["clean", "mezo"]
"""Whose split sizes: clean gives each task sizes that fit it, mezo those of MeZO's published scripts."""

Metric = Literal["accuracy", "f1"]


@dataclass(frozen=True)
class Example:
    """One record as text.

    Attributes:
        prompt: what the model reads first.
        candidates: the continuations it may choose from, leading space or newline included; for
            generation the gold text alone, with the newline that ends it.
        label: index of the right candidate, the one trained on; None if there is none.
        index: row of the record in its split, from 0.
        references: every text that counts as right, where candidates[label] is not the only one
            (ReCoRD's answers in the form of its candidates, the gold lists of SQuAD and DROP).
        null_prompt: the prompt emptied of its content, for calibration; None if the task has none.
    """

    prompt: str
    candidates: tuple[str, ...]
    label: int | None
    index: int
    references: tuple[str, ...] = ()
    null_prompt: str | None = None


@dataclass(frozen=True)
class SplitSizes:
    """How many examples are drawn when the user does not say."""

    num_train: int = 1000
    num_dev: int = 500
    num_test: int = 1000


@dataclass(frozen=True)
class Task:
    """Everything that tells one task from another.

    Attributes:
        name: what users call it, lower case.
        hub_id: data set on the Hugging Face hub that holds parquet, so that no script is run.
        hub_config: its configuration, None if it has only one.
        kind: how it is trained and scored.
        fields: every field `build_example` reads, with its type: str, int, bool or list[str]; dots lead
            into nested fields.
        build_example: (record, row in its split) -> Example.
        metric: what its score is called.
        sizes: default split sizes of the clean protocol; they fit the data.
        mezo_sizes: what MeZO's scripts ask for, whether there is so much or not.
        train_split: name of the split that train and dev are drawn from.
        validation_split: name of the split that test is drawn from.
    """

    name: str
    hub_id: str
    hub_config: str | None
    kind: TaskKind
    fields: Mapping[str, type]
    build_example: Callable[[Record, int], Example]
    metric: Metric = "accuracy"
    sizes: SplitSizes = SplitSizes()
    mezo_sizes: SplitSizes = SplitSizes()
    train_split: str = "train"
    validation_split: str = "validation"


def answer_example(prompt: str, answers: Sequence[str], index: int) -> Example:
    """Return an example of a task that generates: trained on the first answer, scored by all of them.

    Args:
        prompt: ends where the answer begins, without the space before it.
        answers: all that count as right; where there is none, neither has the example a label.
        index: row of the record in its split.
    """
    return Example(
        prompt=prompt,
        candidates=tuple(f" {answer}\n" for answer in answers[:1]),
        label=0 if answers else None,
        index=index,
        references=tuple(answers),
    )
