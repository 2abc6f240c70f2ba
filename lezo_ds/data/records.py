"""Records of a task, from the hub or a local directory; what MeZO samples from them, and demonstrations."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args, get_origin

import datasets
import numpy as np
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from lezo_ds.errors import HubError, UserError
from lezo_ds.tasks.base import Example, Protocol, Record, Task

logger = logging.getLogger(__name__)

NUM_SEEDS = 2**32  # numpy's legacy generator takes no larger seed


@dataclass(frozen=True)
class Splits:
    """What a run trains on, picks its best step by, and is scored on."""

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]


def load_records(task: Task, path: Path | None) -> tuple[list[Record], list[Record]]:
    """Read the task's training and validation records and check every one of them.

    A record whose example has no right answer (no answer at all, or none among its candidates) is
    left out; one warning a split says how many were.

    Args:
        task: the task to read.
        path: directory that holds train.jsonl and validation.jsonl, or train*.parquet and
            validation*.parquet, with the fields of the hub's data set; None reads the hub
            (or its local cache, where HF_HUB_OFFLINE is set).

    Raises:
        UserError: nothing there, an empty split, a field missing or of another type, a label that
            names no candidate, no record with an answer.
    """
    splits = _load_hub(task) if path is None else [_load_local(path, name) for name in _split_names(task)]
    train, validation = (
        _answerable(task, name, records) for name, records in zip(_split_names(task), splits, strict=True)
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

    The first num_train + num_dev of a permutation of `train`: the last num_dev of them are dev, the
    rest train. Test is the first num_test of a permutation of `validation` under the same seed, or
    all of it where it is smaller. Asked for more than `train` holds, MeZO's scripts keep dev whole
    and shrink train (WSC trains on 54 examples); protocol "mezo" repeats that, "clean" refuses.

    Args:
        task: builds the examples and knows the default sizes of either protocol.
        train: records that train and dev are drawn from.
        validation: records that test is drawn from.
        protocol: clean or mezo.
        seed: 0 to 2**32 - 1; the same seed and records give the same splits.
        num_train: training examples, at least 1; None for the task's default, as in the next two.
        num_dev: dev examples, at least 0.
        num_test: test examples at most, at least 0.

    Raises:
        UserError: a size or the seed is out of range, or there are too few examples.
    """
    sizes = task.mezo_sizes if protocol == "mezo" else task.sizes
    num_train = sizes.num_train if num_train is None else num_train
    num_dev = sizes.num_dev if num_dev is None else num_dev
    num_test = sizes.num_test if num_test is None else num_test
    _check_range("seed", seed, 0, NUM_SEEDS - 1)
    _check_range("num_train", num_train, 1)
    _check_range("num_dev", num_dev, 0)
    _check_range("num_test", num_test, 0)
    num_train = _available_train(task, len(train), protocol, num_train, num_dev)

    drawn = _permutation(seed, len(train))[: num_train + num_dev]
    return Splits(
        train=_build_examples(task, train, drawn[:num_train]),
        dev=_build_examples(task, train, drawn[num_train:]),
        test=_build_examples(task, validation, _permutation(seed, len(validation))[:num_test]),
    )


def with_demonstrations(
    examples: Sequence[Example], demonstrations: Sequence[Example]
) -> tuple[Example, ...]:
    r"""Put solved examples before each question: in-context learning as MeZO does it.

    A demonstration is its prompt and right candidate, stripped of white space at both ends; a blank
    line stands between one and the next, and before the question. Null prompts get none.

    Args:
        examples: the questions.
        demonstrations: all labelled; MeZO shows the first 32 training examples, in their order.

    >>> shown, asked = Example("2 + 2 = ", ("4\n",), 0, 0), Example("1 + 2 = ", ("3\n",), 0, 1)
    >>> with_demonstrations([asked], [shown, shown])[0].prompt
    '2 + 2 = 4\n\n2 + 2 = 4\n\n1 + 2 = '
    """
    shown = "".join(_solved(example) + "\n\n" for example in demonstrations)
    return tuple(replace(example, prompt=shown + example.prompt.lstrip(" ")) for example in examples)


def _solved(example: Example) -> str:
    if example.label is None:
        raise ValueError("a demonstration needs a label")
    return (example.prompt + example.candidates[example.label]).strip()


def _permutation(seed: int, num_records: int) -> list[int]:
    # The stream of np.random.seed(seed); np.random.permutation(num_records), without the global state.
    order: list[int] = np.random.RandomState(seed).permutation(num_records).tolist()
    return order


def _build_examples(task: Task, records: Sequence[Record], rows: Sequence[int]) -> tuple[Example, ...]:
    return tuple(task.build_example(records[row], row) for row in rows)


def _check_range(name: str, value: int, low: int, high: int | None = None) -> None:
    if value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise UserError(f"{name} is out of range", got=value, expected=expected)


