"""Records from files and from the hub, each with its place for errors, such as " (train.jsonl line 3)".

Python's own readers keep values as they are written. Those of `datasets` turn the text "2020-01-01" into a
date, shift the values of a row with too many, and do not know the line of a record.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from lezo_ds.errors import HubError, UserError
from lezo_ds.model.checkpoint import hub_problem

Row = tuple[str, Any]
"""The place of a record, "" if unknown, and the record, or a ValueError that says why it is none."""


def read_source(key: str, source: str) -> list[Row]:
    """Return the records of a file, or of OWNER/NAME:SPLIT or OWNER/NAME/CONFIG:SPLIT on the hub."""
    path = Path(source)
    hub_name, colon, split = source.rpartition(":")
    if colon and not path.exists() and 1 <= hub_name.count("/") <= 2:
        owner, name, *config = hub_name.split("/")
        (rows,) = read_hub(
            f"{owner}/{name}", "".join(config) or None, [split], fix=f"set {key} to a file"
        )
    else:
        check_kind(f"{key}={source}", path)
        rows = list(read_file(path))
    if not rows:
        raise UserError(f"{key}={source} has no records", fix=f"fill the file, or correct {key}")
    return rows


def check_kind(name: str, path: Path) -> None:
    if path.suffix not in READERS or not path.is_file():
        missing = "" if path.is_file() else ", which is not a file"
        fix = f"name a file that ends in {', '.join(READERS)}, or OWNER/NAME:SPLIT on the hub"
        raise UserError(f"cannot read {name}{missing}", fix=fix)


def read_file(path: Path) -> Iterator[Row]:
    """Yield the records of a file that ends as in READERS. Only a JSON list is held whole."""
    place = ""
    try:
        for unit, number, record in READERS[path.suffix](path):
            place = f" ({path} {unit} {number})"
            is_row = isinstance(record, Mapping | ValueError)
            yield place, record if is_row else ValueError("is not a JSON object")
    except (OSError, ValueError, RecursionError, csv.Error, ArrowException) as error:
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        fix = f"save it as the UTF-8 {path.suffix} file that its name says, or use .jsonl"
        last = f" after{place}" if place else ""
        raise UserError(f"{path} cannot be read{last}: {shown}", fix=fix) from error


def read_hub(
    hub_id: str, config: str | None, splits: Sequence[str], *, fix: str
) -> list[list[Row]]:
    """Return the records of splits on the hub, or in its local cache if HF_HUB_OFFLINE is set."""
    problem = hub_problem()
    datasets.config.HF_HUB_OFFLINE = bool(
        problem
    )  # then it reads its cache, and does not try for minutes
    try:
        loaded = datasets.load_dataset(hub_id, config, split=list(splits))
    except Exception as error:  # each library below raises its own types
        shown = problem or f"{type(error).__name__}: {error}".splitlines()[0]
        name = f"{hub_id} ({config or 'default'})"
        raise HubError(f"cannot load {name} from the Hugging Face hub: {shown}", fix=fix) from error
    return [[("", record) for record in split.to_list()] for split in loaded]


_Records = Iterator[tuple[str, int, object]]
"""(what the number counts, number from 1, and the record or what is wrong with it)."""


def separator_of(path: Path) -> str:
    usual = "\t" if path.suffix == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
    # Where a comma is the decimal point, spreadsheets separate the values by semicolons.
    return ";" if usual not in first and ";" in first else usual


def _read_table(path: Path) -> _Records:
    """Yield the rows of a table with a header; every value is text. Blank lines are skipped."""
    csv.field_size_limit(2**31 - 1)  # the check of a record refuses much shorter ones
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator_of(path), strict=True)
        header = next(reader, [])
        if not header or len(set(header)) < len(header):
            raise ValueError("line 1 lacks the names of columns, or repeats one")
        line = reader.line_num + 1  # a quoted value may have several lines
        for values in reader:
            if any(value.strip() for value in values):
                wrong = ValueError(f"has {len(values)} values for {len(header)} columns")
                fits = len(values) == len(header)
                yield "line", line, dict(zip(header, values, strict=True)) if fits else wrong
            line = reader.line_num + 1


def _read_json(path: Path) -> _Records:
    """Yield the items of one JSON list, or the object on each line. Blank lines are skipped."""
    with path.open(
        "rb"
    ) as file:  # json.loads decodes bytes itself, so wrong encodings are errors of a line
        if file.read(1000).lstrip()[:1] == b"[":
            yield from (
                ("row", row, record) for row, record in enumerate(json.loads(path.read_bytes()), 1)
            )
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = ValueError(f"is not JSON: {line[:80]!r}")
                yield "line", number, record


def _read_parquet(path: Path) -> _Records:
    parts = (part.to_pylist() for part in ParquetFile(path).iter_batches(1024))
    yield from (("row", row, record) for row, record in enumerate(chain.from_iterable(parts), 1))


READERS: Mapping[str, Callable[[Path], _Records]] = {
    ".csv": _read_table,
    ".tsv": _read_table,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
