"""The examples of a run: records are checked, split as MeZO splits them, and built into examples."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, get_args, get_origin

import numpy as np

from lezo_ds.config.schema import DataConfig
from lezo_ds.data.tables import Row, read_file, read_hub, read_source
from lezo_ds.errors import UserError, cut, did_you_mean
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example, Record
from lezo_ds.tasks.template import field_path, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

MAX_CHARACTERS = (
    1_000_000  # of a field: a tokenizer takes minutes and gigabytes for much longer texts
)


@dataclass(frozen=True)
class Splits:
    """The examples for training, for selecting the best step, and for the final score."""

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]
    records: tuple[Record, ...]
    """The records that demonstrations are drawn from. Without data.train, the dev examples are among them."""


def load_splits(task: Task, data: DataConfig) -> Splits:
    """Read the records that a configuration asks for, leave out those without a right answer, and split."""
    return _task_splits(task, data) if data.train is None else _own_splits(task, data)


def usable(items: Iterable[T], use: Callable[[T], U], *, skip: bool) -> list[tuple[T, U]]:
    """Return the items for which `use` raises no UserError, each with its result.

    The others are refused together, so that one does not hide the rest; or left out with a count, if `skip`.
    """
    used, refused = [], []
    for item in items:
        try:
            used.append((item, use(item)))
        except UserError as error:
            refused.append(str(error).partition("; fix: "))
    if not refused:
        return used
    different = list(dict.fromkeys(cut(what, 300) for what, _, _ in refused))
    listed = "; ".join(different[:3]) + f"; and {len(refused) - 3} more" * (len(different) > 3)
    text = f"{len(refused)} record{'s' * (len(refused) > 1)} cannot be used: {listed}"
    if not (skip and used):
        hint = "leave out such records: data.skip_unusable=true (init: --skip-unusable)"
        raise UserError(text, fix=f"{refused[0][2]}, or {hint}")
    logger.warning("left out: %s", text)
    return used


def _task_splits(task: Task, data: DataConfig) -> Splits:
    """Draw train, then dev, from a permutation of the training records; test from the validation records."""
    names = ("train", "validation")
    if data.path is not None:
        splits = [_read_split(Path(data.path), name) for name in names]
    elif task.hub_id is not None:
        fix = f"set data.path to a directory with {names[0]}.jsonl and {names[1]}.jsonl"
        splits = read_hub(task.hub_id, task.hub_config, names, fix=fix)
    else:
        raise UserError(
            f"task {task.name} has no data set on the hub", fix="set data.path or data.train"
        )
    named = zip(names, splits, strict=True)
    train, test = (_answerable(task, data, name, rows) for name, rows in named)
    sizes = task.mezo_sizes if data.protocol == "mezo" else task.sizes
    num_train = data.num_train or sizes.num_train
    num_dev = data.num_dev or sizes.num_dev
    num_left = len(train) - num_dev
    if num_train > num_left:
        if data.protocol == "clean" or num_left < 1:
            what = f"{task.name} has {len(train)} training records, too few for {num_train} + {num_dev}"
            raise UserError(what, fix="set a smaller data.num_train or data.num_dev")
        text = (
            "%s: %d training examples instead of %d: MeZO's protocol takes %d of %d records for dev"
        )
        logger.warning(text, task.name, num_left, num_train, num_dev, len(train))
        num_train = num_left
    order = _permutation(data.seed, len(train))
    return Splits(
        train=_build(task, train, order[:num_train]),
        dev=_build(task, train, order[num_train : num_train + num_dev]),
        test=_build(
            task, test, _permutation(data.seed, len(test))[: data.num_test or sizes.num_test]
        ),
        records=tuple(record for _, record in train),
    )


def _own_splits(task: Task, data: DataConfig) -> Splits:
    """Read a user's own files, each permuted by the seed; a split without a file is drawn from data.train.

    Test is drawn first, so that it does not depend on the other sizes.
    """
    assert data.train is not None
    sources = {"train": data.train, "validation": data.validation, "test": data.test}
    rows = {
        name: _answerable(task, data, name, read_source(f"data.{name}", source))
        for name, source in sources.items()
        if source is not None
    }
    order, drawn = _permutation(data.seed, len(rows["train"])), {}
    for name, wanted, limit in (("test", data.num_test, 1000), ("validation", data.num_dev, 500)):
        if name in rows:
            drawn[name] = rows[name], _permutation(data.seed, len(rows[name]))[:wanted]
            continue
        size = wanted or min(limit, max(1, len(rows["train"]) // 5))
        drawn[name], order = (rows["train"], order[:size]), order[size:]
        text = "data.%s is not set: %d of the %d records of %s are drawn for it, by data.seed=%d"
        logger.info(text, name, size, len(rows["train"]), data.train, data.seed)
    num_dev = len(drawn["validation"][1])
    if len(order) < (data.num_train or 1) or (data.num_dev or 0) > num_dev:
        fix = "set a smaller data.num_train, data.num_dev or data.num_test, or add records"
        what = f"{data.train} leaves {len(order)} records to train on and {num_dev} for dev"
        raise UserError(what, fix=fix)
    order = order[: data.num_train]
    return Splits(
        train=_build(task, rows["train"], order),
        dev=_build(task, *drawn["validation"]),
        test=_build(task, *drawn["test"]),
        records=tuple(rows["train"][row][1] for row in order),
    )


def with_demonstrations(task: Task, data: DataConfig, splits: Splits) -> Splits:
    """Put solved examples before every question of dev and test, with a blank line after each.

    They are the first training examples; with protocol mezo, others for each question.
    """
    wanted, per_question = data.num_demonstrations, data.protocol == "mezo"
    # A dev question comes from the same records, and its own answer is not shown to it.
    available = len(splits.records) - 1 if per_question else len(splits.train)
    if wanted > available:
        fix = f"set data.num_demonstrations={available}, or add training examples"
        raise UserError(
            f"data.num_demonstrations={wanted} is more than the {available} examples", fix=fix
        )

    def show(questions: tuple[Example, ...], own_rows: Sequence[int] = ()) -> tuple[Example, ...]:
        if not per_question:
            return tuple(_after(question, splits.train[:wanted]) for question in questions)
        drawn = draw_demonstrations(
            data.seed, len(questions), len(splits.records), wanted, own_rows
        )
        return tuple(
            _after(question, [task.build_example(splits.records[row], row) for row in rows])
            for question, rows in zip(questions, drawn, strict=True)
        )

    own_rows = [question.index for question in splits.dev] if data.train is None else ()
    return replace(splits, dev=show(splits.dev, own_rows), test=show(splits.test))


def draw_demonstrations(
    seed: int, num_questions: int, num_records: int, count: int, own_rows: Sequence[int] = ()
) -> list[list[int]]:
    """Draw the rows of the records to show before each question, as MeZO's icl.sh does.

    Question i has a seed: the i-th of `np.random.randint(0, 10000, size=num_questions)` under `seed`, which
    is 0 in MeZO's code. It is shown the first records of a permutation under that seed, without its own.
    """
    seeds = np.random.RandomState(seed).randint(0, 10_000, num_questions).tolist()
    own = own_rows or [-1] * num_questions
    return [
        [row for row in _permutation(drawn, num_records)[: count + 1] if row != excluded][:count]
        for drawn, excluded in zip(seeds, own, strict=True)
    ]


def _after(question: Example, shown: Sequence[Example]) -> Example:
    solved = [(example.prompt + text).strip() for example in shown for text in example.gold_texts]
    return replace(question, demonstrations="".join(f"{text}\n\n" for text in solved))


def _permutation(seed: int, num_records: int) -> list[int]:
    # The stream of MeZO's np.random.seed(seed) and np.random.permutation, without the global state.
    order: list[int] = np.random.RandomState(seed).permutation(num_records).tolist()
    return order


def _build(task: Task, rows: Sequence[Row], order: Sequence[int]) -> tuple[Example, ...]:
    drawn = [(row, *rows[row]) for row in order]
    return tuple(
        replace(task.build_example(r, row), record=r, place=place) for row, place, r in drawn
    )


def _read_split(directory: Path, split: str) -> list[Row]:
    lines = directory / f"{split}.jsonl"
    files = [lines] if lines.is_file() else sorted(directory.glob(f"{split}*.parquet"))
    if not files:
        fix = "correct it, or remove it to read the hub"
        raise UserError(f"data.path={directory} has no {split}.jsonl or {split}*.parquet", fix=fix)
    return [row for file in files for row in read_file(file)]


def _answerable(task: Task, data: DataConfig, split: str, rows: Sequence[Row]) -> list[Row]:
    def has_answer(numbered: tuple[int, Row]) -> bool:
        number, (place, record) = numbered
        where = f"record {number} of the {split} split of {task.name}{place}"
        return checked_label(task, where, record) is not None or not task.has_answers

    checked = usable(enumerate(rows, start=1), has_answer, skip=data.skip_unusable)
    kept = [row for (_, row), is_kept in checked if is_kept]
    if not kept:
        what = f"none of the {len(rows)} records of the {split} split of {task.name} has an answer"
        raise UserError(what, fix="correct the file")
    if len(kept) < len(checked):
        text = "%d of %d records of the %s split of %s have no right answer and are left out"
        logger.warning(text, len(checked) - len(kept), len(rows), split, task.name)
    return kept


def checked_label(task: Task, where: str, record: Record | ValueError) -> int | None:
    if isinstance(record, ValueError):
        raise UserError(f"{where} {record}", fix="correct it")
    _check_fields(task, where, record)
    try:
        example = task.build_example(record, 0)
    except UserError as error:
        raise UserError(f"{where} does not fit the task: {error}") from error
    if example.label is not None and not 0 <= example.label < len(example.candidates):
        what = f"{where} has the label {example.label}, not 0 to {len(example.candidates) - 1}"
        raise UserError(
            what, fix="remove records without a label (-1 in the test splits of the hub)"
        )
    return example.label


def _check_fields(task: Task, where: str, record: Record) -> None:
    for name, expected_type in task.fields.items():
        value: object = record
        for part in field_path(record, name):
            if not isinstance(value, Mapping) or part not in value:
                fields = [str(field) for field in value] if isinstance(value, Mapping) else []
                fix = did_you_mean(part, fields, "correct the names of fields, or the file")
                what = f"{where} has no field {name}, only {', '.join(fields) or shown(value)}"
                raise UserError(what, fix=fix)
            value = value[part]
        if not _has_type(value, expected_type):
            expected = expected_type if get_args(expected_type) else expected_type.__name__
            what = f"field {name} of {where} is {shown(value)}, not of type {expected}"
            raise UserError(what, fix=f"use the field types of {task.hub_id or 'the task'}")
        text = json.dumps(value, ensure_ascii=False, default=str)
        if len(text) > MAX_CHARACTERS:
            what = f"field {name} of {where} has more than {MAX_CHARACTERS} characters"
            raise UserError(what, fix="shorten it")
        if re.search("[\ud800-\udfff]", text):  # JSON can hold it, and no tokenizer accepts it
            raise UserError(f"field {name} of {where} has half of a character", fix="remove it")


def _has_type(value: object, expected_type: type) -> bool:
    # Exactly this type: True is not an int.
    if get_origin(expected_type) is list:
        (item_type,) = get_args(expected_type)
        return isinstance(value, list) and all(type(item) is item_type for item in value)
    return expected_type is object or type(value) is expected_type
