"""Records from files and from the Hugging Face hub, each with its place for error messages.

A source is a path, whose suffix in any case says how to read it, or the name of a split on the hub:

    tickets.csv, .tsv         a header, then one record a row; every value is text in an encoding
    tickets.jsonl, .json      one JSON object a line, one list of objects, or one after another
    tickets.parquet           one record a row
    OWNER/NAME:SPLIT          a split of a data set on the hub; also OWNER/NAME/CONFIG:SPLIT

All but the last two kinds of JSON are streamed. Python's own readers keep values as they are
written. The readers of `datasets` turn the text "2020-01-01" into a date, shift the values of a row
that has too many, and do not know the line of a record.
"""

from __future__ import annotations

import codecs
import csv
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import charset_normalizer
import pyarrow as pa
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from lezo_ds.checkpoints.checkpoint import hub_problem
from lezo_ds.errors import HubError, UserError, first_line, one_line
from lezo_ds.tasks.base import ArrowRecord, Record
from lezo_ds.tasks.conversations import are_objects, are_turns

logger = logging.getLogger(__name__)

Row = tuple[str, Any]
"""(place, record): the place is such as " (train.jsonl line 3)", or "" if it is unknown. The record
is a mapping, or a ValueError that says why there is none."""

UTF_8 = "utf-8"
TABLES = (".csv", ".tsv")
"""The kinds of files that may have any encoding. All others say theirs."""

_PARQUET_ROWS = 1024  # that are in memory at a time
_GUESSED_BYTES = 2**20  # of a table, from which its encoding is guessed
_SNIFFED_BYTES = 64  # that tell what a file is, if it is not what its name says
_SNIFFED_LINES = 20  # of a table, from which its separator is found
_ON_HUB = re.compile("([^/]*/[^/]*)(?:/([^/]*))?:([^:]*)")  # OWNER/NAME:SPLIT, see above
_SEPARATORS = (",", ";", "\t", "|")
_SEPARATOR_LINE = re.compile('"?sep=(.)"?[\r\n]*')
_CONTAINERS = ("data", "rows", "records", "examples")  # usual keys of a list that is the table
_COMMA = re.compile(r"\s*(?:,\s*|\Z)")
_SPACE = re.compile(r"\s*,?\s*")
_FOREIGN: Mapping[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("compressed by gzip", "unpack it: gunzip"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "unpack it: unzstd"),
    b"PK\x03\x04": ("an Excel workbook or a ZIP archive", "save it as CSV in UTF-8, or unpack it"),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook", "save it as CSV in UTF-8"),
    b"version https://git-lfs": ("a pointer of Git LFS, without the content", "git lfs pull"),
    b"<!DOCTYPE": ("a web page", "download the file itself"),
    b"<html": ("a web page", "download the file itself"),
}
"""What a file is that begins with some bytes, and what to do."""


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
    on_hub = _ON_HUB.fullmatch(source)
    if on_hub and not path.exists():
        hub_id, config, split = on_hub.groups()
        (rows,) = read_hub(hub_id, config, [split], fix=f"set {key} to a file")
    else:
        check_kind(f"{key}={source}", path)
        rows = list(read_file(path, encoding))
        _refuse_misread(path, rows)
    if not rows:
        raise UserError(f"{key}={source} has no records", fix=f"fill the file, or correct {key}")
    return rows


def _refuse_misread(path: Path, rows: Sequence[Row]) -> None:
    """Refuse a file whose structure is another one, so that none of its rows is a record."""
    if not rows:
        return
    place, first = rows[0]
    if all(
        isinstance(row, ValueError) and not isinstance(row, RepeatedKeyError) for _, row in rows
    ):
        fix = "write one object a line, or one list of objects, in UTF-8"
        if kind_of(path) in TABLES:
            fix = (
                "let line 1 name all columns, remove what is before it, and quote texts that "
                "have the separator"
            )
        raise UserError(f"{path} has no record: the first row{place} {first}", fix=fix)
    if isinstance(first, Mapping):
        _refuse_container(path, first, is_alone=len(rows) == 1)


