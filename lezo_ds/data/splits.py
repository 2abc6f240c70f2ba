"""The examples of a run: records are checked, and split as MeZO splits them.

Training records come from data.train, or from the file train in data.path. A split without a file
of its own takes records from there, in an order that data.seed decides:

    records, in the order of a split     [ test | train ............ | dev ]
    data.test, data.validation           test and dev, if they have files
    data.path                            its file validation is the test split, as in MeZO

So a split is a function of the files, the sizes and the seed. Bad records are refused together, in
one message, before a model is loaded.

A record is stored as JSON text. Building its example again takes microseconds, and 200,000 records
stay in a file that all ranks of a machine map into their memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lezo_ds.config import DataConfig
from lezo_ds.config.schema import CUSTOM
from lezo_ds.data.examples import Example
from lezo_ds.data.records import SUFFIXES, read_records
from lezo_ds.data.tasks import SplitSizes, Task
from lezo_ds.errors import UserError, cut

logger = logging.getLogger(__name__)

_MOST_DRAWN = {"test": 1000, "dev": 500}
"""A split without a file takes a fifth of data.train, at most this number of records."""
_NUM_SHOWN = 3
"""Different reasons that a message lists, if several records cannot be used."""
_FEW = 0.2
"""If at most this share of the records cannot be used, the mistake is in the records, not in the
recipe."""
_FEWEST_TO_TELL = 30
"""Choices with the index 0 are expected among so many records."""


def sources_of(task: Task, data: DataConfig) -> dict[str, str]:
    """Return the sources of train, and of dev and test if they have their own, by split.

    Raises:
        UserError: data.path lacks a file, or the task has no data set on the Hub.
    """
    own = {"train": data.train, "dev": data.validation, "test": data.test}
    if any(own.values()):
        return {split: source for split, source in own.items() if source is not None}
    if data.path is not None:
        directory = Path(data.path)
        return {"train": _file_of(directory, "train"), "test": _file_of(directory, "validation")}
    if task.hub_id is None:
        raise UserError(
            f"task {task.name} has no data set on the Hub", fix="set data.train or data.path"
        )
    name = "/".join(filter(None, (task.hub_id, task.hub_config)))
    return {"train": f"{name}:train", "test": f"{name}:validation"}


def _file_of(directory: Path, split: str) -> str:
    """Return the only file of a split in data.path."""
    named = [*directory.glob(f"{split}.*"), *directory.glob(f"{split}-*")]
    found = [path for path in sorted(named) if path.suffix in SUFFIXES]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise UserError(
            f"data.path={directory} has {len(found)} files of the split {split}: {names}",
            fix=f"leave one, such as {split}.jsonl, or set data.train and data.test",
        )
    return str(found[0])


def read_split(
    task: Task, data: DataConfig, source: str, classes: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the examples of a source that have a right answer, or all if the task has no answers.

    Each has the keys record, as JSON text; row, its number in the source from 0; label, -1 if there
    is none; and key, a hash of what the model reads, without its case and spacing.

    Args:
        task: of the records.
        data: the section data of the recipe.
        source: a file, or a split on the Hub.
        classes: the candidates of the first record of all sources, which is added.

    Raises:
        UserError: the source cannot be read, or records do not fit the task.
    """
    problems: dict[str, str] = {}
    num_records = 0
    num_unanswered = 0
    for record in read_records(source, data.separator, data.encoding):
        num_records += 1
        try:
            text = json_text(record)
            example = checked_example(task, text)
            texts = [candidate.strip() for candidate in example.candidates]
            if not classes:
                classes += texts
            if task.has_classes and texts and texts != classes:
                raise UserError(
                    f"it has the candidates {texts}, and the first record has {classes}",
                    fix=f"let build_example of {task.name} give all records the same candidates, "
                    "or make it a MultipleChoice",
                )
        except UserError as error:
            problems[f"row {num_records} of {source}"] = str(error)
            continue
        if example.label is None and task.has_answers:
            num_unanswered += 1
        else:
            label = -1 if example.label is None else example.label
            row = num_records - 1
            yield {"record": text, "row": row, "label": label, "key": _key(example)}
    if num_unanswered:
        logger.warning(
            "%d of %d records of %s have no right answer and are left out",
            num_unanswered,
            num_records,
            source,
        )
    refuse_together(problems, num_records, skip=data.skip_unusable)
    if num_unanswered + len(problems) == num_records:
        raise UserError(
            f"none of the {num_records} records of {source} has an answer",
            fix="correct the file (turns to learn have the role assistant, or gpt); if a reward "
            "judges the answers, set data.prompt alone",
        )


