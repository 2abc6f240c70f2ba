"""Records of a task from the hub or a local directory, split as MeZO splits them, and demonstrations."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args, get_origin

import numpy as np

from lezo_ds.data.record_files import Row, read_file, read_hub, read_source
from lezo_ds.errors import UserError, cut
from lezo_ds.tasks.base import Example, Protocol, Record, Task
from lezo_ds.tasks.template import field_path

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 1_000_000
"""The longest text of a field. A tokenizer takes minutes and gigabytes for much longer ones."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Splits:
    """The examples for training, for selecting the best step, and for the final score."""

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]


def load_records(task: Task, path: Path | None) -> tuple[list[Record], list[Record]]:
    """Read and check the task's training and validation records.

    Records without a right answer (no answer at all, or none among the candidates) are left out, with one
    warning per split.

    Args:
        task: the task to read.
        path: directory with train.jsonl and validation.jsonl, or train*.parquet and validation*.parquet,
            with the fields of the hub's data set. None reads the hub, or its local cache if HF_HUB_OFFLINE
            is set.

    Raises:
        UserError: the data or a split is missing, a field is missing or has the wrong type, a text is longer
            than MAX_CHARACTERS or has half of a character, a label is not the index of a candidate, or no
            record of a split has an answer. An error of one record names its file and line or row.
    """
    names = _split_names(task)
    splits = _load_hub(task) if path is None else [_load_local(path, name) for name in names]
    train, validation = (
        [record for _, record in _answerable(task, name, rows)]
        for name, rows in zip(names, splits, strict=True)
    )
    return train, validation


def sample_splits(
    task: Task,
    train: Sequence[Record],
    validation: Sequence[Record],
    protocol: Protocol,
    seed: int,
    num_train: int | None = None,
    num_dev: int | None = None,
    num_test: int | None = None,
) -> Splits:
    """Draw train, dev and test examples as MeZO does (Malladi et al. 2023).

    Train and dev are the first num_train + num_dev records of a permutation of `train`; dev takes the last
    num_dev of these. Test is the first num_test records of a permutation of `validation` with the same seed,
    or all of them if there are fewer. If `train` has too few records, MeZO's scripts keep dev at its full
    size and shrink train (WSC trains on 54 examples). Protocol "mezo" does the same; "clean" raises an error.

    Args:
        task: builds the examples and has the default sizes of both protocols.
        train: records that train and dev are drawn from.
        validation: records that test is drawn from.
        protocol: clean or mezo.
        seed: 0 to 2**32 - 1. The same seed and records give the same splits.
        num_train: number of training examples, at least 1. None takes the task's default, here and below.
        num_dev: number of dev examples, at least 0.
        num_test: maximum number of test examples, at least 0.

    Raises:
        UserError: there are too few records.
    """
    sizes = task.mezo_sizes if protocol == "mezo" else task.sizes
    num_train = sizes.num_train if num_train is None else num_train
    num_dev = sizes.num_dev if num_dev is None else num_dev
    num_test = sizes.num_test if num_test is None else num_test
    if num_train + num_dev > len(train):
        num_remaining = len(train) - num_dev
        if protocol == "clean" or num_remaining < 1:
            raise UserError(
                f"too few training records of {task.name} for num_train + num_dev",
                got=f"{len(train)} records for {num_train} + {num_dev}",
                expected=f"at most {len(train)} for both together",
                fix="set a smaller data.num_train or data.num_dev",
            )
        text = (
            "%s: %d training examples instead of %d, because MeZO's protocol takes %d of %d records for dev"
        )
        logger.warning(text, task.name, num_remaining, num_train, num_dev, len(train))
        num_train = num_remaining

    drawn = _permutation(seed, len(train))[: num_train + num_dev]
    return Splits(
        train=_build_examples(task, train, drawn[:num_train]),
        dev=_build_examples(task, train, drawn[num_train:]),
        test=_build_examples(task, validation, _permutation(seed, len(validation))[:num_test]),
    )


MAX_DRAWN_DEV, MAX_DRAWN_TEST = 500, 1000
"""The most records that are drawn from the training records for splits that are not given."""


