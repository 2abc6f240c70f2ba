"""The eleven tasks of the papers, with the prompts and verbalizers of MeZO (Malladi et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry
from lezo_ds.tasks.base import Example, Record, SplitSizes, Task, TaskKind
from lezo_ds.tasks.template import field_value, parse_template

TASKS: Registry[Task] = Registry("task", "data.task", kind=Task)


def _add(
    name: str,
    hub: tuple[str, str | None],
    kind: TaskKind,
    fields: Mapping[str, type],
    build_example: Callable[[Record, int], Example],
    **others: Any,
) -> None:
    TASKS.add(name, Task(name, *hub, kind, fields, build_example, **others))


def _classification(
    name: str,
    hub: tuple[str, str | None],
    prompt: str,
    candidates: tuple[str, ...],
    *,
    change: Callable[[Record], Record] = dict,
    **sizes: SplitSizes,
) -> None:
    """Register a task whose field "label" is the index of the right candidate."""
    template = parse_template(name, prompt)

    def build_example(record: Record, index: int) -> Example:
        text = template.fill(change(record))
        return Example(text, candidates, record["label"], index)

    fields = dict.fromkeys(template.fields, str) | {"label": int}
    _add(name, hub, "classification", fields, build_example, labels=range(len(candidates)), **sizes)


def _generation(name: str, hub: tuple[str, str | None], prompt: str, answers: str) -> None:
    """Register a task that trains on the first of a list of answers, and is scored against all."""
    template = parse_template(name, prompt)

    def build_example(record: Record, index: int) -> Example:
        text = template.fill({**record, "question": record["question"].strip()})
        right = tuple(field_value(record, answers))
        gold = tuple(f" {answer}\n" for answer in right[:1])
        return Example(text, gold, 0 if right else None, index, references=right)

    fields = dict.fromkeys(template.fields, str) | {answers: list[str]}
    _add(name, hub, "generation", fields, build_example, metric="f1", answer_fields=(answers,))


def _build_boolq(record: Record, index: int) -> Example:
    question = record["question"][:1].upper() + record["question"][1:].removesuffix("?") + "?"
    label = 0 if record["answer"] else 1
    return Example(f"{record['passage']} {question}\n", ("Yes", "No"), label, index)


def _build_copa(record: Record, index: int) -> Example:
    conjunction = {"effect": " so ", "cause": " because "}.get(record["question"])
    if conjunction is None:
        what = f"field question={record['question']} is neither effect nor cause"
        raise UserError(what, fix="correct the record")

    def choice(text: str) -> str:
        first, *others = text.split(" ")
        return " ".join([first if first == "I" else first.lower(), *others])

    return Example(
        prompt=record["premise"].rstrip().removesuffix(".") + conjunction,
        candidates=(choice(record["choice1"]), choice(record["choice2"])),
        label=record["label"],
        index=index,
    )


def _build_record(record: Record, index: int) -> Example:
    """Each candidate is the query with one entity in its blank. Training uses the first right answer."""

    def fill(entity: str) -> str:
        return f" {record['query'].replace('@placeholder', entity)}"

    entities, answers = record["entities"], record["answers"]
    return Example(
        prompt=record["passage"].replace("@highlight\n", "- ") + "\n-",
        candidates=tuple(fill(entity) for entity in entities),
        label=entities.index(answers[0]) if answers and answers[0] in entities else None,
        index=index,
        references=tuple(fill(answer) for answer in answers),
    )


_classification(
    "sst2",
    ("nyu-mll/glue", "sst2"),
    "{sentence} It was",
    (" terrible", " great"),
    change=lambda record: {"sentence": record["sentence"].strip()},
)
_classification(
    "rte",
    ("aps/super_glue", "rte"),
    '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n',
    ("Yes", "No"),
)
_classification(
    "cb",
    ("aps/super_glue", "cb"),
    'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n',
    ("Yes", "No", "Maybe"),
    sizes=SplitSizes(num_train=150, num_dev=100),
    mezo_sizes=SplitSizes(num_dev=100),
)
_add(
    "boolq",
    ("google/boolq", None),
    "classification",
    {"passage": str, "question": str, "answer": bool},
    _build_boolq,
    answer_fields=("answer",),
)
_classification(
    "wsc",
    ("aps/super_glue", "wsc.fixed"),
    '{text}\nIn the previous sentence, does the pronoun "{span2_text}" refer to {span1_text}? Yes or No?\n',
    ("No", "Yes"),
    change=lambda record: {**record, "span2_text": record["span2_text"].lower()},
    # mezo_sizes keeps its default: MeZO's dev split takes 500 of the 554 records and leaves 54 to train on.
    sizes=SplitSizes(num_train=454, num_dev=100),
)
_classification(
    "wic",
    ("aps/super_glue", "wic"),
    'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n'
    "{sentence1}\n{sentence2}\n",
    ("No", "Yes"),
)
_classification(
    "multirc",
    ("aps/super_glue", "multirc"),
    '{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct? Yes or No?\n',
    ("No", "Yes"),
)
_add(
    "copa",
    ("aps/super_glue", "copa"),
    "multiple_choice",
    {"premise": str, "choice1": str, "choice2": str, "question": str, "label": int},
    _build_copa,
    sizes=SplitSizes(num_train=300, num_dev=100),
    mezo_sizes=SplitSizes(num_dev=100),
)
_add(
    "record",
    ("aps/super_glue", "record"),
    "multiple_choice",
    {"passage": str, "query": str, "entities": list[str], "answers": list[str]},
    _build_record,
    answer_fields=("answers",),
)
_generation(
    "squad",
    ("rajpurkar/squad", None),
    "Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:",
    answers="answers.text",
)
_generation(
    "drop",
    ("ucinlp/drop", None),
    "Passage: {passage}\nQuestion: {question}\nAnswer:",
    answers="answers_spans.spans",
)
