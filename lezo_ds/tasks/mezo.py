"""The eleven tasks of the papers, with the prompts and verbalizers of MeZO (Malladi et al. 2023).

The `fields` of a task are those of its data set on the Hugging Face hub. A file of the same task
has the same fields. Texts follow MeZO's code to the character: what a prompt strips, what it adds,
and where the space or newline before a candidate stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lezo_ds.registry import Registry
from lezo_ds.tasks.base import Example, Record, SplitSizes, Task
from lezo_ds.tasks.template import field_value, parse_template

TASKS: Registry[Task] = Registry("task", "data.task", kind=Task)

_SUPER_GLUE = "aps/super_glue"


def _add(task: Task) -> None:
    TASKS.add(task.name, task)


def _classification(
    name: str,
    hub_id: str,
    hub_config: str,
    prompt: str,
    candidates: tuple[str, ...],
    *,
    change: Callable[[Record], Record] | None = None,
    **sizes: Any,
) -> None:
    """Register a task whose field "label" is the index of the right candidate.

    Args:
        name: of the task.
        hub_id: data set on the hub.
        hub_config: configuration of the data set.
        prompt: template of the prompt.
        candidates: the texts of the labels 0, 1, ..., with the space before them.
        change: prepares a record for the template; None changes nothing.
        sizes: `sizes` and `mezo_sizes` of the task, where it has its own.
    """
    template = parse_template(name, prompt)

    def build_example(record: Record, index: int) -> Example:
        changed = record if change is None else change(record)
        return Example(template.fill(changed), candidates, record["label"], index)

    fields: dict[str, type] = dict.fromkeys(template.fields, str)
    fields["label"] = int
    labels = range(len(candidates))
    _add(
        Task(
            name,
            hub_id,
            hub_config,
            "classification",
            fields,
            build_example,
            labels=labels,
            **sizes,
        )
    )


def _generation(name: str, hub_id: str, prompt: str, answers: str) -> None:
    """Register a task that trains on the first of a list of answers, and is scored against all.

    `answers` is the field with this list.
    """
    template = parse_template(name, prompt)

    def build_example(record: Record, index: int) -> Example:
        filled = template.fill({**record, "question": record["question"].strip()})
        right = tuple(field_value(record, answers))
        if not right:
            return Example(filled, (), None, index)
        return Example(filled, (f" {right[0]}\n",), 0, index, references=right)

    fields: dict[str, Any] = dict.fromkeys(template.fields, str)
    fields[answers] = list[str]
    _add(
        Task(
            name,
            hub_id,
            None,
            "generation",
            fields,
            build_example,
            metric="f1",
            answer_fields=(answers,),
        )
    )


def _build_boolq(record: Record, index: int) -> Example:
    """Return the example of a question, which the hub has in lower case and without its mark."""
    question = record["question"]
    question = question[:1].upper() + question[1:].removesuffix("?") + "?"
    label = 0 if record["answer"] else 1
    return Example(f"{record['passage']} {question}\n", ("Yes", "No"), label, index)


def _build_copa(record: Record, index: int) -> Example:
    """Return the example of a premise with two choices, each its effect or its cause."""
    premise = record["premise"].rstrip().removesuffix(".")
    conjunction = " so " if record["question"] == "effect" else " because "
    candidates = (_continued(record["choice1"]), _continued(record["choice2"]))
    return Example(premise + conjunction, candidates, record["label"], index)


def _continued(choice: str) -> str:
    """Return a choice as it follows a conjunction: its first word in lower case, but I stays."""
    first, space, others = choice.partition(" ")
    if first != "I":
        first = first.lower()
    return first + space + others


def _build_record(record: Record, index: int) -> Example:
    """Return the example of a query, whose candidates have one entity each in its blank."""

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
        index=index,
        references=tuple(fill(answer) for answer in answers),
    )


_classification(
    "sst2",
    "nyu-mll/glue",
    "sst2",
    "{sentence} It was",
    (" terrible", " great"),
    change=lambda record: {"sentence": record["sentence"].strip()},
)
_classification(
    "rte",
    _SUPER_GLUE,
    "rte",
    '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n',
    ("Yes", "No"),
)
_classification(
    "cb",
    _SUPER_GLUE,
    "cb",
    'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n',
    ("Yes", "No", "Maybe"),
    sizes=SplitSizes(num_train=150, num_dev=100),
    mezo_sizes=SplitSizes(num_dev=100),
)
_add(
    Task(
        "boolq",
        "google/boolq",
        None,
        kind="classification",
        fields={"passage": str, "question": str, "answer": bool},
        build_example=_build_boolq,
        answer_fields=("answer",),
    )
)
_classification(
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
_classification(
    "wic",
    _SUPER_GLUE,
    "wic",
    'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n'
    "{sentence1}\n{sentence2}\n",
    ("No", "Yes"),
)
_classification(
    "multirc",
    _SUPER_GLUE,
    "multirc",
    '{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct? '
    "Yes or No?\n",
    ("No", "Yes"),
)
_add(
    Task(
        "copa",
        _SUPER_GLUE,
        "copa",
        kind="multiple_choice",
        fields={"premise": str, "choice1": str, "choice2": str, "question": str, "label": int},
        build_example=_build_copa,
        sizes=SplitSizes(num_train=300, num_dev=100),
        mezo_sizes=SplitSizes(num_dev=100),
    )
)
_add(
    Task(
        "record",
        _SUPER_GLUE,
        "record",
        kind="multiple_choice",
        fields={"passage": str, "query": str, "entities": list[str], "answers": list[str]},
        build_example=_build_record,
        answer_fields=("answers",),
    )
)
_generation(
    "squad",
    "rajpurkar/squad",
    "Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:",
    answers="answers.text",
)
_generation(
    "drop",
    "ucinlp/drop",
    "Passage: {passage}\nQuestion: {question}\nAnswer:",
    answers="answers_spans.spans",
)