def _refuse_container(path: Path, record: Mapping[str, Any], *, is_alone: bool) -> None:
    """Refuse the first object of a file if it holds records, and is none.

    Args:
        path: the file.
        record: the object.
        is_alone: whether the file has no other one.
    """
    lists = [key for key, value in record.items() if are_objects(value) and not are_turns(value)]
    nested = [key for key in lists if record[key][0].keys() & {"paragraphs", "qas"}]
    several = [key for key in lists if len(record[key]) > 1 or key in _CONTAINERS]
    columns = [value for value in record.values() if isinstance(value, list | Mapping)]
    if nested:
        shape = f"has the nested layout of SQuAD in {nested[0]}"
        fix = "write an object with question, context and answers for each question"
    elif not is_alone:
        return
    elif several or (lists and len(lists) == len(record)):
        shape = f"holds the records in {', '.join(several or lists)}"
        fix = "write each of these lists to a file of its own"
    elif len(columns) == len(record) > 1 and not any(map(are_turns, columns)):
        shape = "holds columns, not a list of records"
        fix = 'write it with pandas\' to_json(PATH, orient="records", lines=True)'
    else:
        return
    which = "is one JSON object that" if is_alone else "has JSON objects, the first of which"
    raise UserError(f"{path} {which} {shape}", fix=fix)


def _refuse_foreign(path: Path) -> None:
    """Refuse a file whose first bytes say that it is something else than its name says."""
    with path.open("rb") as file:
        start = file.read(_SNIFFED_BYTES)
    for mark, (meaning, fix) in _FOREIGN.items():
        if start.startswith(mark):
            raise UserError(f"{path} is {meaning}", fix=fix)


def kind_of(path: Path) -> str:
    """Return the suffix that says how a file is read, in lower case: ".csv" also for T.CSV."""
    return path.suffix.lower()


def check_kind(name: str, path: Path) -> None:
    """Refuse a path that is no file or has an unknown suffix; messages call it `name`."""
    is_file = path.is_file()
    if is_file:
        _refuse_foreign(path)
    if kind_of(path) in READERS and is_file:
        return
    missing = "" if is_file else ", which is not a file"
    fix = f"name a file that ends in {', '.join(READERS)}, or OWNER/NAME:SPLIT on the hub"
    raise UserError(f"cannot read {name}{missing}", fix=fix)


def read_file(path: Path, encoding: str = UTF_8) -> Iterator[Row]:
    """Yield the records of a file. Only JSON that is not an object a line is in memory as a whole.

    The encoding is that of a .csv or .tsv file.

    Raises:
        UserError: the file cannot be read, or its content ends in the middle of a record. The
            message names the last record that could be read. A single bad record does not raise
            (see `Row`).
    """
    kind = kind_of(path)
    place = ""
    try:
        _refuse_foreign(path)
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
        message = one_line(f"{type(error).__name__}: {error}")
        after = f" after{place}" if place else ""
        fix = f"save it as the UTF-8 {kind} file that its name says, or use .jsonl"
        if isinstance(error, csv.Error):
            fix = 'close the quoted value in this line, and write a " inside one as ""'
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
    import datasets  # takes a second, with pandas; only the hub needs it

    problem = hub_problem()
    # With this flag, `datasets` reads its cache at once. Without it, it tries the hub for minutes.
    datasets.config.HF_HUB_OFFLINE = bool(problem)
    try:
        loaded = datasets.load_dataset(hub_id, config, split=list(splits))
    except Exception as error:  # each library below raises its own types
        reason = problem or first_line(error)
        name = f"{hub_id} ({config or 'default'})"
        message = f"cannot load {name} from the Hugging Face hub: {reason}"
        raise HubError(message, fix=fix) from error
    tables = [split.with_format("arrow")[:] for split in loaded]
    return [[("", record) for record in _arrow_records(table)] for table in tables]


_Records = Iterator[tuple[str, int, object]]
"""(unit, number, record): "line" or "row", its number from 1, and the record or a ValueError."""


