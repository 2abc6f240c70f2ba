"""Records from files and from the Hugging Face hub, each with its place for error messages.

A source is a path, whose suffix in any case says how to read it, or the name of a split on the hub:

    tickets.csv, .tsv         a header, then one record a row; every value is text in an encoding
    tickets.jsonl, .json      one JSON object a line, or one JSON list of objects
    tickets.parquet           one record a row
    OWNER/NAME:SPLIT          a split of a data set on the hub; also OWNER/NAME/CONFIG:SPLIT

All but JSON lists are streamed. Python's own readers keep values as they are written. The readers
of `datasets` turn the text "2020-01-01" into a date, shift the values of a row that has too many,
and do not know the line of a record.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import charset_normalizer
import datasets
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from lezo_ds.checkpoints.checkpoint import hub_problem
from lezo_ds.errors import HubError, UserError
from lezo_ds.tasks.base import ArrowRecord

Row = tuple[str, Any]
"""(place, record): the place is such as " (train.jsonl line 3)", or "" if it is unknown. The record
is a mapping, or a ValueError that says why there is none."""

UTF_8 = "utf-8"
TABLES = (".csv", ".tsv")
"""The kinds of files that may have any encoding. All others say theirs."""

_PARQUET_ROWS = 1024  # that are in memory at a time
_GUESSED_BYTES = 2**20  # of a table, from which its encoding is guessed
_SNIFFED_BYTES = 1000  # of a JSON file; white space before a list may be as long


def read_source(key: str, source: str, encoding: str = UTF_8) -> list[Row]:
    """Return the records of a file or of a split on the hub (see the module's docstring).

    Args:
        key: the recipe key that names the source, for messages.
        source: the value of this key.
        encoding: of a .csv or .tsv file.

    Raises:
        UserError: the source is not there, cannot be read, or has no records.
    """
    path = Path(source)
    hub_name, colon, split = source.rpartition(":")
    owner, *names = hub_name.split("/")
    if colon and not path.exists() and len(names) in (1, 2):
        config = names[1] if len(names) == 2 else None
        fix = f"set {key} to a file"
        (rows,) = read_hub(f"{owner}/{names[0]}", config, [split], fix=fix)
    else:
        check_kind(f"{key}={source}", path)
        rows = list(read_file(path, encoding))
    if not rows:
        raise UserError(f"{key}={source} has no records", fix=f"fill the file, or correct {key}")
    return rows


def kind_of(path: Path) -> str:
    """Return the suffix that says how a file is read, in lower case: ".csv" also for T.CSV."""
    return path.suffix.lower()


def check_kind(name: str, path: Path) -> None:
    """Refuse a path that is no file or has an unknown suffix; messages call it `name`."""
    is_file = path.is_file()
    if kind_of(path) in READERS and is_file:
        return
    missing = "" if is_file else ", which is not a file"
    fix = f"name a file that ends in {', '.join(READERS)}, or OWNER/NAME:SPLIT on the hub"
    raise UserError(f"cannot read {name}{missing}", fix=fix)


def read_file(path: Path, encoding: str = UTF_8) -> Iterator[Row]:
    """Yield the records of a file. Only a JSON list is in memory as a whole.

    The encoding is that of a .csv or .tsv file.

    Raises:
        UserError: the file cannot be read, or its content ends in the middle of a record. The
            message names the last record that could be read. A single bad record does not raise
            (see `Row`).
    """
    kind = kind_of(path)
    place = ""
    try:
        for unit, number, record in READERS[kind](path, encoding):
            place = f" ({path} {unit} {number})"
            if not isinstance(record, Mapping | ValueError):
                record = ValueError("is not a JSON object")
            yield place, record
    except (
        OSError,
        ValueError,
        LookupError,
        RecursionError,
        csv.Error,
        ArrowException,
    ) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        after = f" after{place}" if place else ""
        fix = f"save it as the UTF-8 {kind} file that its name says, or use .jsonl"
        if isinstance(error, csv.Error):
            fix = 'close the quoted value in the next line, and write a " inside one as ""'
        if isinstance(error, UnicodeDecodeError) and kind in TABLES:
            fix = _encoding_fix(path) or fix
        raise UserError(f"{path} cannot be read{after}: {message}", fix=fix) from error


def read_hub(
    hub_id: str,
    config: str | None,
    splits: Sequence[str],
    *,
    fix: str,
) -> list[list[Row]]:
    """Return the records of splits on the hub, or in its cache if the hub cannot be reached.

    Args:
        hub_id: OWNER/NAME of the data set.
        config: name of its configuration; None if it has only one.
        splits: names of splits.
        fix: what the error tells the user to do.

    Raises:
        HubError: the data set cannot be loaded.
    """
    problem = hub_problem()
    # With this flag, `datasets` reads its cache at once. Without it, it tries the hub for minutes.
    datasets.config.HF_HUB_OFFLINE = bool(problem)
    try:
        loaded = datasets.load_dataset(hub_id, config, split=list(splits))
    except Exception as error:  # each library below raises its own types
        reason = problem or f"{type(error).__name__}: {error}".splitlines()[0]
        name = f"{hub_id} ({config or 'default'})"
        message = f"cannot load {name} from the Hugging Face hub: {reason}"
        raise HubError(message, fix=fix) from error
    return [[("", ArrowRecord(record)) for record in split.to_list()] for split in loaded]


_Records = Iterator[tuple[str, int, object]]
"""(unit, number, record): "line" or "row", its number from 1, and the record or a ValueError."""


def codec_of(path: Path, encoding: str) -> str:
    """Return the codec that reads a table, and with which another one has the same first bytes.

    A table that begins with the byte order mark of UTF-8, as spreadsheets write it, is in UTF-8.
    """
    with path.open("rb") as file:
        has_mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return "utf-8-sig" if has_mark else encoding


def _encoding_fix(path: Path) -> str:
    """Return how a table in the encoding that it probably has is read; "" if it is hardly text."""
    with path.open("rb") as file:
        sample = b"".join(file.readlines(_GUESSED_BYTES))
    best = charset_normalizer.from_bytes(sample).best()
    if best is None:
        return ""
    # Of the encodings in which the text is the same, Windows' Western one is the most frequent.
    name = "cp1252" if "cp1252" in best.could_be_from_charset else best.encoding
    return f"set data.encoding={name} (init, predict: --encoding {name}), or save it in UTF-8"


def separator_of(path: Path, encoding: str) -> str:
    """Return what separates the values of a table: a tab in .tsv files, else "," or ";"."""
    usual = "\t" if kind_of(path) == ".tsv" else ","
    with path.open(encoding=codec_of(path, encoding), newline="") as file:
        first_line = file.readline()
    # Where a comma is the decimal point, spreadsheets separate the values by semicolons.
    if usual not in first_line and ";" in first_line:
        return ";"
    return usual


def _read_table(path: Path, encoding: str) -> _Records:
    """Yield the rows of a table with a header; every value is text. Blank lines are skipped."""
    csv.field_size_limit(2**31 - 1)  # a text may be long
    with path.open(encoding=codec_of(path, encoding), newline="") as file:
        reader = csv.reader(file, delimiter=separator_of(path, encoding), strict=True)
        header = next(reader, [])
        if not header:
            raise ValueError("line 1 lacks the names of columns")
        repeated = [name for name in header if header.count(name) > 1]
        if repeated:
            raise UserError(
                f"{path} has several columns with the name {repeated[0]!r}",
                fix="rename one of them in line 1",
            )
        # A quoted value may have several lines, so a row starts after the last line of the row
        # before.
        line = reader.line_num + 1
        for values in reader:
            record: object = dict(zip(header, values, strict=False))
            if len(values) != len(header):
                record = ValueError(f"has {len(values)} values for {len(header)} columns")
            if "".join(values).strip():  # else the line is blank
                yield "line", line, record
            line = reader.line_num + 1


def _read_json(path: Path, _: str) -> _Records:
    """Yield the items of one JSON list, or the object on each line. Blank lines are skipped."""
    # json.loads decodes bytes itself, so a wrong encoding is an error of one line.
    with path.open("rb") as file:
        is_list = file.read(_SNIFFED_BYTES).lstrip().startswith(b"[")
        file.seek(0)
        if is_list:
            for row, record in enumerate(json.load(file), start=1):
                yield "row", row, record
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = ValueError(f"is not JSON: {line[:80]!r}")
            yield "line", number, record


def _read_parquet(path: Path, _: str) -> _Records:
    batches = ParquetFile(path).iter_batches(_PARQUET_ROWS)
    records = chain.from_iterable(batch.to_pylist() for batch in batches)
    for row, record in enumerate(records, start=1):
        yield "row", row, ArrowRecord(record)


READERS: Mapping[str, Callable[[Path, str], _Records]] = {
    ".csv": _read_table,
    ".tsv": _read_table,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
"""The reader of each kind of file, by `kind_of`: (path, encoding) -> records."""
