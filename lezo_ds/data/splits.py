"""The examples of a run: records are checked, split as MeZO splits them, and built into examples.

Records come from one of two kinds of source. The indices that a split takes are the first of a
permutation by data.seed, so that a split is a function of the file, the sizes and the seed.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
from pydantic import TypeAdapter, ValidationError

from lezo_ds.config.schema import DataConfig
from lezo_ds.data.tables import Row, kind_of, read_file, read_hub, read_source
from lezo_ds.errors import UserError, cut, did_you_mean
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example, Record
from lezo_ds.tasks.template import field_path, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

_type_adapter = cache(TypeAdapter)
"""Checks a field's type. When strict, it does not take True for an int."""

_MOST_DRAWN = {"test": 1000, "validation": 500}
"""A split without a file takes a fifth of data.train, at most this number of records."""

_NUM_SHOWN = 3
"""Different reasons that a message lists, if several records cannot be used."""


@dataclass(frozen=True)
class Splits:
    """The examples of a run.

    Attributes:
        train: examples to train on.
        dev: examples to select the best step by.
        test: examples for the final score.
        records: the records that demonstrations are drawn from. Those of a task's data set include
            the records of the dev examples.
    """

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]
    records: tuple[Record, ...]


def load_splits(task: Task, data: DataConfig) -> Splits:
    """Read the records of a task, leave out those without a right answer, and split the others.

    Raises:
        UserError: a source cannot be read, records do not fit the task, or there are too few.
    """
    if data.train is None:
        return _task_splits(task, data)
    return _own_splits(task, data)


def usable(items: Iterable[T], use: Callable[[T], U], *, skip: bool) -> list[tuple[T, U]]:
    """Return the pairs (item, use(item)) of the items for which `use` raises no UserError.

    The other items are refused together, so that the first does not hide the rest.

    Args:
        items: records or examples.
        use: what checks or encodes an item.
        skip: leave the other items out with a warning, unless no item is left.

    Raises:
        UserError: `use` refused an item. The message has the number of refused items, the first
            few different reasons, and the fix of the first.
    """
    used = []
    errors = []
    for item in items:
        try:
            used.append((item, use(item)))
        except UserError as error:
            errors.append(str(error))
    if not errors:
        return used
    problems = [cut(error.partition("; fix: ")[0], 300) for error in errors]
    shown = list(dict.fromkeys(problems))
    if len(shown) > _NUM_SHOWN:
        shown[_NUM_SHOWN:] = [f"and {len(errors) - _NUM_SHOWN} more"]
    number = "1 record" if len(errors) == 1 else f"{len(errors)} records"
    message = f"{number} cannot be used: {'; '.join(shown)}"
    if not skip or not used:
        fix = errors[0].partition("; fix: ")[2]
        raise UserError(
            message,
            fix=f"{fix}, or leave out such records: data.skip_unusable=true "
            "(init: --skip-unusable)",
        )
    logger.warning("left out: %s", message)
    return used


def _task_splits(task: Task, data: DataConfig) -> Splits:
    """Draw train, then dev, from the training records, and test from the validation records."""
    names = ("train", "validation")
    if data.path is not None:
        stored = [_read_split(Path(data.path), name) for name in names]
    elif task.hub_id is None:
        raise UserError(
            f"task {task.name} has no data set on the hub", fix="set data.path or data.train"
        )
    else:
        fix = "set data.path to a directory with train.jsonl and validation.jsonl"
        stored = read_hub(task.hub_id, task.hub_config, names, fix=fix)
    train, test = (
        _answerable(task, data, name, rows) for name, rows in zip(names, stored, strict=True)
    )
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
    order = _permutation(data.seed, len(train))
    test_order = _permutation(data.seed, len(test))
    return Splits(
        train=_build(task, train, order[:num_train]),
        dev=_build(task, train, order[num_train : num_train + num_dev]),
        test=_build(task, test, test_order[:num_test]),
        records=tuple(record for _, record in train),
    )