def _encoding_fix(path: Path) -> str:
    """Return how a table in the encoding that it probably has is read; "" if it is hardly text."""
    best = charset_normalizer.from_bytes(_sample(path)).best()
    if best is None:
        return ""
    # Of the encodings in which the text is the same, Windows' Western one is the most frequent.
    name = "cp1252" if "cp1252" in best.could_be_from_charset else best.encoding
    return f"set data.encoding={name} (init, predict: --encoding {name}), or save it in UTF-8"


def _sample(path: Path) -> bytes:
    """Return the first lines of a table, from which its encoding is guessed."""
    with path.open("rb") as file:
        return b"".join(file.readlines(_GUESSED_BYTES))


def _codec_of(path: Path, encoding: str) -> str:
    """Return the codec that reads a table, and with which another one has the same first bytes.

    A table that begins with the byte order mark of UTF-8, as spreadsheets write it, is in UTF-8. A
    table in another encoding that begins as if it were in UTF-8 is named.
    """
    sample = _sample(path)
    if sample.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    with suppress(ValueError):
        if sample.decode(UTF_8) != sample.decode(encoding):
            logger.warning("%s: it is read as %s, and looks like UTF-8", path.name, encoding)
    return encoding


class Layout(NamedTuple):
    """How a table is written.

    Attributes:
        codec: what reads its bytes, and writes the same first ones.
        delimiter: what separates values.
        has_separator_line: whether line 1 is one such as sep=; that spreadsheets write and read.
        skips_spaces: whether a space after each separator belongs to it.
        quoting: csv.QUOTE_NONE if a quotation mark is a character as any other.
    """

    codec: str
    delimiter: str
    has_separator_line: bool
    skips_spaces: bool
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL

    def rows(self, file: TextIO) -> Any:
        """Return the csv.reader of a table from its header on."""
        if self.has_separator_line:
            file.readline()
        return csv.reader(
            file,
            delimiter=self.delimiter,
            quoting=self.quoting,
            skipinitialspace=self.skips_spaces,
            strict=True,
        )


def layout_of(path: Path, encoding: str) -> Layout:
    """Return how a table is written. What is unusual for its suffix is said once.

    A table is read several times, and looked at again only if its file has changed.
    """
    facts = path.stat()
    return _layout(path, encoding, (facts.st_size, facts.st_mtime_ns))


@cache
def _layout(path: Path, encoding: str, _: tuple[int, int]) -> Layout:
    """Look at a table of this size and time of change; see `layout_of`.

    The separator is a tab in .tsv files and else a comma, unless another one divides the header,
    and the first rows in as many values.
    """
    usual = "\t" if kind_of(path) == ".tsv" else ","
    codec = _codec_of(path, encoding)
    with path.open(encoding=codec, newline="") as file:
        start = file.readline()
        named = _SEPARATOR_LINE.fullmatch(start)
        lines = [] if named else [start]
        lines += islice(file, _SNIFFED_LINES)
    header = lines[0] if lines else ""
    delimiter = named[1] if named else _separator(usual, lines)
    names = next(csv.reader([header], delimiter=delimiter), [])
    skips_spaces = len(names) > 1 and all(name.startswith(" ") for name in names[1:])
    layout = Layout(codec, delimiter, bool(named), skips_spaces)
    each_is_row, joined = _joined_lines(path, layout)
    if each_is_row and delimiter == "\t":
        layout = layout._replace(quoting=csv.QUOTE_NONE)
        message = "%s: each line is a row, and quotation marks are part of the texts"
        logger.warning(message, path.name)
    elif joined and (delimiter != "," or each_is_row or len(names) > 2):
        problem = (
            f"the quotation mark that opens in line {joined[0]} closes in line {joined[-1]}, and "
            "lines between them would be rows"
        )
        fix = 'write a " of a text as "", and the text in quotation marks'
        if delimiter == "\t":
            fix += "; if the lines are one text, save the table as .csv"
            raise UserError(f"{path}: {problem}", fix=fix)
        # Where texts have the separator, this may be so by chance.
        logger.warning("%s: %s; if it is part of a text, %s", path.name, problem, fix)
    if delimiter != usual:
        logger.warning("%s: the separator is %r", path.name, delimiter)
    if skips_spaces:
        logger.warning("%s: the space after each separator is left out", path.name)
    return layout