def json_text(record: Mapping[str, Any]) -> str:
    """Return a record as JSON text. Values that JSON lacks, such as dates, are written by `str`.

    Of bytes, their number is in a list, which no template takes for a text.
    """
    return json.dumps(
        record,
        ensure_ascii=False,
        default=lambda value: [f"{len(value)} bytes"] if isinstance(value, bytes) else str(value),
    )


def checked_example(task: Task, text: str) -> Example:
    """Return the example of a record, which is JSON text. UserError: it cannot be used."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError("it has half of a character", fix="remove it") from error
    example = task.example(json.loads(text))
    has_image = example.record.get("images") or example.record.get("image")
    texts = [example.prompt, *(turn["content"] for turn in example.messages)]
    if has_image and any("<image>" in text for text in texts):
        raise UserError(
            "it has images, and a text with <image>",
            fix="use a model and records of text alone: no images are read",
        )
    return example


def refuse_together(problems: Mapping[str, str], num_records: int, *, skip: bool) -> None:
    """Refuse records that cannot be used in one message, or warn that they are left out.

    Args:
        problems: the text of the UserError of each, by where it is.
        num_records: number of all records.
        skip: whether they are left out, unless these are all.

    Raises:
        UserError: they must be used.
    """
    if not problems:
        return
    places: dict[str, str] = {}
    fixes: Counter[str] = Counter()
    for where, text in problems.items():
        problem, _, fix = text.partition("; fix: ")
        places.setdefault(problem, where)
        fixes[fix] += 1
    shown = [cut(f"{where}: {problem}", 300) for problem, where in places.items()]
    if len(shown) > _NUM_SHOWN:
        shown[_NUM_SHOWN:] = ["and others"]
    message = f"{len(problems)} of {num_records} records cannot be used: {'; '.join(shown)}"
    if skip and len(problems) < num_records:
        logger.warning("left out: %s", message)
        return
    ((fix, _),) = fixes.most_common(1)
    if len(problems) <= _FEW * num_records:
        fix += ", or leave out such records: data.skip_unusable=true"
    raise UserError(message, fix=fix)


def _key(example: Example) -> int:
    """Return a hash of what the model reads of an example, without its case and spacing."""
    turns = [turn["content"] for turn in example.messages[:-1]]
    choices = example.candidates if len(example.candidates) > 1 else ()
    words = example.prompt.casefold().split()
    content = repr((" ".join(words), turns, choices))
    digest = hashlib.blake2b(content.encode(), digest_size=7)
    return int.from_bytes(digest.digest(), "little")


BySplit = dict[str, np.ndarray]
"""Values for "train", "dev" and "test"."""


def draw_splits(task: Task, data: DataConfig, labels: BySplit, keys: BySplit) -> BySplit:
    """Return which examples of its source each split has, by index (see the module's docstring).

    Args:
        task: the task.
        data: the section data of the recipe.
        labels: of all examples of each source, by split. Without train, a split has its own file.
        keys: likewise, the hashes of what the model reads.

    Raises:
        UserError: there are too few examples.
    """
    sizes = task.mezo_sizes if data.protocol == "mezo" else task.sizes
    if data.train is not None or data.task == CUSTOM:  # sizes are those of data sets on the Hub
        sizes = SplitSizes(num_train=None, num_dev=None, num_test=None)
    wanted = {
        split: getattr(data, f"num_{split}") or getattr(sizes, f"num_{split}")
        for split in ("train", "dev", "test")
    }
    order = {split: _in_order(task, data.seed, of_split) for split, of_split in labels.items()}
    for split, found in order.items():
        number = getattr(data, f"num_{split}") or 0
        if number > len(found):
            raise UserError(
                f"data.num_{split}={number} is more than the {len(found)} records of its file",
                fix=f"set a smaller data.num_{split}",
            )
    if "train" not in order:
        return {split: rows[: wanted[split]] for split, rows in order.items()}
    left = order["train"]
    num_records = len(left)
    _refuse_no_first_choice(task, labels["train"])
    drawn = {}  # numbers of records that splits without a file take
    for split, most in _MOST_DRAWN.items():
        if split not in order:
            drawn[split] = wanted[split] or min(most, max(1, num_records // 5))
    test = order.get("test", left)[: drawn.get("test", wanted["test"])]
    left = left[drawn.get("test", 0) :]
    num_drawn = drawn.get("dev", 0)
    num_wanted = wanted["train"] or max(1, len(left) - num_drawn)
    num_train = min(num_wanted, len(left) - num_drawn)
    if num_train < num_wanted:
        problem = (
            f"{num_records} training records are too few for {num_wanted} to train on, {num_drawn} "
            "for dev and those for test"
        )
        if data.protocol == "clean" or num_train < 1:
            sizes_to_set = " or ".join(f"data.num_{split}" for split in ("train", *drawn))
            raise UserError(problem, fix=f"add records, or set a smaller {sizes_to_set}")
        logger.warning("%s: MeZO's protocol trains on %d", problem, num_train)
    dev = order.get("dev", left[num_train:])[: drawn.get("dev", wanted["dev"])]
    rows = {"train": left[:num_train], "dev": dev, "test": test}
    return _without_repeats(task, rows, labels, keys)


def _in_order(task: Task, seed: int, labels: np.ndarray) -> np.ndarray:
    """Return the indices of examples in the order in which splits take them.

    If the task keeps shares, the k-th of the n examples of a label comes after the part
    (k + 1/2) / n of all, so that each split has about the same share of every label.
    """
    # The stream of MeZO's np.random.seed(seed) and np.random.permutation, without global state.
    shuffled = np.random.RandomState(seed).permutation(len(labels))
    if not task.keeps_shares:
        return shuffled
    drawn = pd.Series(labels[shuffled])
    of_label = drawn.groupby(drawn)
    places = (of_label.cumcount() + 0.5) / of_label.transform("size")
    return shuffled[np.argsort(places.to_numpy(), kind="stable")]


def _refuse_no_first_choice(task: Task, labels: np.ndarray) -> None:
    """Refuse choices of which the first is never right: their numbers may begin at 1."""
    is_by_index = task.kind == "multiple_choice" and task.hub_id is None and not task.labels
    if is_by_index and len(labels) >= _FEWEST_TO_TELL and labels.min() > 0:
        raise UserError(
            f"none of {len(labels)} records has the first choice as the right one, and indices "
            "count from 0",
            fix="list in data.labels what the column holds for the first, second, ... choice, such "
            "as data.labels=1,2,3,4",
        )


def _without_repeats(task: Task, drawn: BySplit, labels: BySplit, keys: BySplit) -> BySplit:
    """Leave out test examples that repeat what the model reads in another split, and say so."""
    of_train = labels["train"][drawn["train"]]
    if task.has_classes and len(np.unique(of_train)) == 1:
        logger.warning("all %d training records have the same label", len(of_train))
    if task.hub_id is not None:  # the splits are those of the papers
        return drawn
    kept = dict(drawn)
    seen = keys["train"][drawn["train"]]
    for split in ("dev", "test"):
        own = keys.get(split, keys["train"])[drawn[split]]
        is_new = ~np.isin(own, seen)
        seen = np.concatenate([seen, own])
        if is_new.all():
            continue
        if split == "test" and is_new.any():
            kept["test"] = drawn["test"][is_new]
        logger.warning(
            "%d of %d %s records repeat the text of records that come before them, in the order "
            "train, dev, test; %d stay",
            int((~is_new).sum()),
            len(own),
            split,
            len(kept[split]),
        )
    return kept


def with_demonstrations(
    data: DataConfig,
    questions: Sequence[Example],
    pool: Sequence[Example],
    train: Sequence[Example],
    as_read: Callable[[Example], Example],
) -> list[Example]:
    """Put data.num_demonstrations solved examples before every question, each with a blank line.

    They are the first training examples, the same for all questions. With protocol mezo, they are
    drawn for each question, as MeZO's icl.sh does: question i has a seed, the i-th of
    `np.random.randint(0, 10000, size=number of questions)` under data.seed, and is shown the first
    examples of a permutation of the pool under that seed, without itself.

    Args:
        data: the section data of the recipe.
        questions: examples of a split.
        pool: all training records.
        train: those that the run trains on.
        as_read: (example) -> the example as the model reads it.

    Raises:
        UserError: there are fewer examples.
    """
    count = data.num_demonstrations
    per_question = data.protocol == "mezo"
    available = len(pool) - 1 if per_question else len(train)
    if count > available:
        raise UserError(
            f"data.num_demonstrations={count} is more than the {available} examples",
            fix=f"set data.num_demonstrations={available}, or add training examples",
        )
    seeds = np.random.RandomState(data.seed).randint(0, 10_000, len(questions))
    shown = _solved(map(as_read, train[:count]))
    asked = []
    for question, seed in zip(questions, seeds, strict=True):
        if per_question:
            rows = np.random.RandomState(seed).permutation(len(pool))[: count + 1]
            others = [pool[row] for row in rows if pool[row] is not question]
            shown = _solved(map(as_read, others[:count]))
        asked.append(replace(question, demonstrations=shown))
    return asked


def _solved(examples: Iterable[Example]) -> str:
    """Return examples with their right answers, with a blank line after each."""
    texts = [example.prompt + answer for example in examples for answer in example.gold_texts]
    return "".join(f"{text.strip()}\n\n" for text in texts)
