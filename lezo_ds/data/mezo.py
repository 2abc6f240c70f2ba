"""The eleven tasks of the papers, with the prompts and verbalizers of MeZO (Malladi et al. 2023).

The `fields` of a task are those of its data set on the Hugging Face hub. A file of the same task
has the same fields. Texts follow MeZO's code to the character: what a prompt strips, what it adds,
and where the space or newline before a candidate stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lezo_ds.data.examples import Example
from lezo_ds.data.tasks import Classification, Generation, MultipleChoice, SplitSizes, Task
from lezo_ds.data.template import Record, Template, field_value, parse_template
from lezo_ds.registry import Registry

TASKS: Registry[Task] = Registry("task", "data.task", kind=Task)

_SUPER_GLUE = "aps/super_glue"


def _add(
    kind: Callable[..., Task],
    name: str,
    hub_id: str,
    prompt: str,
    answers: dict[str, type],
    **others: Any,
) -> None:
    """Register a task of a kind whose prompt is a template.

    Its fields are those of the template, which have texts, and those of its answers, with their
    types. `others` are its further attributes.
    """
    template = parse_template(name, prompt)
    task = kind(
        name=name,
        hub_id=hub_id,
        fields=dict.fromkeys(template.fields, str) | answers,
        answer_fields=tuple(answers),
        prompt=template,
        **others,
    )
    TASKS.add(name, task)


@dataclass(frozen=True, kw_only=True)
class _Labeled(Classification):
    """A classification whose field "label" is the index of the right candidate.

    Attributes:
        prompt: template of the prompt.
        candidates: the texts of the labels 0, 1, ..., with the space before them.
        change: prepares a record for the template; None changes nothing.
    """

    prompt: Template
    candidates: tuple[str, ...]
    change: Callable[[Record], Record] | None = None

    def build_example(self, record: Record) -> Example:
        changed = record if self.change is None else self.change(record)
        return Example(self.prompt.fill(changed), self.candidates, record["label"])


def _labeled(
    name: str,
    hub_id: str,
    hub_config: str,
    prompt: str,
    candidates: tuple[str, ...],
    **others: Any,
) -> None:
    """Register a `_Labeled` task. `others` are further attributes."""
    _add(
        _Labeled,
        name,
        hub_id,
        prompt,
        answers={"label": int},
        hub_config=hub_config,
        candidates=candidates,
        labels=range(len(candidates)),
        **others,
    )


@dataclass(frozen=True, kw_only=True)
class _Answered(Generation):
    """A question with several right answers, the first of which is trained on.

    Attributes:
        prompt: template of the prompt.
    """

    prompt: Template

    def build_example(self, record: Record) -> Example:
        filled = self.prompt.fill({**record, "question": record["question"].strip()})
        right = tuple(field_value(record, self.answer_fields[0]))
        if not right:
            return Example(filled, (), None)
        return Example(filled, (f" {right[0]}\n",), 0, references=right)


@dataclass(frozen=True, kw_only=True)
class _BoolQ(Classification):
    """A question, which the hub has in lower case and without its mark."""

    def build_example(self, record: Record) -> Example:
        question = record["question"]
        question = question[:1].upper() + question[1:].removesuffix("?") + "?"
        label = 0 if record["answer"] else 1
        return Example(f"{record['passage']} {question}\n", ("Yes", "No"), label)


@dataclass(frozen=True, kw_only=True)
class _Copa(MultipleChoice):
    """A premise with two choices, each its effect or its cause."""

    def build_example(self, record: Record) -> Example:
        premise = record["premise"].rstrip().removesuffix(".")
        conjunction = {"effect": " so ", "cause": " because "}[record["question"]]
        candidates = (_continued(record["choice1"]), _continued(record["choice2"]))
        return Example(premise + conjunction, candidates, record["label"])


def _continued(choice: str) -> str:
    """Return a choice as it follows a conjunction: its first word in lower case, but I stays."""
    first, space, others = choice.partition(" ")
    if first != "I":
        first = first.lower()
    return first + space + others


@dataclass(frozen=True, kw_only=True)
class _Record(MultipleChoice):
    """A query, whose candidates have one entity each in its blank."""

    def build_example(self, record: Record) -> Example:
        def fill(entity: str) -> str:
            return f" {record['query'].replace('@placeholder', entity)}"

        entities = record["entities"]
        answers = record["answers"]
        label = None
        if answers and answers[0] in entities:  # the one to train on; all count as right
            label = entities.index(answers[0])
        return Example(
            prompt=record["passage"].replace("@highlight\n", "- ") + "\n-",
            candidates=tuple(fill(entity) for entity in entities),
            label=label,
            references=tuple(fill(answer) for answer in answers),
        )


_labeled(
    "sst2",
    "nyu-mll/glue",
    "sst2",
    "{sentence} It was",
    (" terrible", " great"),
    change=lambda record: {"sentence": record["sentence"].strip()},
)
_labeled(
    "rte",
    _SUPER_GLUE,
    "rte",
    '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n',
    ("Yes", "No"),
)
_labeled(
    "cb",
    _SUPER_GLUE,
    "cb",
    'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n',
    ("Yes", "No", "Maybe"),
    sizes=SplitSizes(num_train=150, num_dev=100),
    mezo_sizes=SplitSizes(num_dev=100),
)
TASKS.add(
    "boolq",
    _BoolQ(
        name="boolq",
        hub_id="google/boolq",
        fields={"passage": str, "question": str, "answer": bool},
        answer_fields=("answer",),
    ),
)
_labeled(
    "wsc",
    _SUPER_GLUE,
    "wsc.fixed",
    '{text}\nIn the previous sentence, does the pronoun "{span2_text}" refer to {span1_text}? '
    "Yes or No?\n",
    ("No", "Yes"),
    change=lambda record: {**record, "span2_text": record["span2_text"].lower()},
    # mezo_sizes keeps its default: MeZO's dev split takes 500 of the 554 records and leaves 54 to
    # train on.
    sizes=SplitSizes(num_train=454, num_dev=100),
)
_labeled(
    "wic",
    _SUPER_GLUE,
    "wic",
    'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n'
    "{sentence1}\n{sentence2}\n",
    ("No", "Yes"),
)
_labeled(
    "multirc",
    _SUPER_GLUE,
    "multirc",
    '{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct? '
    "Yes or No?\n",
    ("No", "Yes"),
)
TASKS.add(
    "copa",
    _Copa(
        name="copa",
        hub_id=_SUPER_GLUE,
        hub_config="copa",
        fields={"premise": str, "choice1": str, "choice2": str, "question": str, "label": int},
        sizes=SplitSizes(num_train=300, num_dev=100),
        mezo_sizes=SplitSizes(num_dev=100),
    ),
)
TASKS.add(
    "record",
    _Record(
        name="record",
        hub_id=_SUPER_GLUE,
        hub_config="record",
        fields={"passage": str, "query": str, "entities": list, "answers": list},
        answer_fields=("answers",),
    ),
)
_add(
    _Answered,
    "squad",
    "rajpurkar/squad",
    "Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:",
    answers={"answers.text": list},
)
_add(
    _Answered,
    "drop",
    "ucinlp/drop",
    "Passage: {passage}\nQuestion: {question}\nAnswer:",
    answers={"answers_spans.spans": list},
)