def _separator(usual: str, lines: Sequence[str]) -> str:
    """Return what separates the values of a table that begins with these lines."""
    for delimiter in dict.fromkeys((usual, *_SEPARATORS)):
        rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
        # The last line may begin a value of several lines.
        widths = {len(row) for row in rows[:-1] or rows}
        if len(widths) == 1 and widths != {1}:
            return delimiter
    # Where a comma is the decimal point, spreadsheets separate the values by semicolons.
    header = "".join(lines[:1])
    return ";" if usual not in header and ";" in header else usual


def _joined_lines(path: Path, layout: Layout) -> tuple[bool, range | None]:
    """Look for quotation marks that join rows, since they are part of texts.

    Returns:
        Whether quotation marks join lines (or fit no rule) though each line of the table is a row.
        And the first lines that one joins though several of them are rows, or None. The first value
        of such a row is not empty: a value of several lines may have indented ones.
    """
    skipped = int(layout.has_separator_line)
    joined = None
    are_joined = False
    each_is_row = True
    with (
        path.open(encoding=layout.codec, newline="") as file,
        path.open(encoding=layout.codec, newline="") as raw,
    ):
        rows = layout.rows(file)
        lines = layout._replace(quoting=csv.QUOTE_NONE).rows(raw)
        width = 0
        try:
            for row in rows:
                width = width or len(row)
                first = lines.line_num + skipped + 1
                of_row = list(islice(lines, rows.line_num - lines.line_num))
                are_joined |= len(of_row) > 1
                each_is_row &= all(len(line) in (0, width) for line in of_row)
                num_rows = sum(len(line) == width > 0 and line[0].strip() != "" for line in of_row)
                if num_rows > 1 and joined is None:
                    joined = range(first, first + len(of_row))
        except csv.Error:
            are_joined = True
        each_is_row &= all(len(line) in (0, width) for line in lines)
    return are_joined and each_is_row, joined


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Refuse a table without names of columns, or in which one stands for several columns."""
    if not names:
        raise ValueError("line 1 lacks the names of columns")
    if "\0" in "".join(names):
        raise UserError(
            f"{path} has null characters in line 1, as UTF-16 has",
            fix="set data.encoding=utf-16-le (init, predict: --encoding utf-16-le), or save it in "
            "UTF-8",
        )
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UserError(
            f"{path} has several columns with the name {repeated[0]!r}",
            fix="rename one of them in line 1, or remove it",
        )


def _read_table(path: Path, encoding: str) -> _Records:
    """Yield the rows of a table with a header; every value is text.

    Blank lines are skipped, and rows of empty cells at the end, as spreadsheets write them. Other
    such rows are records.
    """
    csv.field_size_limit(2**31 - 1)  # a text may be long
    layout = layout_of(path, encoding)
    with path.open(encoding=layout.codec, newline="") as file:
        reader = layout.rows(file)
        # A quoted value may have several lines, so a row starts after the last line of the row
        # before.
        first = 2 if layout.has_separator_line else 1
        line = first
        header: list[str] | None = None
        empty: list[tuple[str, int, object]] = []  # rows since the last one that has text
        try:
            for values in reader:
                if header is None:
                    _check_names(path, values)
                    header = values
                elif len(values) > 1 or "".join(values).strip():  # else the line is blank
                    record: object = dict(zip(header, values, strict=False))
                    if len(values) != len(header):
                        record = ValueError(f"has {len(values)} values for {len(header)} columns")
                    empty.append(("line", line, record))
                    if "".join(values).strip():
                        yield from empty
                        empty = []
                line = reader.line_num + first
        except csv.Error as error:
            raise csv.Error(f"line {line}: {error}") from error
    if empty:
        logger.warning("%s: %d rows of empty cells at the end are left out", path.name, len(empty))


def json_texts(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (unit, number, text) of each object in a JSON file; see `_Records` for the first two.

    The file has one list, an object a line, or objects one after another, in any encoding that JSON
    may have. Blank lines are skipped.
    """
    with path.open("rb") as binary:
        codec = json.detect_encoding(binary.read(4))
    # A byte that is not of this encoding is an error of its record alone (see _read_json).
    with path.open(encoding=codec, errors="surrogateescape", newline="\n") as file:
        first = next((line.strip() for line in file if line.strip()), "")
        file.seek(0)
        if first.startswith("["):
            text = file.read().strip()
            if not text.endswith("]"):
                raise ValueError("the list has no end")
            yield from _items(text[1:-1], _COMMA)
            return
        is_lines = _object_length(first) == len(first)
        text = "" if is_lines else file.read().lstrip()
        if _object_length(text):
            yield from _items(text, _SPACE)
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield "line", number, line


