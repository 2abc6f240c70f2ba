r"""Label the records of a file with a model, for lezo-ds predict.

Records are predicted in chunks. Until the output is complete, the predictions are in a folder:

    OUT.part/
        .lock                names the process that works here
        chunk-0-HASH.json    [row, ...]: a row has the predicted fields of a record. HASH is of all
        chunk-1-HASH.json    that they depend on: the chunk's records, the settings, the weights
        output               the whole output, which is then renamed to OUT

The same command continues a killed one with the chunks that are missing. A chunk counts as long as
its own records stay the same, so another record may be corrected meanwhile.

The input is streamed three times: to check all records, to predict, and to write the output, which
has all fields of the input. At most one chunk is in memory.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import BytesIO, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
from pyarrow.parquet import ParquetFile, ParquetWriter

from lezo_ds import distributed
from lezo_ds.data.evaluation import OF_LABEL, PREDICTED, PROBABILITY, predict
from lezo_ds.data.reader import load_reader
from lezo_ds.data.splits import checked_example
from lezo_ds.data.tables import (
    TABLES,
    UTF_8,
    check_kind,
    json_texts,
    kind_of,
    layout_of,
    read_file,
)
from lezo_ds.data.task_data import find_task
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, remove_directory, sync, write_output
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.opening import Opened, recipe_of
from lezo_ds.runs.screen import progress_bar
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example, Record
from lezo_ds.tasks.labels import label_key

_BATCHES_A_CHUNK = 32  # a kill costs at most one chunk
_TRUTHS = {"true": True, "false": False}
_READERS: Mapping[type, Callable[[str], object]] = {
    int: int,
    float: float,
    bool: _TRUTHS.__getitem__,
}
"""What reads a label of a recipe as the type that records hold."""
_UNWRITABLE = "backslashreplace"
"""How a character is written that an encoding lacks: as an escape."""

Rows = Iterator[dict[str, Any]]
"""The predicted fields of each record."""


def predict_file(
    opened: Opened,
    source: Path,
    out: Path,
    *,
    probabilities: bool = False,
    threshold: float = 0.0,
) -> int:
    """Label the records of a file, or continue to. A collective.

    Args:
        opened: the model, and how its records become inputs.
        source: the records, which need no right answers.
        out: becomes a file of the same kind and order, with `predicted`: the label as the records
            hold it, the chosen candidate, or the written answer. A candidate also has a
            `probability` (see data.evaluation.predict). Labels that are all whole numbers are
            integers in JSON and parquet, unless the records hold them as another type.
        probabilities: whether the output also has the probability of each label.
        threshold: below this probability, `predicted` is "", or null among labels that are numbers.

    Returns:
        The number of records.

    Raises:
        UserError: a record does not fit the task, `out` exists, OUT.part is in use, or a task
            without labels has probabilities or a threshold.
        LezoError: the output cannot be written.
    """
    opened.refuse_code("data.task")
    config = opened.fitted()
    data = config.data
    if data.num_demonstrations > 0:
        raise UserError("predict shows no solved examples", fix="set data.num_demonstrations=0")
    label_field = data.label_field
    if label_field is None and (data.labels or data.choices):
        label_field = "label"  # that of the right answer, if records have one
    # No metric of the user's is needed. A record that cannot be used is an error, since each needs
    # its row in the output.
    changes = {"metric": None, "label_field": label_field, "skip_unusable": False}
    data = data.model_copy(update=changes)
    config = config.model_copy(update={"data": data})
    task = find_task(data).unanswered()
    if (probabilities or threshold) and not task.has_classes:
        raise UserError(
            f"--probabilities and --threshold are about labels, and {task.kind} has none",
            fix="remove them",
        )
    taken = (PREDICTED, PROBABILITY, OF_LABEL) if probabilities else (PREDICTED, PROBABILITY)
    batch_size = config.train.eval_batch_size
    encoding = data.encoding or "utf-8"
    size = _BATCHES_A_CHUNK * batch_size
    folder = RunDirectory(f"{out}.part")
    chunks = []
    with ExitStack() as lock:
        num_records, labels = distributed.on_rank_zero(
            lambda: _check_files(task, source, out, encoding, taken)
        )
        distributed.on_rank_zero(lambda: lock.enter_context(folder.locked()))
        reader = load_reader(task, config.model.path, data, config.generation)
        engine = opened.load_engine()
        settings: list[object] = [probabilities, threshold]
        settings += [recipe_of(config), batch_size, engine.weights.digest()]
        records = _records(task, source, encoding, taken)
        with progress_bar(num_records, is_shown=distributed.rank() == 0, unit="record") as bar:
            for start in range(0, num_records, size):
                examples = []
                digest = hashlib.sha256(json.dumps(settings).encode())
                for index, (example, record) in enumerate(islice(records, size), start):
                    examples.append(replace(example, index=index))
                    # Parquet may hold dates and bytes, which are hashed as text.
                    digest.update(json.dumps(record, sort_keys=True, default=str).encode())
                chunk = folder.path / f"chunk-{start // size}-{digest.hexdigest()}.json"
                chunks.append(chunk)
                if not distributed.on_rank_zero(chunk.is_file):
                    rows = predict(
                        engine,
                        reader,
                        reader.encode(tuple(examples)),
                        batch_size,
                        probabilities=probabilities,
                        threshold=threshold,
                    )
                    distributed.on_rank_zero(partial(write_output, chunk, json.dumps(rows)))
                bar.update(len(examples))
        distributed.on_rank_zero(
            lambda: _write_output(source, encoding, out, folder.path, chunks, labels)
        )
    return num_records


def _check_files(
    task: Task, source: Path, out: Path, encoding: str, taken: Sequence[str]
) -> tuple[int, dict[object, object]]:
    """Refuse an input or an output that cannot be used.

    `encoding` and `taken` are those of `_records`.

    Returns:
        The number of records, and each label as the output has it.
    """
    check_kind(str(source), source)
    if out.exists():
        raise UserError(f"--out {out} exists", fix="set another --out")
    if kind_of(out) != kind_of(source):
        message = f"--out {out} does not end in {source.suffix}, as {source} does"
        raise UserError(message, fix="set another --out")
    if kind_of(source) in TABLES:
        _check_encoding(encoding, task)
    num_records = 0
    held = set()
    for _, record in _records(task, source, encoding, taken):
        num_records += 1
        values = [record.get(field) for field in task.answer_fields]
        held |= {type(value) for value in values if value not in (None, "") and value == value}
    if num_records == 0:
        raise UserError(f"{source} has no records", fix="fill the file, or name another one")
    is_table = kind_of(source) in TABLES
    return num_records, _output_labels(task, {str} if is_table else held)


def _check_encoding(encoding: str, task: Task) -> None:
    """Refuse an encoding in which labels cannot be written, before they are predicted."""
    labels = " ".join(map(str, task.labels))
    try:
        labels.encode(encoding)
        with TextIOWrapper(BytesIO(), encoding, errors=_UNWRITABLE) as file:
            file.write(labels)
    except (LookupError, UnicodeError) as error:
        raise UserError(
            f"--encoding {encoding} cannot write the labels: {error}",
            fix="save the table in UTF-8, and set no encoding",
        ) from error


def _output_labels(task: Task, held: set[type]) -> dict[object, object]:
    """Return each label of a task as the output holds it.

    Args:
        task: the task, whose labels are texts if a recipe has them.
        held: the types of the labels in the input. If it has none, whole numbers are integers.
    """
    as_given: dict[object, object] = {label: label for label in task.labels}
    kinds = held or {int}
    if len(kinds) > 1 or not all(isinstance(label, str) for label in as_given):
        return as_given
    (kind,) = kinds
    typed: dict[object, object] = {}
    for label in as_given:
        key = label_key(str(label))
        try:
            typed[label] = _READERS[kind](key)
        except (KeyError, ValueError):
            return as_given
        if label_key(str(typed[label])) != key:  # such as 007, which is no integer
            return as_given
    return typed


def _records(
    task: Task,
    source: Path,
    encoding: str,
    taken: Sequence[str],
) -> Iterator[tuple[Example, Record]]:
    """Yield the example of each record, and the record. Refuse one that does not fit the task.

    No field of a record may have one of the names in `taken`. OF_LABEL stands for all that begin
    with it.
    """
    for number, (place, record) in enumerate(read_file(source, encoding), start=1):
        where = f"record {number}{place}"
        example = checked_example(task, where, record)
        for name in record:
            if name in taken or (OF_LABEL in taken and name.startswith(OF_LABEL)):
                raise UserError(f"{where} has a field {name} already", fix="rename it")
        yield example, record


def _write_output(
    source: Path,
    encoding: str,
    out: Path,
    folder: Path,
    chunks: Sequence[Path],
    labels: Mapping[object, object],
) -> None:
    """Write the output from the finished chunks, and remove their folder.

    `labels` are those of `_output_labels`.
    """
    rows: Rows = chain.from_iterable(json.loads(chunk.read_text()) for chunk in chunks)
    if labels:
        unsure = "" if set(map(type, labels.values())) == {str} else None
        rows = (
            {**row, PREDICTED: labels.get(row[PREDICTED], row[PREDICTED] or unsure)} for row in rows
        )
    output = folder / "output"
    with failures_named(out):
        if kind_of(source) == ".parquet":
            kind = pa.infer_type([*labels.values()]) if labels else pa.string()
            _write_parquet(source, output, rows, kind)
        elif kind_of(source) in TABLES:
            _write_table(source, encoding, output, rows)
        else:
            _write_json(source, output, rows)
        sync(output)
        output.rename(out)
        sync(out.parent)
        remove_directory(folder)


def _write_parquet(source: Path, target: Path, rows: Rows, kind: pa.DataType) -> None:
    """Write a table with the columns of `source` and those of `rows`, one batch at a time.

    `kind` is the type of the predictions. It is given, because a batch may have none.
    """
    table = ParquetFile(source)
    first = next(rows)
    rows = chain([first], rows)
    added = pa.schema({name: pa.float64() for name in first} | {PREDICTED: kind})
    own = table.schema_arrow
    schema = pa.schema([*own, *added], metadata=own.metadata)
    with ParquetWriter(target, schema) as writer:
        for batch in table.iter_batches():
            predicted = pa.RecordBatch.from_pylist(list(islice(rows, batch.num_rows)), added)
            columns = [*batch.columns, *predicted.columns]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _write_json(source: Path, target: Path, rows: Rows) -> None:
    """Write the objects of `source` as they are there, each with the fields of its row at its end.

    A number stays as it is written, such as 1.50, or 1e400, which is no float.
    """

    def labelled() -> Iterator[str]:
        for (_, _, text), row in zip(json_texts(source), rows, strict=True):
            fields = text.strip().removeprefix("{").removesuffix("}").strip()
            added = json.dumps(row, ensure_ascii=False)[1:-1]
            # A line break is never part of a text, where JSON has a backslash and an n.
            fields = fields.replace("\r", " ").replace("\n", " ")
            yield f"{{{fields}, {added}}}\n" if fields else f"{{{added}}}\n"

    # JSON may name half of a surrogate pair, which UTF-8 lacks. It is written as an escape.
    with target.open("w", encoding=UTF_8, errors=_UNWRITABLE, newline="") as file:
        if kind_of(source) == ".json":
            # A list in a file was in memory as a whole when it was read.
            file.write("[" + ",".join(labelled()) + "]\n")
        else:
            file.writelines(labelled())


def _write_table(source: Path, encoding: str, target: Path, rows: Rows) -> None:
    """Write the rows of `source`, each with the values of its row in `rows` after its own.

    The table has the encoding and the separator of `source`, and its byte order mark if it has one.
    """
    layout = layout_of(source, encoding)
    is_quoted = layout.quoting != csv.QUOTE_NONE
    if not is_quoted:  # an answer has neither separators nor line breaks then
        rows = ({**row, PREDICTED: " ".join(str(row[PREDICTED]).split())} for row in rows)
    pairs = zip(read_file(source, encoding), rows, strict=True)
    labelled = ({**record, **row} for (_, record), row in pairs)
    with target.open("w", encoding=layout.codec, errors=_UNWRITABLE, newline="") as file:
        if layout.has_separator_line:
            file.write(f"sep={layout.delimiter}\n")
        first = next(labelled)
        # The writer quotes a value with a carriage return only if lines end with one.
        writer = csv.DictWriter(
            _ShortLineEnds(file),
            list(first),
            delimiter=layout.delimiter,
            quoting=layout.quoting,
            quotechar='"' if is_quoted else None,
        )
        writer.writeheader()
        writer.writerow(first)
        writer.writerows(labelled)


class _ShortLineEnds:
    r"""A file in which lines that end with \r\n get \n instead."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> int:
        return self._file.write(line.removesuffix("\r\n") + "\n")
