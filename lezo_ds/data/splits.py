"""The examples of a run: records are checked, split as MeZO splits them, and built into examples.

Records come from one of two kinds of source. The indices that a split takes are the first of a
permutation by data.seed, so that a split is a function of the file, the sizes and the seed. With
data.splits=stratified, that of a user's own files is reordered by label.

    a task's data set             train.jsonl  [ train | dev | unused ... ]
    (data.path, or the hub)       validation   [ test | unused ... ]

    the user's own files          data.train   [ test | dev | train ... ]
    (data.train and others)       A split with a file of its own takes its records from there.

A row is the place of a record in its file, and the record (see `tables.Row`). Bad records are
refused together, in one message, before a model is loaded.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
from pydantic import TypeAdapter, ValidationError

from lezo_ds.config.schema import DataConfig
from lezo_ds.data.batches import num_earlier
from lezo_ds.data.tables import Row, kind_of, read_file, read_hub, read_source
from lezo_ds.errors import UserError, cut, did_you_mean
from lezo_ds.tasks.base import Example, Record, Task
from lezo_ds.tasks.template import field_value, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

Examples = tuple[Example, ...]

_type_adapter = cache(TypeAdapter)
"""Checks a field's type. When strict, it does not take True for an int."""

_MOST_DRAWN = {"test": 1000, "validation": 500}
"""A split without a file takes a fifth of data.train, at most this number of records."""

_NUM_SHOWN = 3
"""Different reasons that a message lists, if several records cannot be used."""

_FEW = 0.2
"""If at most this share of the records cannot be used, the mistake is theirs, and not that of the
recipe."""


@dataclass(frozen=True)
class Splits:
    """The examples of a run.

    Attributes:
        train: examples to train on.
        dev: examples to select the best step by.
        test: examples for the final score.
        pool: the examples that demonstrations may be drawn from. Those of a task's data set include
            the dev examples.
    """

    train: Examples
    dev: Examples
    test: Examples
    pool: Examples


def load_splits(task: Task, data: DataConfig) -> Splits:
    """Read the records of a task, leave out those without a right answer, and split the others.

    Raises:
        UserError: a source cannot be read, records do not fit the task, or there are too few.
    """
    if data.train is None:
        return _task_splits(task, data)
    return _own_splits(task, data)


def usable(items: Iterable[T], use: Callable[[T], U], *, skip: bool) -> list[U]:
    """Return what `use` makes of the items for which it raises no UserError.

    The other items are refused together, so that the first does not hide the rest.

    Args:
        items: records or examples.
        use: what checks or encodes an item.
        skip: leave the other items out with a warning, unless no item is left.

    Raises:
        UserError: `use` refused an item. The message has the number of refused items, the first
            few different reasons, and the most frequent fix. It offers `skip` where it refused few,
            because many are misread.
    """
    used = []
    errors = []
    for item in items:
        try:
            used.append(use(item))
        except UserError as error:
            errors.append(str(error).partition("; fix: "))
    if not errors:
        return used
    shown = list(dict.fromkeys(cut(problem, 300) for problem, _, _ in errors))
    if len(shown) > _NUM_SHOWN:
        shown[_NUM_SHOWN:] = [f"and {len(errors) - _NUM_SHOWN} more"]
    number = "1 record" if len(errors) == 1 else f"{len(errors)} records"
    message = f"cannot be used: {'; '.join(shown)}"
    if not skip or not used:
        fixes = Counter(fix for _, _, fix in errors)
        ((fix, _),) = fixes.most_common(1)
        total = len(used) + len(errors)
        if len(errors) <= _FEW * total:
            fix += ", or leave out such records: data.skip_unusable=true (init: --skip-unusable)"
        elif total > 1:
            number += f" of {total}"
        raise UserError(f"{number} {message}", fix=fix)
    logger.warning("left out: %s %s", number, message)
    return used