def _available_train(task: Task, num_records: int, protocol: Protocol, num_train: int, num_dev: int) -> int:
    """Return how many training examples there are to draw, at most `num_train`."""
    if num_train + num_dev <= num_records:
        return num_train
    if protocol == "mezo" and num_dev < num_records:
        remaining = num_records - num_dev
        logger.warning(
            "%s: %d training examples instead of %d: MeZO's protocol takes %d of the %d for dev",
            *(task.name, remaining, num_train, num_dev, num_records),
        )
        return remaining
    raise UserError(
        f"too few training records of {task.name} for num_train + num_dev",
        got=f"{num_records} records for {num_train} + {num_dev}",
        expected=f"at most {num_records} in both together",
        fix="set a smaller data.num_train or data.num_dev",
    )


def _split_names(task: Task) -> tuple[str, str]:
    return task.train_split, task.validation_split


def _load_hub(task: Task) -> list[list[Record]]:
    try:
        splits = datasets.load_dataset(task.hub_id, task.hub_config, split=list(_split_names(task)))
    except Exception as error:  # offline, refused, gone, renamed: each library below has its own family
        raise HubError(
            f"cannot load {task.hub_id} ({task.hub_config or 'default'}) from the Hugging Face hub",
            got=f"{type(error).__name__}: {error}".splitlines()[0],
            expected="the hub within reach, or the data set in its local cache",
            fix=f"set data.path to a directory with {' and '.join(f'{s}.jsonl' for s in _split_names(task))}",
        ) from error
    return [split.to_list() for split in splits]


def _load_local(path: Path, split: str) -> list[Record]:
    if not path.is_dir():
        raise UserError(
            "the data directory does not exist",
            got=str(path),
            expected=f"a directory with {split}.jsonl or {split}*.parquet",
            fix="correct data.path, or leave it out to read the hub",
        )
    lines = path / f"{split}.jsonl"
    if lines.is_file():
        return _read_json_lines(lines)
    tables = sorted(path.glob(f"{split}*.parquet"))
    if not tables:
        raise UserError(
            f"no {split} split in {path}",
            got=", ".join(sorted(file.name for file in path.iterdir())) or "an empty directory",
            expected=f"{split}.jsonl or {split}*.parquet",
            fix="add the file, or correct data.path",
        )
    return [record for table in tables for record in _read_parquet(table)]


def _read_json_lines(path: Path) -> list[Record]:
    records: list[Record] = []
    with path.open("rb") as file:  # bytes: json then reports a wrong encoding by line, too
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(
                    f"{path} line {number} is not JSON",
                    got=line[:80],
                    expected="a JSON object on each line",
                    fix="correct the line",
                ) from error
            if not isinstance(record, dict):
                raise UserError(
                    f"{path} line {number} is not a record",
                    got=record,
                    expected="a JSON object",
                    fix="correct the line",
                )
            records.append(record)
    return records


def _read_parquet(path: Path) -> list[Record]:
    try:
        records: list[Record] = ParquetFile(path).read().to_pylist()
    except (OSError, ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as parquet",
            got=str(error),
            expected="a parquet file",
            fix="download it again, or use .jsonl",
        ) from error
    return records


def _answerable(task: Task, split: str, records: Sequence[Record]) -> list[Record]:
    """Check all records of a split; return those that have a right answer."""
    labels = [_checked_label(task, split, row, record) for row, record in enumerate(records)]
    kept = [record for record, label in zip(records, labels, strict=True) if label is not None]
    num_left_out = len(records) - len(kept)
    if not kept:
        raise UserError(
            f"the {split} split of {task.name} is empty",
            got=f"{num_left_out} records without an answer" if num_left_out else "no records",
            expected="at least one record that can be scored",
            fix="fill the file, or correct data.path",
        )
    if num_left_out:
        logger.warning(
            "%d of %d records of the %s split of %s have no right answer and are left out",
            *(num_left_out, len(records), split, task.name),
        )
    return kept


def _checked_label(task: Task, split: str, row: int, record: Record) -> int | None:
    where = f"record {row + 1} of the {split} split of {task.name}"
    _check_fields(task, where, record)
    example = task.build_example(record, row)
    if example.label is not None and not 0 <= example.label < len(example.candidates):
        raise UserError(
            f"{where} has no usable label",
            got=example.label,
            expected=f"0 to {len(example.candidates) - 1}",
            fix="leave out records without labels (-1, as in the test splits of the hub)",
        )
    return example.label


def _check_fields(task: Task, where: str, record: Record) -> None:
    for name, expected_type in task.fields.items():
        value: object = record
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise UserError(
                    f"{where} has no field {name}",
                    got=(", ".join(value) or "no fields") if isinstance(value, Mapping) else value,
                    expected=", ".join(task.fields),
                    fix=f"name the fields as {task.hub_id} does, or correct data.path",
                )
            value = value[part]
        if not _has_type(value, expected_type):
            raise UserError(
                f"field {name} of {where} has the wrong type",
                got=value,
                expected=str(expected_type) if get_args(expected_type) else expected_type.__name__,
                fix=f"give the fields the types that {task.hub_id} does",
            )


def _has_type(value: object, expected_type: type) -> bool:
    """Say whether a value is exactly of a type; True is no int.

    >>> _has_type(["a"], list[str]), _has_type(["a", None], list[str]), _has_type(True, int)
    (True, False, False)
    """
    if get_origin(expected_type) is list:
        (item_type,) = get_args(expected_type)
        return isinstance(value, list) and all(type(item) is item_type for item in value)
    return type(value) is expected_type
