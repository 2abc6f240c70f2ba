r"""Label the records of a file with a model, for lezo-ds predict.

Records are predicted in chunks. Until the output is complete, the predictions are in a folder:

    OUT.part/
        .lock           names the process that works here
        chunk-0.json    {"input": settings and a hash of the chunk's records, "rows": [row, ...]}
        chunk-1.json    A row has the predicted fields of a record.
        output          the whole output, which is then renamed to OUT

The same command continues a killed one with the chunks that are missing. A finished chunk counts as
long as its own records stay the same, so another record may be corrected meanwhile.

The input is streamed three times: to check and hash all records, to predict, and to write the
output, which has all fields of the input. At most one chunk is in memory.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

import pyarrow as pa
from pyarrow.parquet import ParquetFile, ParquetWriter

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config import RunConfig, find_task
from lezo_ds.data.evaluation import PREDICTED, PROBABILITY, predict
from lezo_ds.data.splits import checked_label
from lezo_ds.data.tables import check_kind, kind_of, read_file, separator_of
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, remove_directory, sync
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.scoring import Opened, recipe_of
from lezo_ds.runs.screen import progress_bar
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example, Record
from lezo_ds.tasks.custom import ASSISTANT, read_messages
from lezo_ds.tasks.template import field_value

_BATCHES_A_CHUNK = 32  # a kill costs at most one chunk
_NO_ANSWER: Mapping[type, object] = {int: -1, bool: False, list[str]: []}
"""Values without meaning, by the type of the field. Others are ""."""

T = TypeVar("T")

Row = dict[str, Any]
"""The predicted fields of a record, or a record with them."""
Rows = Iterator[Row]


def predict_file(opened: Opened, source: Path, out: Path) -> int:
    """Label the records of a file, or continue to. A collective.

    Args:
        opened: the model, and how its records become inputs.
        source: the records, which need no right answers.
        out: becomes a file of the same kind and order, with `predicted`: the label as the records
            hold it, the chosen candidate, or the written answer. A candidate also has a
            `probability` (see data.evaluation.predict).

    Returns:
        The number of records.

    Raises:
        UserError: a record does not fit the task, `out` exists, or OUT.part is of another command.
        LezoError: the output cannot be written.
    """
    _, config, load_engine = opened
    config = _for_prediction(config)
    task = unlabelled(find_task(config.data))
    batch_size = config.train.eval_batch_size
    chunks = _Chunks(task, source, out, _BATCHES_A_CHUNK * batch_size)
    with ExitStack() as lock:
        num_records = distributed.on_rank_zero(lambda: chunks.open(lock))
        data = load_task_data(config, task)
        engine = load_engine()
        settings = [
            recipe_of(config),
            config.method,
            batch_size,
            engine.weights.digest(),
        ]
        finished = distributed.on_rank_zero(lambda: chunks.finished(settings))
        bar = progress_bar(
            num_records,
            num_done=sum(finished.values()),
            is_shown=distributed.rank() == 0,
            unit="record",
        )
        with bar:
            for number, examples in enumerate(chunks.examples()):
                if number in finished:
                    continue
                split = data.encode(examples)
                rows = predict(engine, data, split, batch_size)
                distributed.on_rank_zero(partial(chunks.write, number, rows))
                bar.update(len(rows))
        distributed.on_rank_zero(chunks.finish)
    return num_records


def _for_prediction(config: RunConfig) -> RunConfig:
    """Return the configuration to predict with.

    Texts are cut to what the model can read. A record that cannot be used is an error, since each
    record needs its row in the output. Without `label_field`, the right labels, if records have
    any, are in "label".
    """
    data = config.data
    model_config = load_model_config(resolve_model(config.model.path))
    max_length = data.max_length
    num_positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if num_positions:
        max_length = min(max_length, num_positions)
    label_field = data.label_field
    if label_field is None and (data.labels or data.choices):
        label_field = "label"
    data = replace(
        data,
        max_length=max_length,
        label_field=label_field,
        skip_unusable=False,
    )
    return replace(config, data=data)


class _Chunks:
    """The input in chunks, and the folder with the predictions of finished ones.

    Every rank reads the examples. Only rank 0 calls the other methods, in their order.
    """

    def __init__(self, task: Task, source: Path, out: Path, size: int) -> None:
        self._task = task
        self._source = source
        self._out = out
        self._size = size  # records of a chunk
        self._folder = RunDirectory(f"{out}.part")
        self._hashes: list[str] = []  # of the records of each chunk
        self._inputs: list[str] = []  # all that the predictions of each chunk depend on

    def open(self, lock: ExitStack) -> int:
        """Check and hash the input, lock the folder, and return the number of records.

        Raises:
            UserError: the input or the output cannot be used, or the folder is in use.
        """
        if self._out.exists():
            raise UserError(f"--out {self._out} exists", fix="set another --out")
        if kind_of(self._out) != kind_of(self._source):
            message = (
                f"--out {self._out} does not end in {self._source.suffix}, as {self._source} does"
            )
            raise UserError(message, fix="set another --out")
        check_kind(str(self._source), self._source)
        num_records = 0
        for records in _in_chunks(self._records(), self._size):
            digest = hashlib.sha256()
            for _, record in records:
                # Parquet may hold dates and bytes, which are hashed as text.
                text = json.dumps(record, sort_keys=True, default=str)
                digest.update(text.encode())
            self._hashes.append(digest.hexdigest())
            num_records += len(records)
        if num_records == 0:
            fix = "fill the file, or name another one"
            raise UserError(f"{self._source} has no records", fix=fix)
        lock.enter_context(self._folder.locked())
        return num_records

    def finished(self, settings: Sequence[object]) -> dict[int, int]:
        """Return the number of records of each finished chunk, by the number of the chunk.

        Args:
            settings: what predictions depend on apart from the records, as JSON can hold it.

        Raises:
            UserError: the folder has chunks, but none of this input and these settings.
        """
        finished = {}
        for number, records_hash in enumerate(self._hashes):
            chunk_input = json.dumps([*settings, records_hash])
            self._inputs.append(chunk_input)
            if self._path(number).is_file():
                chunk = self._read(number)
                if chunk["input"] == chunk_input:
                    finished[number] = len(chunk["rows"])
        if self._path(0).is_file() and not finished:
            raise UserError(
                f"{self._folder.path} is of another input, model or setting",
                fix="remove it, or set another --out",
            )
        return finished

    def examples(self) -> Iterator[tuple[Example, ...]]:
        """Yield the examples of each chunk."""
        index = 0
        for records in _in_chunks(self._records(), self._size):
            examples = []
            for place, record in records:
                example = self._task.build_example(record, index)
                examples.append(replace(example, place=place))
                index += 1
            yield tuple(examples)

    def write(self, number: int, rows: list[Row]) -> None:
        """Write the predictions of a chunk."""
        chunk = {"input": self._inputs[number], "rows": rows}
        self._folder.write(self._path(number), json.dumps(chunk))

    def finish(self) -> None:
        """Write the output, and remove the folder."""
        output = self._folder.path / "output"
        write = _write_parquet if kind_of(self._source) == ".parquet" else _write_text
        with failures_named(self._out):
            write(self._source, output, self._rows())
            sync(output)
            output.rename(self._out)
            sync(self._out.parent)
            remove_directory(self._folder.path)

    def _path(self, number: int) -> Path:
        return self._folder.path / f"chunk-{number}.json"

    def _read(self, number: int) -> dict[str, Any]:
        chunk: dict[str, Any] = json.loads(self._path(number).read_text())
        return chunk

    def _rows(self) -> Rows:
        """Yield the prediction of each record."""
        for number in range(len(self._hashes)):
            yield from self._read(number)["rows"]

    def _records(self) -> Iterator[tuple[str, Record]]:
        """Yield each record with its place, and refuse one that does not fit the task."""
        for number, (place, record) in enumerate(read_file(self._source), start=1):
            where = f"record {number}{place}"
            checked_label(self._task, where, record)
            for name in (PREDICTED, PROBABILITY):
                if name in record:
                    raise UserError(f"{where} has a field {name} already", fix="rename it")
            yield place, record


def _in_chunks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield `size` items at a time. The last chunk may have fewer."""
    chunk = list(islice(items, size))
    while chunk:
        yield chunk
        chunk = list(islice(items, size))