def refused_together(builds: Iterable[Callable[[], T]]) -> list[T]:
    """Return what functions return. What several of them refuse is one error."""
    built = []
    errors = []
    for build in builds:
        try:
            built.append(build())
        except UserError as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("; ".join(dict.fromkeys(map(str, errors))))
    return built


def _task_splits(task: Task, data: DataConfig) -> Splits:
    """Draw train, then dev, from the training records, and test from the validation records."""
    names = ("train", "validation")
    if data.path is not None:
        stored = [_read_split(Path(data.path), name) for name in names]
        if task.hub_id is None and any(Path(data.path).glob("test*")):  # those of a hub lack labels
            logger.warning(
                "%s: its test file is not read, since test examples are validation records; to "
                "read it, set data.train, data.validation and data.test",
                data.path,
            )
    elif task.hub_id is None:
        raise UserError(
            f"task {task.name} has no data set on the hub", fix="set data.path or data.train"
        )
    else:
        fix = "set data.path to a directory with train.jsonl and validation.jsonl"
        stored = read_hub(task.hub_id, task.hub_config, names, fix=fix)
    train, test = _built(task, data, names, stored)
    sizes = task.mezo_sizes if data.protocol == "mezo" else task.sizes
    num_dev = data.num_dev or sizes.num_dev
    num_test = data.num_test or sizes.num_test
    wanted = data.num_train or sizes.num_train
    num_train = min(wanted, len(train) - num_dev)  # the dev examples come first
    if num_train < wanted:
        problem = f"{task.name} has {len(train)} training records, too few for {wanted} + {num_dev}"
        if data.protocol == "clean" or num_train < 1:
            raise UserError(problem, fix="set a smaller data.num_train or data.num_dev")
        logger.warning("%s: MeZO's protocol trains on %d", problem, num_train)
    shuffled = _shuffled(data.seed, train)
    return Splits(
        train=shuffled[:num_train],
        dev=shuffled[num_train : num_train + num_dev],
        test=_shuffled(data.seed, test)[:num_test],
        pool=train,
    )