def _object_length(text: str) -> int:
    """Return the number of characters of the JSON value that begins a text; 0 if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return 0


def _items(text: str, between: re.Pattern[str]) -> Iterator[tuple[str, int, str]]:
    """Yield the JSON values in a text, each with its number, given what is between them."""
    decoder = json.JSONDecoder()
    place = len(text) - len(text.lstrip())
    number = 0
    while place < len(text):
        number += 1
        _, end = decoder.raw_decode(text, place)
        yield "row", number, text[place:end]
        gap = between.match(text, end)
        if gap is None:
            raise ValueError(f"no comma is after item {number}")
        place = gap.end()


class RepeatedKeyError(ValueError):
    """A JSON object has several values with one key."""


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. RepeatedKeyError: it has several values with one key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((key, number),) = Counter(key for key, _ in pairs).most_common(1)
        raise RepeatedKeyError(f"has the key {key!r} {number} times in one object")
    return values


def _read_json(path: Path, _: str) -> _Records:
    """Yield the objects of a JSON file."""
    for unit, number, text in json_texts(path):
        record: object
        try:
            record = json.loads(text.encode(), object_pairs_hook=_object)
        except RepeatedKeyError as error:
            record = error
        except (ValueError, RecursionError) as error:
            kind = "UTF-8" if isinstance(error, UnicodeEncodeError) else "JSON"
            record = ValueError(f"is not {kind}: {text[:80]!r}")
        yield unit, number, record


def _read_parquet(path: Path, _: str) -> _Records:
    table = ParquetFile(path)
    _check_names(path, table.schema_arrow.names)
    batches = table.iter_batches(_PARQUET_ROWS)
    records = chain.from_iterable(map(_arrow_records, batches))
    for row, record in enumerate(records, start=1):
        yield "row", row, record


def _arrow_records(table: pa.RecordBatch | pa.Table) -> Sequence[Record]:
    """Return the rows of a table."""
    kind = pa.struct(list(table.schema))
    class_names = _class_names(table.schema)
    records = []
    for row in table.to_pylist():
        record = ArrowRecord(_as_python(row, kind))
        record.class_names = class_names
        records.append(record)
    return records


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the names of the classes of each column that `datasets` calls a ClassLabel."""
    names = {}
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        stored = json.loads(schema.metadata[b"huggingface"])
        for column, feature in stored["info"]["features"].items():
            if feature["_type"] == "ClassLabel":
                names[column] = list(map(str, feature["names"]))
    return names


def _as_python(value: Any, kind: pa.DataType) -> Any:
    """Return a value of Arrow. A float of fewer bits has the digits that it was written with: 0.1.

    Its own value is 0.10000000149011612.
    """
    if isinstance(value, float) and kind in (pa.float16(), pa.float32()):
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, dict) and isinstance(kind, pa.StructType):
        return {field.name: _as_python(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and hasattr(kind, "value_type"):  # a map has none
        return [_as_python(item, kind.value_type) for item in value]
    return value


READERS: Mapping[str, Callable[[Path, str], _Records]] = {
    ".csv": _read_table,
    ".tsv": _read_table,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
"""The reader of each kind of file, by `kind_of`: (path, encoding) -> records."""
