"""The examples of a recipe, from records to rows that the ranks of a machine share.

    records (records.py)             read once for each machine, checked, and stored
      |  splits.draw_splits          which of them each split has
      |  reader.Reader               as token ids and masks, by several processes
    rows (reader.EncodedSplit)

Stored records and rows are Arrow files, which are written once and mapped into the memory of each
rank. The first rank of each machine writes, and the others wait:

    cache/lezo_ds/KEY/data.arrow     kept for the next start, if all that decides it is known
    tmp/lezo_ds-RANDOM/data.arrow    else, and removed once all ranks have mapped it

The key is a hash of all that decides the content. A start with the same key finds the files there.
All of this happens before weights are loaded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from transformers.utils import CHAT_TEMPLATE_DIR

import lezo_ds
from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.config import RunConfig
from lezo_ds.data.described import find_task
from lezo_ds.data.examples import Example
from lezo_ds.data.metrics import load_score, try_metric
from lezo_ds.data.objectives import Objective, load_objective
from lezo_ds.data.reader import FEATURES, EncodedSplit, Lazy, Reader, column_of, load_reader
from lezo_ds.data.splits import (
    draw_splits,
    read_split,
    refuse_together,
    sources_of,
    with_demonstrations,
)
from lezo_ds.data.tasks import Task
from lezo_ds.errors import LezoError, UserError
from lezo_ds.files import sha256_file
from lezo_ds.registry import names_code

logger = logging.getLogger(__name__)

_STORED = datasets.Features(
    {
        "record": datasets.Value("string"),
        "row": datasets.Value("int64"),
        "label": datasets.Value("int32"),
        "key": datasets.Value("int64"),
    }
)
_OF_A_PROCESS = 2000  # records that are worth a process of their own
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_LIBRARIES = ("transformers", "tokenizers", "pandas", "pyarrow")
_TRIED = 8  # examples on which a user's metric and reward are tried
_FEWEST_BYTES = 1 << 23
"""Smaller sources are read faster than a cache of them is worth."""


class Examples:
    """The examples of a recipe's splits, before they are encoded. Reading them is a collective.

    Attributes:
        reader: how the model reads them.
        rows: which examples of its source each split has.
    """

    def __init__(self, config: RunConfig, only: str | None = None) -> None:
        """Read, check and split the records of a recipe.

        Args:
            config: the recipe.
            only: a split to score. If it has a file of its own, no other file is read, unless
                solved examples are shown.

        Raises:
            UserError: data cannot be read or do not fit the task, or the user's reward or metric
                fails on a few examples.
        """
        data = config.data
        task = find_task(data)
        objective = load_objective(config.train.objective, task)
        _check_objective(config, task, objective)
        self.reader = load_reader(task, config, objective, shows_examples=only is not None)
        sources = sources_of(task, data)
        if only in sources and not data.num_demonstrations:
            sources = {only: sources[only]}
        self._sources = sources
        self._task = task
        self._keys = {split: self._key(config, split) for split in sources}  # a file is read once
        self._classes: list[str] = []
        self._stored = {split: self._read(config, split) for split in sources}
        labels = {}
        keys = {}
        for split, rows in self._stored.items():
            labels[split] = column_of(rows, "label")
            keys[split] = column_of(rows, "key")
        self.rows = draw_splits(task, data, labels, keys)
        source = next(iter(sources))
        num_tried = min(_TRIED, len(self._stored[source]))
        tried = [self._example(source, row) for row in range(num_tried)]
        if objective.rewards is not None:
            objective.rewards.try_out(tried)
        try_metric(task, tried)

    def split(self, name: str) -> EncodedSplit:
        """Return a split, "train", "dev" or "test", as token ids. A collective.

        Raises:
            UserError: an example cannot be encoded, or does not fit the model.
        """
        rows = self.rows[name]
        source = name if name in self._sources else "train"
        examples: Sequence[Example] = Lazy(
            len(rows), lambda place: self._example(source, rows[place])
        )
        config = self.reader.config
        if config.data.num_demonstrations and name != "train":
            examples = self._with_demonstrations(name, source, rows)
        key = self._keys[source]
        if key is not None:
            key = _hash_of(key, name, rows.tobytes())
        file = self._sources[source]
        encoded = shared_dataset(
            key, lambda folder: _encode(folder, self.reader, examples, name, file)
        )
        split = self.reader.checked(EncodedSplit(encoded, examples))
        if name == "test":
            self.reader.warn_of_unreachable(split)
        return split

    def _example(self, source: str, row: int) -> Example:
        stored = self._stored[source][int(row)]
        example = self._task.example(json.loads(stored["record"]))
        return replace(example, index=stored["row"])

    def _with_demonstrations(self, name: str, source: str, rows: np.ndarray) -> list[Example]:
        num_records = len(self._stored["train"])
        pool = [self._example("train", row) for row in range(num_records)]
        questions = [self._example(source, row) for row in rows]
        if source == "train":
            questions = [pool[row] for row in rows]
        train = [pool[row] for row in self.rows["train"]]
        data = self.reader.config.data
        return with_demonstrations(data, questions, pool, train, self.reader.as_read)

    def _read(self, config: RunConfig, split: str) -> Dataset:
        """Return the stored examples of a source. A collective."""
        source = self._sources[split]

        def write(folder: Path) -> None:
            with ArrowWriter(features=_STORED, path=str(folder / "data.arrow")) as writer:
                for row in read_split(self._task, config.data, source, self._classes):
                    writer.write(row)
                writer.finalize()

        return shared_dataset(self._keys[split], write)

    def _key(self, config: RunConfig, source: str) -> str | None:
        """Return the key of the cache of a source; None if the source is small, or if in doubt.

        It is None, too, on the ranks that do not write, so that one rank of a machine reads the
        files.
        """
        path = Path(self._sources[source])
        code = [config.data.task, config.data.metric or "", *config.train.objectives]
        if config.data.num_demonstrations or any(map(names_code, code)) or not _writes():
            return None
        if not path.is_file() or path.stat().st_size < _FEWEST_BYTES:
            return None
        model = resolve_model(config.model.path)
        texts = sorted([*model.iterdir(), *model.glob(f"{CHAT_TEMPLATE_DIR}/*")])
        files = [path, *(file for file in texts if file.suffix in _TOKENIZER_SUFFIXES)]
        recipe = config.model_dump(include={"data", "generation"})
        versions = [importlib.metadata.version(name) for name in _LIBRARIES]
        objective = str(config.train.objective)
        hashes = list(map(sha256_file, files))
        day = self.reader.tokenizer.today.date() if config.data.in_chat else None
        columns = (_STORED, FEATURES)
        return _hash_of(hashes, recipe, day, lezo_ds.__version__, versions, objective, columns)


def _encode(
    folder: Path, reader: Reader, examples: Sequence[Example], name: str, source: str
) -> None:
    """Write the rows of a split of a source by several processes, with a progress bar.

    Raises:
        UserError: some examples cannot be encoded.
    """
    global _work
    _work = partial(reader.columns_of, examples, is_training=name == "train")
    if len(examples) < _OF_A_PROCESS:
        datasets.disable_progress_bars()
    num_processes = min(len(os.sched_getaffinity(0)), len(examples) // _OF_A_PROCESS + 1)
    places = Dataset.from_dict({"place": list(range(len(examples)))})
    encoded = places.map(
        _encode_some,
        batched=True,
        batch_size=1000,
        input_columns="place",
        remove_columns="place",
        features=FEATURES,
        cache_file_name=str(folder / "rows.arrow"),
        num_proc=num_processes if num_processes > 1 else None,
        load_from_cache_file=False,
        new_fingerprint="lezo_ds",
        desc=f"encoding {name}",
    )
    datasets.enable_progress_bars()
    _work = None
    place = column_of(encoded, "place")
    refused = np.flatnonzero(place < 0).tolist()
    problems = {}
    for row in refused:
        example = examples[-1 - place[row]]
        problems[f"row {example.index + 1} of {source}"] = encoded[row]["digest"]
    refuse_together(problems, len(examples), skip=reader.config.data.skip_unusable)
    if refused:
        parts = list(folder.glob("*.arrow"))
        kept = encoded.select(np.flatnonzero(place >= 0))
        kept.flatten_indices(cache_file_name=str(folder / "kept.arrow"), features=FEATURES)
        for part in parts:
            part.unlink()


_work: Callable[[list[int]], dict[str, list[Any]]] | None = None
"""What `_encode_some` calls. Its processes inherit it when they are forked."""


def _encode_some(places: list[int]) -> dict[str, list[Any]]:
    assert _work is not None
    return _work(places)


def _check_objective(config: RunConfig, task: Task, objective: Objective) -> None:
    """Refuse an objective that does not fit the task."""
    if (load_score(task) is None or not task.has_answers) and not objective.is_reward:
        needs = "data.metric=reward" if task.has_answers else "a task without right answers"
        raise UserError(
            f"{needs} needs a reward, not train.objective={config.train.objective}",
            fix="set train.objective=package.module:function, a function with the decorator "
            "`reward`, or add data.labels, data.choices or data.completion",
        )


def shared_dataset(key: str | None, write: Callable[[Path], None]) -> Dataset:
    """Return the rows that `write` puts into Arrow files of a folder. A collective.

    Args:
        key: of the cache; None if the rows are not to be kept.
        write: (folder) -> None, on one rank of each machine.

    Raises:
        LezoError: what `write` raises, on all ranks.
    """
    outcome: Path | LezoError | None = None
    if _writes():
        try:
            outcome = _provide(None if key is None else _cache() / key, write)
        except LezoError as error:
            outcome = error
    outcomes = [outcome]
    writer = 0
    is_shared = distributed.world_size() > 1
    if is_shared:
        outcomes = distributed.gather_objects(outcome)
        writer = distributed.rank() - distributed.local_rank()  # the first rank of this machine
    for each in outcomes:
        if isinstance(each, LezoError):
            raise each
    folder = outcomes[writer]
    assert isinstance(folder, Path)
    files = sorted(folder.glob("*.arrow"))
    rows = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    if is_shared:
        distributed.barrier()
    if folder.parent != _cache():
        shutil.rmtree(folder, ignore_errors=True)  # mapped files stay until they are closed
    return rows


def _writes() -> bool:
    """Return whether this rank writes files. Before ranks have joined, each writes for itself."""
    return distributed.world_size() == 1 or distributed.local_rank() == 0


def _cache() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE) / "lezo_ds"


def _provide(kept: Path | None, write: Callable[[Path], None]) -> Path:
    """Return the folder of the files: the one in the cache, or else a temporary one."""
    if kept is not None and kept.is_dir():
        return kept
    temporary = Path(tempfile.mkdtemp(prefix="lezo_ds-"))
    try:
        write(temporary)
    except (LezoError, OSError):  # it may be what filled the disk
        shutil.rmtree(temporary)
        raise
    if kept is None:
        return temporary
    part = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(temporary, part)
        part.replace(kept)
    except OSError:  # a home that is full or read-only, or another run was faster
        shutil.rmtree(part, ignore_errors=True)
        return temporary
    shutil.rmtree(temporary, ignore_errors=True)
    return kept


def _hash_of(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]
