"""The data of a run, from records to the batch of a step.

    records (records.py)             read once for each machine, checked, and stored
      |  splits.draw_splits          which of them each split has
      |  reader.Reader               as token ids and masks, by several processes
    rows (reader.EncodedSplit)       an Arrow file that all ranks of a machine share (store.py)
      |  batches, generation         as tensors

All of this happens before weights are loaded. A step then draws rows by the run's seed and lays
them out as micro-batches, each of which one forward pass runs:

    drawn           batch_size rows of the stream of permutations (batches.batch_indices)
    in order        sorted by length, to have little padding; or dealt, if rows are shared
    micro-batches   [ row row row | row row row | ... ]    micro_batch_size rows each

All of this is a pure function of the configuration and the step, so a run resumes at any step, on
any number of ranks, with the same batches.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from torch import Tensor

import lezo_ds
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.config import RunConfig
from lezo_ds.data.batches import batch_indices
from lezo_ds.data.described import find_task
from lezo_ds.data.examples import Example
from lezo_ds.data.metrics import REWARD, try_metric
from lezo_ds.data.objectives import Objective, load_objective, training_objective, try_loss
from lezo_ds.data.packing import FEWEST_DEALT, can_pack, deal, pack
from lezo_ds.data.reader import FEATURES, EncodedSplit, Lazy, Reader, load_reader
from lezo_ds.data.splits import (
    draw_splits,
    read_split,
    refuse_together,
    sources_of,
    with_demonstrations,
)
from lezo_ds.data.store import key_of, key_of_part, shared_dataset
from lezo_ds.data.tasks import Task
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch, StepBatch
from lezo_ds.registry import names_code
from lezo_ds.zo.keys import sample_key

logger = logging.getLogger(__name__)

_STORED = datasets.Features(
    {
        "record": datasets.Value("string"),
        "label": datasets.Value("int32"),
        "key": datasets.Value("int64"),
    }
)
_OF_A_PROCESS = 2000  # records that are worth a process of their own
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_LIBRARIES = ("transformers", "tokenizers", "pandas", "pyarrow")
_TRIED = 8  # examples on which a user's metric and reward are tried


@dataclass(frozen=True)
class TaskData:
    """The encoded splits of a run, and the batches of its steps.

    Attributes:
        reader: how the model reads them.
        train: the examples to train on.
        dev: the examples to select the best step by.
        test: the examples for the final score.
        packed: whether sequences share rows in training (packing.py).
        num_start: number of tokens with which all of them begin, which a row then has once.
    """

    reader: Reader
    train: EncodedSplit
    dev: EncodedSplit
    test: EncodedSplit
    packed: bool
    num_start: int = 0

    @property
    def task(self) -> Task:
        """The task."""
        return self.reader.task

    @property
    def objective(self) -> Objective:
        """The loss to minimize."""
        return self.reader.objective

    def loss(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of each example: a LossFunction; see `Reader.loss`."""
        return self.reader.loss(outputs, batch)

    def step_batch(self, config: RunConfig, step: int) -> StepBatch:
        """Return the micro-batches of a step, each of which is laid out when it is read.

        They are a function of the seed and the step. `prefetch.StepBatches` lays them out ahead.
        """
        size = config.train.micro_batch_size
        rows = self._in_order(config, self.step_rows(config, step))
        keys = self._sample_keys(config, step, rows)

        def build(index: int) -> MicroBatch:
            part = slice(index * size, (index + 1) * size)
            of_micro_batch: list[int] = rows[part].tolist()
            if not self.objective.reads_answers:
                return self.training_batch(of_micro_batch)
            return self._answer_batch(config, of_micro_batch, None if keys is None else keys[part])

        return StepBatch(
            self._weights(config, rows),
            build,
            rows.tobytes(),
            num_examples=len(rows),
            may_lack_losses=self.objective.is_reward,
        )

    def step_rows(self, config: RunConfig, step: int) -> list[int]:
        """Return the rows of `train` of a step's examples, in the order of the stream."""
        return batch_indices(config.seed, step, len(self.train), config.train.batch_size)

    def num_tokens(self, config: RunConfig, step: int) -> int:
        """Return the number of tokens that a forward pass runs for all examples of a step."""
        return int(self._lengths[self.step_rows(config, step)].sum())

    def training_batch(self, rows: Sequence[int]) -> MicroBatch:
        """Return the batch of some training examples, which share rows if the model allows it."""
        batch = self.reader.objective_batch(self.train, rows)
        return pack(batch, self.num_start) if self.packed else batch

    def _in_order(self, config: RunConfig, drawn: Sequence[int]) -> np.ndarray:
        """Return the examples of a step, one micro-batch after the other."""
        size = config.train.micro_batch_size
        # A micro-batch is padded to its longest example, so sorting by length reduces padding.
        by_number = np.sort(drawn)
        rows = by_number[np.argsort(self._lengths[by_number], kind="stable")]
        if self.packed and FEWEST_DEALT <= size < len(rows):
            rows = deal(rows, len(rows) // size)
        group_size = config.zo.examples_per_direction
        if self.objective.reads_answers and group_size is not None and 1 < group_size < size:
            # Each group reads its prompts next to each other (prompt_reading.py).
            parts = rows.reshape(-1, size)
            rows = np.concatenate([deal(part, size // group_size) for part in parts])
        return rows

    @cached_property
    def _lengths(self) -> np.ndarray:
        """The number of tokens that a forward pass runs for each training example."""
        return self.train.column("prompt_length" if self.objective.reads_answers else "length")

    def _weights(self, config: RunConfig, rows: np.ndarray) -> list[float]:
        """Return the number of terms in the loss of each micro-batch."""
        num_terms = np.ones(len(rows), dtype=np.int64)
        if self.objective.counts_tokens:
            num_terms = self.train.num_gold[rows]
        firsts = np.arange(0, len(rows), config.train.micro_batch_size)
        weights = np.add.reduceat(num_terms, firsts)
        if self.objective.reads_answers:
            weights *= config.generation.num_samples
        sums: list[float] = weights.tolist()
        return sums

    def _answer_batch(
        self, config: RunConfig, rows: Sequence[int], keys: Tensor | None
    ) -> MicroBatch:
        """Return the batch of prompts to train on; the samples of a prompt are neighboring rows.

        Args:
            config: of the run.
            rows: indices in `train` of the prompts.
            keys: of the random numbers of each sample, [prompts, samples]; None if answers are not
                drawn.
        """
        samples = range(config.generation.num_samples)
        repeated = [row for row in rows for _ in samples]
        batch = self.reader.objective_batch(self.train, repeated)
        assert batch.prompts is not None
        common = batch.prompts.common_ids
        if common is not None:
            # Each group of examples reads what all prompts begin with in its own direction.
            group_size = config.zo.examples_per_direction or len(rows)
            num_groups = max(1, len(rows) // group_size)
            is_shared = num_groups < len(repeated)  # else it is read at once
            common = common.expand(num_groups, -1) if is_shared else None
        sample_keys = None if keys is None else keys.flatten()
        prompts = replace(batch.prompts, sample_keys=sample_keys, common_ids=common)
        return replace(batch, prompts=prompts)

    def _sample_keys(self, config: RunConfig, step: int, rows: np.ndarray) -> Tensor | None:
        """Return the keys of the random numbers of each sample, [prompts, samples].

        It is None if answers are not drawn. A batch that is larger than the data, or that crosses
        the end of an epoch, repeats examples. Each time, the samples have other numbers.
        """
        if not self.objective.reads_answers or config.generation.temperature == 0:
            return None
        examples = pd.Series(self.train.index[rows])
        times = examples.groupby(examples).cumcount()  # how often each was there before
        num_samples = config.generation.num_samples
        keys = [
            sample_key(config.seed, step, example, time * num_samples + number)
            for example, time in zip(examples.tolist(), times.tolist(), strict=True)
            for number in range(num_samples)
        ]
        return torch.tensor(keys).reshape(-1, num_samples)


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
            only: a split to score; if it has a file of its own, no other file is read. Its
                questions may follow solved examples.

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
        if only in sources:
            sources = {only: sources[only]}
        self._sources = sources
        self._task = task
        self._keys = {split: self._key(config, split) for split in sources}  # a file is read once
        self._stored = {split: self._read(config, split) for split in sources}
        labels = {}
        keys = {}
        for split, rows in self._stored.items():
            labels[split] = _numbers(rows, "label")
            keys[split] = _numbers(rows, "key")
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
        key = None
        if not config.data.num_demonstrations:
            key = key_of_part(self._keys[source], name, rows.tobytes())
        encoded = shared_dataset(key, lambda folder: _encode(folder, self.reader, examples, name))
        return self.reader.checked(EncodedSplit(encoded, examples))

    def _example(self, source: str, row: int) -> Example:
        record = json.loads(self._stored[source][int(row)]["record"])
        return replace(self._task.example(record), index=int(row))

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
            stored = read_split(self._task, config.data, source)
            _write_rows(folder, stored, _STORED)

        return shared_dataset(self._keys[split], write)

    def _key(self, config: RunConfig, source: str) -> str | None:
        """Return the key of the cache of what becomes of a source, or None if in doubt."""
        path = Path(self._sources[source])
        code = [config.data.task, config.data.metric or "", *config.train.objectives]
        if not path.is_file() or any(map(names_code, code)):
            return None
        model = resolve_model(config.model.path)
        found = [model / name for name in _TOKENIZER_FILES if (model / name).is_file()]
        recipe = config.model_dump(include={"data", "generation"})
        versions = [importlib.metadata.version(name) for name in _LIBRARIES]
        objective = str(config.train.objective)
        return key_of([path, *found], recipe, lezo_ds.__version__, versions, objective)


def _numbers(rows: Dataset, column: str) -> np.ndarray:
    return np.asarray(rows.data.column(column).to_numpy())


def _write_rows(folder: Path, rows: Iterable[dict[str, Any]], features: datasets.Features) -> None:
    """Write rows to an Arrow file, some at a time."""
    with ArrowWriter(features=features, path=str(folder / "data.arrow")) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()


def _encode(folder: Path, reader: Reader, examples: Sequence[Example], name: str) -> None:
    """Write the rows of a split by several processes, with a progress bar.

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
    place = _numbers(encoded, "place")
    refused = np.flatnonzero(place < 0).tolist()
    problems = {f"{name} example {-place[row]}": encoded[row]["digest"] for row in refused}
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


def load_task_data(config: RunConfig) -> TaskData:
    """Load and encode the splits of a run's task. A collective.

    Raises:
        UserError: data cannot be read or do not fit the task, an example does not fit the model, or
            the user's objective fails on one.
    """
    examples = Examples(config)
    reader = examples.reader
    objective = reader.objective
    train = examples.split("train")
    dev = examples.split("dev")
    test = examples.split("test")
    # Generation pads on the left, and the mask of packed rows has no columns for keys of a prefix.
    takes_packed = not objective.reads_answers and config.peft.kind != "prefix"
    packed = takes_packed and can_pack(reader.model_config, config.data.max_length)
    warn_of_unreachable(reader, test)
    if objective != training_objective(reader.task) and not objective.reads_answers:
        batch = reader.objective_batch(train, [0])
        try_loss(objective, batch, reader.model_config.get_text_config().vocab_size)
    # What examples share is read in the direction that they share.
    examples_a_direction = config.zo.examples_per_direction or config.train.batch_size
    reads_once = examples_a_direction >= config.train.micro_batch_size
    num_start = train.num_start if packed and reads_once else 0
    return TaskData(reader, train, dev, test, packed, num_start)


def warn_of_unreachable(reader: Reader, split: EncodedSplit) -> None:
    """Say how many right answers the model cannot write, because its answers end before."""
    settings = reader.generation
    if settings is None or not reader.task.writes_answers:
        return
    written = zip(split.examples, split.num_gold.tolist(), strict=True)
    num_unreachable = 0
    for example, num_gold in written:
        right = example.references
        are_stopped = [any(stop in text for stop in settings.stops) for text in right]
        is_long = num_gold - 1 > settings.max_new_tokens  # the last one ends it
        num_unreachable += bool(right) and (is_long or all(are_stopped))
    if num_unreachable:
        logger.warning(
            "no answer can equal %d of %d right answers to score: they have a text that ends one "
            "(%s; set generation.stop=[]), or more than generation.max_new_tokens=%d tokens",
            num_unreachable,
            len(split),
            ", ".join(map(repr, settings.stops)),
            settings.max_new_tokens,
        )


def _check_objective(config: RunConfig, task: Task, objective: Objective) -> None:
    """Refuse an objective that does not fit the task."""
    if (task.metric == REWARD or not task.has_answers) and not objective.is_reward:
        needs = "data.metric=reward" if task.has_answers else "a task without right answers"
        raise UserError(
            f"{needs} needs a reward, not train.objective={config.train.objective}",
            fix="set train.objective=package.module:function, a function with the decorator "
            "`reward`, or add data.labels, data.choices or data.completion",
        )
