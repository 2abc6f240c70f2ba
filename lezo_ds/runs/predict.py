"""Label the records of a file with a model, for lezo-ds predict.

The file is streamed three times: to check all records, to predict, and to write the output. Until then the
folder OUT.part has a file of predictions for each chunk of records. A killed run continues after the last.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyarrow.parquet import ParquetFile, ParquetWriter

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import load_model_config, resolve_model
from lezo_ds.config import find_task
from lezo_ds.data.evaluation import PREDICTED, PROBABILITY, predict
from lezo_ds.data.splits import checked_label
from lezo_ds.data.tables import check_kind, kind_of, read_file, separator_of
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, remove_directory, sha256_file, sync
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.scoring import Opened, recipe_of
from lezo_ds.runs.screen import progress_bar
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example, Record
from lezo_ds.tasks.custom import ASSISTANT, read_messages
from lezo_ds.tasks.template import field_value

_CHUNK_BATCHES = 32  # a kill costs at most one chunk
_NO_ANSWER: dict[type, object] = {int: -1, bool: False, list[str]: []}


def predict_file(opened: Opened, source: Path, out: Path) -> int:
    """Label the records of `source` and return their number. A collective.

    `out` becomes a file of the same kind and order, with `predicted`: the label as the records hold it, the
    chosen candidate, or the written answer. A candidate has a `probability` (see data.evaluation.predict).
    """
    _, config, load = opened
    model, keys = load_model_config(resolve_model(config.model.path)), config.data
    room = getattr(model.get_text_config(), "max_position_embeddings", None) or keys.max_length
    label_field = keys.label_field or ("label" if keys.labels or keys.choices else None)
    keys = replace(
        keys, max_length=min(room, keys.max_length), label_field=label_field, skip_unusable=False
    )
    config, task = replace(config, data=keys), unlabelled(find_task(keys))
    part, batch_size = RunDirectory(f"{out}.part"), config.train.eval_batch_size
    size = _CHUNK_BATCHES * batch_size

    def chunk(number: int) -> Path:
        return part.path / f"{number}.json"

    def check() -> int:
        if kind_of(out) != kind_of(source) or out.exists():
            what = (
                "exists" if out.exists() else f"does not end in {source.suffix}, as {source} does"
            )
            raise UserError(f"--out {out} {what}", fix="set another --out")
        check_kind(str(source), source)
        if not (num_records := sum(1 for _ in _examples(task, source))):
            raise UserError(f"{source} has no records", fix="fill the file, or name another one")
        stack.enter_context(part.locked())
        return num_records

    def start() -> int:
        facts = json.dumps(
            [recipe_of(config), config.method, batch_size, sha256_file(source), digest]
        )
        settings = part.path / "settings.json"
        if not settings.is_file():
            part.write(settings, facts)
        if settings.read_text() != facts:
            what = f"{part.path} is of another input, model or setting"
            raise UserError(what, fix="remove it, or set another --out")
        return next(number for number in count() if not chunk(number).is_file())

    def finish() -> None:
        rows = chain.from_iterable(json.loads(chunk(n).read_text()) for n in range(num_chunks))
        whole = part.path / "output"
        with failures_named(out):
            (_write_parquet if kind_of(source) == ".parquet" else _write_text)(source, whole, rows)
            sync(whole)
            whole.rename(out)
            sync(out.parent)
            remove_directory(part.path)

    with ExitStack() as stack:
        num_records = distributed.on_rank_zero(check)
        num_chunks = -(-num_records // size)
        data, engine = load_task_data(config, task), load()
        digest = engine.weights.digest()
        first = distributed.on_rank_zero(start)
        is_shown, num_done = distributed.rank() == 0, min(first * size, num_records)
        bar = stack.enter_context(
            progress_bar(num_records, num_done, is_shown=is_shown, what="record")
        )
        records = islice(_examples(task, source), num_done, None)
        for number in range(first, num_chunks):
            rows = predict(engine, data, data.encode(tuple(islice(records, size))), batch_size)
            distributed.on_rank_zero(lambda: part.write(chunk(number), json.dumps(rows)))  # noqa: B023
            bar.update(len(rows))
        distributed.on_rank_zero(finish)
    return num_records


def unlabelled(task: Task) -> Task:
    """Return the task of records without right answers. Those that are there are not read."""
    blanks = {
        name: _NO_ANSWER.get(task.fields.get(name, object), "") for name in task.answer_fields
    }
    has_choices = task.kind in ("classification", "multiple_choice")

    def build(record: Record, index: int) -> Example:
        record = {**record, **blanks}
        if task.kind == "chat":
            (field,) = task.fields
            turns = field_value(record, field)
            asked = turns[:-1] if read_messages(field, turns)[-1].role == ASSISTANT else turns
            record[field] = [
                *asked,
                {"role": ASSISTANT, "content": "?"},
            ]  # the model does not read it
        example = replace(task.build_example(record, index), label=None, references=())
        return example if has_choices else replace(example, candidates=())

    fields = {name: kind for name, kind in task.fields.items() if name not in blanks}
    kind = task.kind if has_choices else "generation"
    return replace(task, kind=kind, fields=fields, build_example=build, has_answers=False)


def _examples(task: Task, source: Path) -> Iterator[Example]:
    for index, (place, record) in enumerate(read_file(source)):
        where = f"record {index + 1}{place}"
        checked_label(task, where, record)
        if taken := {PREDICTED, PROBABILITY} & record.keys():
            raise UserError(f"{where} has a field {min(taken)} already", fix="rename it")
        yield replace(task.build_example(record, index), place=place)


def _write_parquet(source: Path, target: Path, rows: Iterator[dict[str, Any]]) -> None:
    with ExitStack() as stack:
        writer: Any = None
        for part in ParquetFile(source).iter_batches():
            table, added = pa.table(part), pa.Table.from_pylist(list(islice(rows, part.num_rows)))
            for name in added.column_names:
                table = table.append_column(name, added[name])
            writer = writer or stack.enter_context(ParquetWriter(target, table.schema))
            writer.write_table(table)


def _write_text(source: Path, target: Path, rows: Iterator[dict[str, Any]]) -> None:
    records = ({**record, **row} for (_, record), row in zip(read_file(source), rows, strict=True))
    # JSON may name half a character, and so does the output.
    with target.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        if kind_of(source) in (".csv", ".tsv"):
            # The dialect quotes a carriage return only if lines end with one.
            lines: Any = SimpleNamespace(write=lambda line: file.write(line[:-2] + "\n"))
            first = next(records)
            table = csv.DictWriter(lines, list(first), delimiter=separator_of(source))
            table.writeheader()
            table.writerows(chain([first], records))
            return
        is_list = kind_of(source) == ".json"
        for number, record in enumerate(records):
            file.write(
                ("," if number else "[") * is_list + json.dumps(record, ensure_ascii=False) + "\n"
            )
        file.write("]\n" * is_list)