def unlabelled(task: Task) -> Task:
    """Return the task of records without right answers. Those that are there are not read.

    `build_example` reads empty answers in their place. A conversation becomes a question: the model
    writes the answer to it.
    """
    blanks = {}
    for name in task.answer_fields:
        kind = task.fields.get(name, object)
        blanks[name] = _NO_ANSWER.get(kind, "")
    has_choices = task.kind in ("classification", "multiple_choice")

    def build(record: Record, index: int) -> Example:
        record = {**record, **blanks}
        if task.kind == "chat":
            (field,) = task.fields
            record[field] = _asked(field, record)
        example = task.build_example(record, index)
        candidates = example.candidates if has_choices else ()
        return replace(example, candidates=candidates, label=None, references=())

    return replace(
        task,
        kind=task.kind if has_choices else "generation",
        fields={name: kind for name, kind in task.fields.items() if name not in blanks},
        build_example=build,
        has_answers=False,
    )


def _asked(field: str, record: Record) -> list[object]:
    """Return a conversation whose last turn is an answer that the model does not read."""
    turns = field_value(record, field)
    if read_messages(field, turns)[-1].role == ASSISTANT:
        turns = turns[:-1]
    return [*turns, {"role": ASSISTANT, "content": "?"}]


def _write_parquet(source: Path, target: Path, rows: Rows) -> None:
    """Write a table with the columns of `source` and those of `rows`, one batch at a time."""
    with ExitStack() as stack:
        writer: ParquetWriter | None = None
        for batch in ParquetFile(source).iter_batches():
            table = pa.table(batch)
            batch_rows = list(islice(rows, batch.num_rows))
            added = pa.Table.from_pylist(batch_rows)
            for name in added.column_names:
                table = table.append_column(name, added[name])
            if writer is None:
                writer = stack.enter_context(ParquetWriter(target, table.schema))
            writer.write_table(table)