def _own_splits(task: Task, data: DataConfig) -> Splits:
    """Read a user's own files; draw a split that has none from the training records.

    Test is drawn first, so that it does not depend on the other sizes.
    """
    names = ("train", "test", "validation")
    sources = {name: getattr(data, name) for name in names if getattr(data, name) is not None}
    stored = refused_together(
        partial(read_source, f"data.{name}", source, data.encoding or "utf-8")
        for name, source in sources.items()
    )
    built = dict(zip(sources, _built(task, data, sources, stored), strict=True))
    examples = built["train"]
    left = _in_order(task, data, examples)
    drawn = []
    for name, wanted in (("test", data.num_test), ("validation", data.num_dev)):
        if name in built:
            drawn.append(_in_order(task, data, built[name])[:wanted])
            continue
        size = wanted or min(_MOST_DRAWN[name], max(1, len(examples) // 5))
        drawn.append(left[:size])
        left = left[size:]
    test, dev = drawn
    if len(left) < (data.num_train or 1) or len(dev) < (data.num_dev or 0):
        raise UserError(
            f"{data.train} leaves {len(left)} records to train on and {len(dev)} for dev",
            fix="set a smaller data.num_train, data.num_dev or data.num_test, or add records",
        )
    train = left[: data.num_train]
    if task.has_classes and len({example.label for example in train}) == 1:
        (text,) = train[0].gold_texts
        logger.warning("all %d training records have the label %s", len(train), text.strip())
    num_repeated = len(dev) - len(_new(dev, train))
    if num_repeated:
        repeat = "%d of %d validation records repeat the text of training records"
        logger.warning(repeat, num_repeated, len(dev))
    # All that train could take counts, so that test does not depend on the sizes of the others.
    new = _new(test, (*dev, *left))
    if len(new) < len(test):
        repeat = "%d of %d test records repeat the text of training or validation records; %d stay"
        num_records = len(test)
        if new and data.splits == "stratified":
            test = new
        logger.warning(repeat, num_records - len(new), num_records, len(test))
    return Splits(train, dev, test, pool=train)


def _in_order(task: Task, data: DataConfig, examples: Sequence[Example]) -> Examples:
    """Return examples in the order in which splits take them.

    In a stratified one of a classification, the k-th of the n examples of a label comes after the
    part (k + 1/2) / n of all, so that each split has about the same share of every label.
    """
    shuffled = _shuffled(data.seed, examples)
    if data.splits == "random" or not task.has_classes:
        return shuffled
    labels = [example.label for example in shuffled]
    totals = Counter(labels)
    pairs = zip(labels, num_earlier(labels), strict=True)
    places = [(number + 0.5) / totals[label] for label, number in pairs]
    return tuple(shuffled[row] for row in sorted(range(len(places)), key=places.__getitem__))


def _new(examples: Sequence[Example], others: Sequence[Example]) -> Examples:
    """Return the examples whose text no other example has."""
    texts = set(map(_text, others))
    return tuple(example for example in examples if _text(example) not in texts)


def _text(example: Example) -> tuple[object, ...]:
    """Return what the model reads of an example, without its case and spacing."""
    turns = tuple(turn.content for turn in example.messages[:-1])
    choices = example.candidates if len(example.candidates) > 1 else ()
    return (" ".join(example.prompt.casefold().split()), turns, choices)


def with_demonstrations(data: DataConfig, splits: Splits) -> Splits:
    """Put solved examples before every question of dev and test, with a blank line after each.

    They are the first training examples, the same for all questions. With protocol mezo, they are
    drawn from the pool for each question.

    Raises:
        UserError: there are fewer than data.num_demonstrations examples.
    """
    wanted = data.num_demonstrations
    per_question = data.protocol == "mezo"
    # A dev question may be in the pool, and its own answer is not shown to it.
    available = len(splits.pool) - 1 if per_question else len(splits.train)
    if wanted > available:
        raise UserError(
            f"data.num_demonstrations={wanted} is more than the {available} examples",
            fix=f"set data.num_demonstrations={available}, or add training examples",
        )

    def ask(questions: Examples) -> Examples:
        shown = [splits.train[:wanted]] * len(questions)
        if per_question:
            shown = draw_demonstrations(data.seed, questions, splits.pool, wanted)
        return tuple(
            replace(question, demonstrations=_solved(examples))
            for question, examples in zip(questions, shown, strict=True)
        )

    return replace(splits, dev=ask(splits.dev), test=ask(splits.test))


def _solved(examples: Sequence[Example]) -> str:
    """Return examples with their right answers, with a blank line after each."""
    texts = [example.prompt + answer for example in examples for answer in example.gold_texts]
    return "".join(f"{text.strip()}\n\n" for text in texts)


def draw_demonstrations(
    seed: int, questions: Sequence[Example], pool: Sequence[Example], count: int
) -> list[Examples]:
    """Draw the examples to show before each question, as MeZO's icl.sh does.

    Question i has a seed: the i-th of `np.random.randint(0, 10000, size=number of questions)` under
    `seed`, which is 0 in MeZO's code. It is shown the first `count` examples of a permutation of
    the pool under that seed, without itself.
    """
    seeds = np.random.RandomState(seed).randint(0, 10_000, len(questions)).tolist()
    drawn = []
    for question, question_seed in zip(questions, seeds, strict=True):
        first = _shuffled(question_seed, pool)[: count + 1]
        others = [example for example in first if example is not question]
        drawn.append(tuple(others[:count]))
    return drawn


def _shuffled(seed: int, examples: Sequence[Example]) -> Examples:
    # The stream of MeZO's np.random.seed(seed) and np.random.permutation, without the global state.
    order = np.random.RandomState(seed).permutation(len(examples))
    return tuple(examples[row] for row in order)


def _read_split(directory: Path, split: str) -> list[Row]:
    """Return the records of train.jsonl, or else of all files such as train-00000.parquet."""
    files = sorted(directory.glob(f"{split}*"))
    chosen = [file for file in files if file.stem == split and kind_of(file) == ".jsonl"]
    chosen = chosen or [file for file in files if kind_of(file) == ".parquet"]
    if not chosen:
        raise UserError(
            f"data.path={directory} has no {split}.jsonl or {split}*.parquet",
            fix="correct it, or remove it to read the hub",
        )
    return [row for file in chosen for row in read_file(file)]


def _built(
    task: Task, data: DataConfig, names: Iterable[str], stored: Sequence[Sequence[Row]]
) -> list[Examples]:
    """Return the examples of some splits, by a task that has seen the records of all."""
    rows = chain.from_iterable(stored)
    surveyed = task.survey([record for _, record in rows if isinstance(record, Mapping)])
    return refused_together(
        partial(_examples, surveyed, data, name, rows)
        for name, rows in zip(names, stored, strict=True)
    )


def _examples(task: Task, data: DataConfig, split: str, rows: Sequence[Row]) -> Examples:
    """Return the examples of records with a right answer, or of all if the task has no answers."""
    of_split = f"of the {split} split of {task.name}"

    def build(numbered: tuple[int, Row]) -> Example:
        number, (place, record) = numbered
        return checked_example(task, f"record {number} {of_split}{place}", record)

    built = usable(enumerate(rows, start=1), build, skip=data.skip_unusable)
    answerable = [example for example in built if example.label is not None or not task.has_answers]
    if not answerable:
        raise UserError(
            f"none of the {len(rows)} records {of_split} has an answer",
            fix=task.fix_without_answers,
        )
    num_left_out = len(built) - len(answerable)
    if num_left_out:
        message = "%d of %d records %s have no right answer and are left out"
        logger.warning(message, num_left_out, len(rows), of_split)
    return tuple(replace(example, index=index) for index, example in enumerate(answerable))


def checked_example(task: Task, where: str, record: Record | ValueError) -> Example:
    """Return the example of a record, with the record and its place.

    Args:
        task: the task of the record.
        where: what a message calls the record.
        record: the record, or what is wrong with it (see `tables.Row`).

    Raises:
        UserError: the record does not fit the task.
    """
    if isinstance(record, ValueError):
        raise UserError(f"{where} {record}", fix="correct it")
    for name, expected_type in task.fields.items():
        _check_field(task, where, record, name, expected_type)
    try:
        example = task.example(record)
    except UserError as error:
        raise UserError(f"{where} does not fit the task: {error}") from error
    except Exception as error:  # of a task of the user's own
        raise UserError(
            f"{where} does not fit the task: {type(error).__name__}: {error}",
            fix=f"correct the record, or build_example of {task.name}",
        ) from error
    if example.label is not None and not 0 <= example.label < len(example.candidates):
        raise UserError(
            f"{where} has the label {example.label}, not 0 to {len(example.candidates) - 1}",
            fix="remove records without a label (-1 in the test splits of the hub)",
        )
    return replace(example, record=record, place=where)


def _check_field(task: Task, where: str, record: Record, name: str, expected_type: type) -> None:
    """Refuse a record without a field that the task reads, or with a value that it cannot read."""
    try:
        value = field_value(record, name)
    except (KeyError, TypeError) as error:
        fields = [str(field) for field in record]
        raise UserError(
            f"{where} has no field {name}, only {', '.join(fields)}",
            fix=did_you_mean(
                name, fields, "correct the names of fields, or the file (a table's first line)"
            ),
        ) from error
    try:
        _type_adapter(expected_type).validate_python(value, strict=True)
    except ValidationError as error:
        expected = expected_type if get_args(expected_type) else expected_type.__name__
        raise UserError(
            f"field {name} of {where} is {shown(value)}, not of type {expected}",
            fix=f"use the field types of {task.hub_id or 'the task'}",
        ) from error
    # JSON can hold half of a surrogate pair, and no tokenizer accepts it.
    if re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False, default=str)):
        raise UserError(f"field {name} of {where} has half of a character", fix="remove it")
