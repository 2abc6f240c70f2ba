"""Records from files and from the hub, each with the place that an error about it names."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import datasets
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from lezo_ds.errors import HubError, UserError
from lezo_ds.tasks.base import Record

Row = tuple[str, Record]
"""Where a record is, such as " (data/train.jsonl line 3)" or "", and the record."""

_MAX_FIELD = 2**31 - 1
"""The longest value of a table, in characters. The check of a record refuses much shorter ones."""


def read_source(key: str, source: str) -> list[Row]:
    """Return the records of a file, or of a split on the hub.

    Args:
        key: the recipe key that names the source, as messages call it.
        source: path of a file with one of the endings in READERS; or OWNER/NAME:SPLIT or
            OWNER/NAME/CONFIG:SPLIT.

    Raises:
        UserError: there is no such file, it cannot be read, or it holds no record.
    """
    path = Path(source)
    hub_name, colon, split = source.rpartition(":")
    if colon and not path.exists() and 1 <= hub_name.count("/") <= 2:
        owner, name, *config = hub_name.split("/")
        (found,) = read_hub(f"{owner}/{name}", "".join(config) or None, [split], fix=f"set {key} to a file")
    elif path.suffix in READERS and path.is_file():
        found = read_file(path)
    else:
        raise UserError(
            f"{key} is not a file that can be read",
            got=source if path.is_file() else f"{source}, which is {_kind(path)}",
            expected=f"a file that ends in {', '.join(READERS)}, or OWNER/NAME:SPLIT on the hub",
            fix=f"correct {key}",
        )
    if not found:
        raise UserError(
            f"{source} is empty",
            got="no records",
            expected="at least one record",
            fix=f"fill the file, or correct {key}",
        )
    return found


def read_file(path: Path) -> list[Row]:
    """Return the records of a file.

    Args:
        path: an existing file with one of the endings in READERS.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return READERS[path.suffix](path)
    except OSError as error:
        raise UserError(
            f"cannot read {path}", got=str(error), expected="a file", fix="correct its permissions"
        ) from error


def read_hub(hub_id: str, config: str | None, splits: Sequence[str], *, fix: str) -> list[list[Row]]:
    """Return the records of splits on the hub, or in its local cache if HF_HUB_OFFLINE is set.

    Args:
        hub_id: name of the data set.
        config: its configuration; None if it has only one.
        splits: names of splits.
        fix: what the user can do if the hub cannot be reached.

    Raises:
        HubError: the data set cannot be loaded.
    """
    try:
        found = datasets.load_dataset(hub_id, config, split=list(splits))
    except Exception as error:  # each library below raises its own types
        raise HubError(
            f"cannot load {hub_id} ({config or 'default'}) from the Hugging Face hub",
            got=f"{type(error).__name__}: {error}".splitlines()[0],
            expected="access to the hub, or the data set in its local cache",
            fix=fix,
        ) from error
    return [[("", record) for record in split.to_list()] for split in found]


def _read_json_lines(path: Path) -> list[Row]:
    """Return the records of a file with a JSON object on each line. Blank lines are skipped.

    Raises:
        UserError: a line is not a JSON object.
    """
    rows: list[Row] = []
    with path.open("rb") as file:  # json.loads decodes bytes itself, so wrong encodings are errors of a line
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise UserError(
                    f"{path} line {number} is not a JSON object",
                    got=line[:80],
                    expected="a JSON object on each line",
                    fix="correct the line",
                )
            rows.append((f" ({path} line {number})", record))
    return rows


def _read_parquet(path: Path) -> list[Row]:
    """Return the records of a parquet file.

    Raises:
        UserError: it is not one.
    """
    try:
        records: list[Record] = ParquetFile(path).read().to_pylist()
    except (OSError, ArrowException) as error:
        raise _unreadable(path, "parquet", error) from error
    return _numbered(path, records)


def _read_json(path: Path) -> list[Row]:
    """Return the records of a file that holds one list of JSON objects, or an object on each line."""
    with path.open("rb") as file:
        if file.read(1000).lstrip()[:1] != b"[":
            return _read_json_lines(path)
    try:
        records = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, "JSON", error) from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise UserError(
                f"{path} item {number} is not a JSON object",
                got=repr(record)[:80],
                expected="a list of JSON objects",
                fix="correct the item",
            )
    return _numbered(path, records)


def _read_table(path: Path, separator: str) -> list[Row]:
    """Return the rows of a table with a header. Blank lines are skipped.

    If a header has semicolons and no commas, as where a comma is the decimal point, semicolons separate them.
    Every field is text: a number must reach the prompt as it is written, and "NA" is a word like others. We
    therefore use Python's own reader, which also knows the line of each row.
    """
    csv.field_size_limit(_MAX_FIELD)
    rows: list[Row] = []
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = file.readline()
            if separator not in names and ";" in names:
                separator = ";"
            file.seek(0)
            reader = csv.reader(file, delimiter=separator, strict=True)
            header = next(reader, [])
            if not header or len(set(header)) < len(header):
                raise ValueError("the names of columns are missing or repeated")
            line = reader.line_num + 1
            for values in reader:
                is_blank = not any(value.strip() for value in values)
                if len(values) != len(header) and not is_blank:
                    raise ValueError(f"{len(values)} values for {len(header)} columns")
                if not is_blank:
                    rows.append((f" ({path} line {line})", dict(zip(header, values, strict=True))))
                line = reader.line_num + 1  # a quoted value may have several lines
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} line {_first_undecoded(path)} is not UTF-8",
            got=" ".join(str(error).split()),
            expected="a table in UTF-8",
            fix='save it as UTF-8, which spreadsheet programs call "CSV UTF-8"',
        ) from error
    except (csv.Error, ValueError) as error:
        raise UserError(
            f"{path} line {line} cannot be read as a table with a header",
            got=f"{type(error).__name__}: {error}",
            expected="a value for each column of the header",
            fix="correct the line, and put values with separators, quotes or line breaks in quotes",
        ) from error
    return rows


def _first_undecoded(path: Path) -> int:
    """Return the number of the first line that is not UTF-8, from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _numbered(path: Path, records: Sequence[Record]) -> list[Row]:
    return [(f" ({path} row {number})", record) for number, record in enumerate(records, start=1)]


def _unreadable(path: Path, form: str, error: BaseException) -> UserError:
    return UserError(
        f"{path} cannot be read as {form}",
        got=" ".join(f"{type(error).__name__}: {error}".split()),
        expected=f"a file that ends in {', '.join(READERS)} and holds what its name says",
        fix="correct or download it again, or use .jsonl",
    )


def _kind(path: Path) -> str:
    return "a directory" if path.is_dir() else "not there"


READERS: Mapping[str, Callable[[Path], list[Row]]] = {
    ".csv": lambda path: _read_table(path, ","),
    ".tsv": lambda path: _read_table(path, "\t"),
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
"""Functions that read a file, by the ending of its name."""