def _write_text(source: Path, target: Path, rows: Rows) -> None:
    """Write the records of `source` with the fields of `rows`."""
    labelled = _labelled(source, rows)
    # JSON may name half of a surrogate pair, which UTF-8 lacks. It is written as it was read, as
    # in \udce4.
    with target.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        if kind_of(source) in (".csv", ".tsv"):
            _write_table(file, separator_of(source), labelled)
        elif kind_of(source) == ".json":
            _write_list(file, labelled)
        else:
            for record in labelled:
                file.write(_to_json(record) + "\n")


def _labelled(source: Path, rows: Rows) -> Rows:
    """Yield each record of `source` with its predicted fields after its own."""
    for (_, record), row in zip(read_file(source), rows, strict=True):
        yield {**record, **row}


def _to_json(record: Row) -> str:
    return json.dumps(record, ensure_ascii=False)


def _write_table(file: TextIO, separator: str, records: Rows) -> None:
    """Write a header with the names of the first record's fields, and the records."""
    first = next(records)
    # The writer quotes a value with a carriage return only if lines end with one.
    writer = csv.DictWriter(_ShortLineEnds(file), list(first), delimiter=separator)
    writer.writeheader()
    writer.writerows(chain([first], records))


class _ShortLineEnds:
    r"""A file in which lines that end with \r\n get \n instead."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> int:
        return self._file.write(line.removesuffix("\r\n") + "\n")


def _write_list(file: TextIO, records: Rows) -> None:
    """Write a JSON list with an item on each line."""
    start = "["
    for record in records:
        file.write(start + _to_json(record) + "\n")
        start = ","
    file.write("]\n")