def _own_splits(task: Task, data: DataConfig) -> Splits:
    """Read a user's own files; draw a split that has none from the training records.

    Test is drawn first, so that it does not depend on the other sizes.
    """
    assert data.train is not None
    train_rows = _answerable(task, data, "train", read_source("data.train", data.train))
    left = _permutation(data.seed, len(train_rows))
    drawn = []
    for name, source, wanted in (
        ("test", data.test, data.num_test),
        ("validation", data.validation, data.num_dev),
    ):
        if source is not None:
            rows = _answerable(task, data, name, read_source(f"data.{name}", source))
            order = _permutation(data.seed, len(rows))
            drawn.append(_build(task, rows, order[:wanted]))
            continue
        size = wanted or min(_MOST_DRAWN[name], max(1, len(train_rows) // 5))
        drawn.append(_build(task, train_rows, left[:size]))
        left = left[size:]
    test, dev = drawn
    if len(left) < (data.num_train or 1) or len(dev) < (data.num_dev or 0):
        raise UserError(
            f"{data.train} leaves {len(left)} records to train on and {len(dev)} for dev",
            fix="set a smaller data.num_train, data.num_dev or data.num_test, or add records",
        )
    train = _build(task, train_rows, left[: data.num_train])
    return Splits(train, dev, test, records=tuple(example.record for example in train))


def with_demonstrations(task: Task, data: DataConfig, splits: Splits) -> Splits:
    """Put solved examples before every question of dev and test, with a blank line after each.

    They are the first training examples, the same for all questions. With protocol mezo, they are
    drawn from all records for each question.

    Raises:
        UserError: there are fewer than data.num_demonstrations examples.
    """
    wanted = data.num_demonstrations
    per_question = data.protocol == "mezo"
    available = len(splits.train)
    if per_question:
        # A dev question is one of these records, and its own answer is not shown to it.
        available = len(splits.records) - 1
    if wanted > available:
        raise UserError(
            f"data.num_demonstrations={wanted} is more than the {available} examples",
            fix=f"set data.num_demonstrations={available}, or add training examples",
        )

    def ask(questions: tuple[Example, ...], own_rows: Sequence[int] = ()) -> tuple[Example, ...]:
        shown = [splits.train[:wanted]] * len(questions)
        if per_question:
            drawn = draw_demonstrations(
                data.seed, len(questions), len(splits.records), wanted, own_rows
            )
            shown = [
                tuple(task.build_example(splits.records[row], row) for row in rows)
                for rows in drawn
            ]
        asked = []
        for question, demonstrations in zip(questions, shown, strict=True):
            solved = ""
            for example in demonstrations:
                for answer in example.gold_texts:
                    solved += f"{(example.prompt + answer).strip()}\n\n"
            asked.append(replace(question, demonstrations=solved))
        return tuple(asked)

    own_rows: Sequence[int] = ()
    if data.train is None:
        own_rows = [question.index for question in splits.dev]
    return replace(splits, dev=ask(splits.dev, own_rows), test=ask(splits.test))


def draw_demonstrations(
    seed: int,
    num_questions: int,
    num_records: int,
    count: int,
    own_rows: Sequence[int] = (),
) -> list[list[int]]:
    """Draw the rows of the records to show before each question, as MeZO's icl.sh does.

    Question i has a seed: the i-th of `np.random.randint(0, 10000, size=num_questions)` under
    `seed`, which is 0 in MeZO's code. It is shown the first records of a permutation under that
    seed, without its own record.

    Args:
        seed: seed of the questions' seeds.
        num_questions: number of questions.
        num_records: number of records to draw from.
        count: number of records to show before each question.
        own_rows: the row of each question's own record; empty if the questions are not among them.
    """
    seeds = np.random.RandomState(seed).randint(0, 10_000, num_questions).tolist()
    own = own_rows or [-1] * num_questions
    drawn = []
    for question_seed, own_row in zip(seeds, own, strict=True):
        first = _permutation(question_seed, num_records)[: count + 1]
        drawn.append([row for row in first if row != own_row][:count])
    return drawn


def _permutation(seed: int, num_records: int) -> list[int]:
    # The stream of MeZO's np.random.seed(seed) and np.random.permutation, without the global state.
    order: list[int] = np.random.RandomState(seed).permutation(num_records).tolist()
    return order


def _build(task: Task, rows: Sequence[Row], order: Sequence[int]) -> tuple[Example, ...]:
    examples = []
    for index in order:
        place, record = rows[index]
        example = task.build_example(record, index)
        examples.append(replace(example, record=record, place=place))
    return tuple(examples)


def _read_split(directory: Path, split: str) -> list[Row]:
    """Return the records of train.jsonl, or else of all files such as train-00000.parquet."""
    files = sorted(directory.glob(f"{split}*"))
    chosen = [file for file in files if file.stem == split and kind_of(file) == ".jsonl"]
    if not chosen:
        chosen = [file for file in files if kind_of(file) == ".parquet"]
    if not chosen:
        raise UserError(
            f"data.path={directory} has no {split}.jsonl or {split}*.parquet",
            fix="correct it, or remove it to read the hub",
        )
    return [row for file in chosen for row in read_file(file)]


def _answerable(task: Task, data: DataConfig, split: str, rows: Sequence[Row]) -> list[Row]:
    """Check records; return those with a right answer, or all if the task has no answers."""

    def has_answer(numbered: tuple[int, Row]) -> bool:
        number, (place, record) = numbered
        where = f"record {number} of the {split} split of {task.name}{place}"
        return checked_label(task, where, record) is not None or not task.has_answers

    checked = usable(enumerate(rows, start=1), has_answer, skip=data.skip_unusable)
    answerable = [row for (_, row), is_answerable in checked if is_answerable]
    if not answerable:
        raise UserError(
            f"none of the {len(rows)} records of the {split} split of {task.name} has an answer",
            fix="correct the file",
        )
    num_left_out = len(checked) - len(answerable)
    if num_left_out:
        logger.warning(
            "%d of %d records of the %s split of %s have no right answer and are left out",
            num_left_out,
            len(rows),
            split,
            task.name,
        )
    return answerable


def checked_label(task: Task, where: str, record: Record | ValueError) -> int | None:
    """Return the label of a record, or None if it has no right answer.

    Args:
        task: the task of the record.
        where: what a message calls the record.
        record: the record, or what is wrong with it (see `tables.Row`).

    Raises:
        UserError: the record does not fit the task.
    """
    if isinstance(record, ValueError):
        raise UserError(f"{where} {record}", fix="correct it")
    _check_fields(task, where, record)
    try:
        example = task.build_example(record, 0)
    except UserError as error:
        raise UserError(f"{where} does not fit the task: {error}") from error
    if example.label is not None and not 0 <= example.label < len(example.candidates):
        raise UserError(
            f"{where} has the label {example.label}, not 0 to {len(example.candidates) - 1}",
            fix="remove records without a label (-1 in the test splits of the hub)",
        )
    return example.label


def _check_fields(task: Task, where: str, record: Record) -> None:
    """Refuse a record without a field that the task reads, or with a value that it cannot read."""
    for name, expected_type in task.fields.items():
        value = _field_value(record, name, where)
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


def _field_value(record: Record, name: str, where: str) -> object:
    value: object = record
    for key in field_path(record, name):
        if not isinstance(value, Mapping) or key not in value:
            fields = [str(field) for field in value] if isinstance(value, Mapping) else []
            raise UserError(
                f"{where} has no field {name}, only {', '.join(fields) or shown(value)}",
                fix=did_you_mean(key, fields, "correct the names of fields, or the file"),
            )
        value = value[key]
    return value