def load_own_splits(
    task: Task,
    train: str,
    *,
    validation: str | None = None,
    test: str | None = None,
    seed: int = 0,
    num_train: int | None = None,
    num_dev: int | None = None,
    num_test: int | None = None,
) -> tuple[Splits, list[Record]]:
    """Read a user's own files. Draw the splits that have none from the training records.

    The records of a file that is given are taken in the order of a permutation by the seed. What is missing
    is the start of the permutation of the training records: first test, then dev; the rest is for training.
    So the test examples do not depend on the other sizes.

    Args:
        task: builds the examples.
        train: file or split on the hub, as in `read_source`; here and below.
        validation: the source of dev. None draws a fifth of `train`, at most MAX_DRAWN_DEV.
        test: the source of test. None draws a fifth of `train`, at most MAX_DRAWN_TEST.
        seed: 0 to 2**32 - 1. The same seed and files give the same splits.
        num_train: number of training examples. None takes all that are left.
        num_dev: number of dev examples. None takes all of the source.
        num_test: maximum number of test examples. None takes all of the source.

    Returns:
        The splits, and the records of the training examples in their order.

    Raises:
        UserError: a file cannot be read, a record does not fit the task, or there are too few records.
    """
    sources = {"train": train, "validation": validation, "test": test}
    found = {
        name: _answerable(task, name, read_source(f"data.{name}", source))
        for name, source in sources.items()
        if source is not None
    }
    rows = found["train"]
    order, drawn = _permutation(seed, len(rows)), {}
    for name, wanted, limit in (("test", num_test, MAX_DRAWN_TEST), ("validation", num_dev, MAX_DRAWN_DEV)):
        if name in found:
            drawn[name] = found[name], _permutation(seed, len(found[name]))[:wanted]
            continue
        size = wanted or min(limit, max(1, len(rows) // 5))
        drawn[name], order = (rows, order[:size]), order[size:]
        text = "data.%s is not given: %d of the %d records of %s are drawn for it, by data.seed=%d"
        logger.info(text, name, size, len(rows), train, seed)
    if len(order) < (num_train or 1) or (num_dev or 0) > len(drawn["validation"][1]):
        raise UserError(
            "there are too few records for data.num_train, data.num_dev and data.num_test",
            got=f"{len(order)} records of {train} for training, {len(drawn['validation'][1])} for validation",
            expected=f"at least {num_train or 1} and {num_dev or 1}",
            fix="set smaller numbers, or give more records",
        )
    order = order[:num_train]
    splits = Splits(
        train=_build_placed(task, rows, order),
        dev=_build_placed(task, *drawn["validation"]),
        test=_build_placed(task, *drawn["test"]),
    )
    return splits, [rows[row][1] for row in order]


def draw_demonstrations(
    seed: int, num_questions: int, num_records: int, *, count: int, own_rows: Sequence[int] = ()
) -> list[list[int]]:
    """Draw the records to show before each question, as MeZO's icl.sh does (Malladi et al. 2023).

    Question i has a seed: the i-th of `np.random.randint(0, 10000, size=num_questions)` under `seed`, which
    is 0 in MeZO's code. It is shown the first records of a permutation under that seed. The draw therefore
    depends on `seed`, on the question's place in its split and on the number of records only.

    Args:
        seed: 0 to 2**32 - 1.
        num_questions: number of questions.
        num_records: number of records to draw from, more than `count`.
        count: number of records to show before each question.
        own_rows: the row of each question among the records, which is not shown to it; empty if the
            questions come from other records.

    Returns:
        `count` different rows for each question, in the order in which they are shown.
    """
    seeds = np.random.RandomState(seed).randint(0, 10_000, num_questions).tolist()
    own = own_rows or [-1] * num_questions
    return [
        [row for row in _permutation(drawn, num_records)[: count + 1] if row != excluded][:count]
        for drawn, excluded in zip(seeds, own, strict=True)
    ]


def with_demonstrations(example: Example, shown: Sequence[Example]) -> Example:
    r"""Put solved examples before a question, for MeZO's in-context learning.

    A demonstration is a prompt with its right candidate, stripped of white space at both ends. A blank line
    follows each demonstration.

    Args:
        example: the question.
        shown: the solved examples, all labeled.

    >>> shown, asked = Example("2 + 2 = ", ("4\n",), 0, 0), Example("1 + 2 = ", ("3\n",), 0, 1)
    >>> with_demonstrations(asked, [shown, shown]).demonstrations
    '2 + 2 = 4\n\n2 + 2 = 4\n\n'
    """
    return replace(example, demonstrations="".join(f"{solved.solution}\n\n" for solved in shown))


def _permutation(seed: int, num_records: int) -> list[int]:
    # MeZO calls np.random.seed(seed) and np.random.permutation. RandomState gives the same stream without
    # changing NumPy's global state; np.random.default_rng would give another one.
    order: list[int] = np.random.RandomState(seed).permutation(num_records).tolist()
    return order


def _build_examples(task: Task, records: Sequence[Record], rows: Sequence[int]) -> tuple[Example, ...]:
    return tuple(replace(task.build_example(records[row], row), record=records[row]) for row in rows)


def _build_placed(task: Task, rows: Sequence[Row], order: Sequence[int]) -> tuple[Example, ...]:
    """Return the examples of some rows, which know where they come from."""
    places, records = [place for place, _ in rows], [record for _, record in rows]
    examples = _build_examples(task, records, order)
    return tuple(replace(example, place=places[example.index]) for example in examples)


def _split_names(task: Task) -> tuple[str, str]:
    return task.train_split, task.validation_split


def _load_hub(task: Task) -> list[list[Row]]:
    names = _split_names(task)
    files = " and ".join(f"{name}.jsonl" for name in names)
    if task.hub_id is None:
        raise UserError(
            f"task {task.name} has no data set on the hub",
            got="data.path=null, data.train=null",
            expected=f"a directory with {files}, or a file",
            fix="set data.path or data.train",
        )
    return read_hub(task.hub_id, task.hub_config, names, fix=f"set data.path to a directory with {files}")


def _load_local(path: Path, split: str) -> list[Row]:
    if not path.is_dir():
        raise UserError(
            "the data directory does not exist",
            got=str(path),
            expected=f"a directory with {split}.jsonl or {split}*.parquet",
            fix="correct data.path, or remove it to read the hub",
        )
    lines = path / f"{split}.jsonl"
    if lines.is_file():
        return read_file(lines)
    tables = sorted(path.glob(f"{split}*.parquet"))
    if not tables:
        raise UserError(
            f"no {split} split in {path}",
            got=", ".join(sorted(file.name for file in path.iterdir())) or "an empty directory",
            expected=f"{split}.jsonl or {split}*.parquet",
            fix="add the file, or correct data.path",
        )
    return [row for table in tables for row in read_file(table)]


def _answerable(task: Task, split: str, rows: Sequence[Row]) -> list[Row]:
    """Check all records of a split. Return the rows of those that have a right answer."""
    kept = []
    for number, (place, record) in enumerate(rows, start=1):
        where = f"record {number} of the {split} split of {task.name}{place}"
        if _checked_label(task, where, record) is not None or not task.has_answers:
            kept.append((place, record))
    num_left_out = len(rows) - len(kept)
    if not kept:
        raise UserError(
            f"the {split} split of {task.name} is empty",
            got=f"{num_left_out} records without an answer" if num_left_out else "no records",
            expected="at least one record that can be scored",
            fix="fill the file, or correct data.path",
        )
    if num_left_out:
        text = "%d of %d records of the %s split of %s have no right answer and are left out"
        logger.warning(text, num_left_out, len(rows), split, task.name)
    return kept


def _checked_label(task: Task, where: str, record: Record) -> int | None:
    _check_fields(task, where, record)
    try:
        example = task.build_example(record, 0)
    except UserError as error:
        raise UserError(f"{where} does not fit the task: {error}") from error
    if example.label is not None and not 0 <= example.label < len(example.candidates):
        raise UserError(
            f"{where} has no usable label",
            got=example.label,
            expected=f"0 to {len(example.candidates) - 1}",
            fix="remove records without a label (-1 in the test splits of the hub)",
        )
    return example.label


def _check_fields(task: Task, where: str, record: Record) -> None:
    for name, expected_type in task.fields.items():
        value: object = record
        for part in field_path(record, name):
            if not isinstance(value, Mapping) or part not in value:
                raise UserError(
                    f"{where} has no field {name}",
                    got=(", ".join(value) or "no fields") if isinstance(value, Mapping) else _shown(value),
                    expected=", ".join(task.fields),
                    fix=_fix_of_names(task, value, part),
                )
            value = value[part]
        if not _has_type(value, expected_type):
            raise UserError(
                f"field {name} of {where} has the wrong type",
                got=_shown(value),
                expected=str(expected_type) if get_args(expected_type) else expected_type.__name__,
                fix=f"use the field types of {task.hub_id or 'the task'}",
            )
        for text in _texts_in(value):
            _check_text(f"field {name} of {where}", text)


def _texts_in(value: object) -> Iterator[str]:
    """Yield every text in a value of a record, which may hold lists and sections."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(item)


def _fix_of_names(task: Task, found: object, wanted: str) -> str:
    if task.hub_id is not None:
        return f"use the field names of {task.hub_id}, or correct data.path"
    near = difflib.get_close_matches(wanted, found, n=1) if isinstance(found, Mapping) else []
    return f"did you mean {near[0]}?" if near else "write a field of the record into the recipe"


def _check_text(where: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"{where} is too long",
            got=f"{len(text)} characters",
            expected=f"at most {MAX_CHARACTERS}",
            fix="shorten it; data.max_length tokens of it would be used",
        )
    if not text.isascii() and (found := _LONE_SURROGATE.search(text)):
        raise UserError(
            f"{where} has half of a character (a lone surrogate)",
            got=ascii(text[max(0, found.start() - 20) : found.end() + 20]),
            expected="text that can be written as UTF-8",
            fix="remove it, or write the whole character",
        )


def _shown(value: object) -> str:
    """Return a value as an error shows it: cut off if it is long."""
    return cut(value if isinstance(value, str) else repr(value), 200)


def _has_type(value: object, expected_type: type) -> bool:
    """Return whether a value has exactly this type, so that True is not an int.

    >>> _has_type(["a"], list[str]), _has_type(["a", None], list[str]), _has_type(True, int)
    (True, False, False)
    """
    if expected_type is object:
        return True
    if get_origin(expected_type) is list:
        (item_type,) = get_args(expected_type)
        return isinstance(value, list) and all(type(item) is item_type for item in value)
    return type(value) is expected_type
