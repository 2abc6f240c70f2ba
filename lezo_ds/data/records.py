"""Records: what pandas, pyarrow, json and datasets read from a file or from the Hub.

A source is a path, whose suffix says which library reads it, or the name of a split on the Hub:

    tickets.csv, .tsv         pandas; every value is a text; also .csv.gz, .csv.zst, .csv.zip
    tickets.jsonl             json, one object a line
    tickets.json              json, one list of objects
    tickets.parquet           pyarrow
    OWNER/NAME:SPLIT          datasets; also OWNER/NAME/CONFIG:SPLIT

What a library reads is what is there. What it would repair in silence is refused: a short row of a
table, a row with too many values, and a repeated name of a column or key of a JSON object.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lezo_ds.checkpoints.checkpoint import hub_problem
from lezo_ds.errors import HubError, UserError, first_line, one_line
from lezo_ds.files import write_atomically

logger = logging.getLogger(__name__)

TABLES = {".csv": ",", ".tsv": "\t"}
"""The suffixes of tables, with the separators of their values."""
SUFFIXES = (*TABLES, ".jsonl", ".json", ".parquet")
UTF_8 = "utf-8-sig"
"""UTF-8 with or without a byte order mark: the encoding of tables unless a recipe names another."""

_SUFFIX = re.compile(r"(\.csv|\.tsv)(\.gz|\.bz2|\.xz|\.zip|\.zst)?$|\.jsonl$|\.json$|\.parquet$")
_ON_HUB = re.compile("([^/:]+/[^/:]+)(?:/([^/:]+))?:(.+)")
_ROWS = 1024  # of Arrow, in memory at a time


def read_records(
    source: str, separator: str | None = None, encoding: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a file or of a split on the Hub (see the module's docstring).

    Args:
        source: a path, or the name of a split.
        separator: of the values of a table; None is that of its suffix.
        encoding: of a table; None is UTF-8.

    Raises:
        UserError: the source is not there, a library cannot read it or would repair a row, or it
            has no records.
    """
    is_empty = True
    for record in _records_of(source, separator, encoding):
        is_empty = False
        yield record
    if is_empty:
        raise UserError(f"{source} has no records", fix="fill the file, or name another one")


def _records_of(
    source: str, separator: str | None, encoding: str | None
) -> Iterator[dict[str, Any]]:
    path = Path(source)
    on_hub = _ON_HUB.fullmatch(source)
    if on_hub and not path.exists():
        hub_id, config, split = on_hub.groups()
        yield from read_hub(hub_id, config, split)
        return
    suffix = suffix_of(path)
    if not path.is_file():
        raise UserError(f"{source} is not a file", fix="correct the path")
    try:
        if suffix in TABLES:
            fix = (
                "name each column once, let each row have a value for each, write a quotation mark "
                'of a text as "", and set data.separator (--separator of init)'
            )
            yield from _read_table(path, separator or TABLES[suffix], encoding or UTF_8)
        elif suffix == ".parquet":
            fix = "write it again, with one column of each name"
            yield from _read_parquet(path)
        else:
            fix = (
                "write one list of objects as .json, or an object a line as .jsonl, in UTF-8 and "
                "with each key once"
            )
            yield from _read_json(path, is_list=suffix == ".json")
    except Exception as error:  # each library raises its own types
        if isinstance(error, UnicodeError):
            fix = "write it in UTF-8, or name the encoding of a table in data.encoding (--encoding)"
        raise UserError(f"{path} cannot be read: {one_line(error)}", fix=fix) from error


def suffix_of(path: Path) -> str:
    """Return the suffix that says how a file is read. UserError: it is unknown.

    A table may be compressed: that of tickets.csv.gz is .csv.
    """
    found = _SUFFIX.search(path.name.lower())
    if found is None:
        raise UserError(
            f"{path} has no suffix of {', '.join(SUFFIXES)}",
            fix="name a file that ends in one of these, or OWNER/NAME:SPLIT on the Hub",
        )
    return found[1] or found[0]


def read_hub(hub_id: str, config: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a split on the Hub, or in its cache if the Hub cannot be reached."""
    import datasets  # takes a second, with pandas

    problem = hub_problem()
    # With this flag, `datasets` reads its cache at once. Without it, it tries the hub for minutes.
    datasets.config.HF_HUB_OFFLINE = bool(problem)
    try:
        loaded = datasets.load_dataset(hub_id, config, split=split)
    except Exception as error:  # each library below raises its own types
        raise HubError(
            f"cannot load {hub_id} ({config or 'default'}) from the Hugging Face Hub: "
            f"{problem or first_line(error)}",
            fix="set data.path to a directory with the train and validation files, or data.train "
            "to a file",
        ) from error
    # As Arrow, so that no image or sound is decoded.
    for table in loaded.with_format("arrow").iter(_ROWS):
        yield from table.to_pylist(maps_as_pydicts="strict")


def _read_table(path: Path, separator: str, encoding: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table with a header, as pandas reads them: every value is a text."""
    import pandas as pd

    num_rows = _check_rows(path, separator, encoding)
    table = pd.read_csv(
        path, sep=separator, encoding=encoding, dtype=str, keep_default_na=False, index_col=False
    )
    if len(table) < num_rows:  # as of a line that has only spaces
        raise ValueError(f"pandas reads {len(table)} of its {num_rows} rows")
    yield from table.to_dict("records")


def _check_rows(path: Path, separator: str, encoding: str) -> int:
    """Return the number of rows of a table, and say which of them span several lines.

    Raises:
        ValueError: pandas would fill up or cut a row, or rename a column.
    """
    from pandas.io.common import get_handle

    csv.field_size_limit(2**31 - 1)  # a text may be long
    num_rows = 0
    spanning = []
    with get_handle(path, "r", encoding=encoding, compression="infer") as opened:
        rows = csv.reader(opened.handle, delimiter=separator)
        header = next(filter(None, rows), [])
        _refuse_repeated("the first line has the column", list(filter(None, header)))
        for num_rows, row in enumerate(filter(None, rows), start=1):
            if len(row) != len(header):
                raise ValueError(
                    f"the row that ends in line {rows.line_num} has {len(row)} values for "
                    f"{len(header)} columns"
                )
            if "\n" in "".join(row):
                spanning.append(num_rows)
    if spanning:
        logger.warning(
            "%s: %d of %d records span several lines, the first in row %d; if a quotation mark "
            'joins lines by mistake, write it as ""',
            path,
            len(spanning),
            num_rows,
            spanning[0],
        )
    return num_rows


def _read_json(path: Path, *, is_list: bool) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON file: one list of them, or one a line."""
    with path.open(encoding=UTF_8) as file:
        texts = [file.read()] if is_list else file
        for number, text in enumerate(texts, start=1):
            if not text.strip():
                continue
            try:
                value = json.loads(text, object_pairs_hook=_unique_keys)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            records = value if is_list else [value]
            if not isinstance(records, list) or not all(type(each) is dict for each in records):
                kind = "a list of objects" if is_list else "an object"
                raise ValueError(f"line {number} does not hold {kind}")
            yield from records


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. ValueError: it has several values with one key."""
    _refuse_repeated("an object has the key", [key for key, _ in pairs])
    return dict(pairs)


def _refuse_repeated(where: str, names: Sequence[str]) -> None:
    """Raise ValueError if a name occurs several times: a record would keep one of its values."""
    if len(set(names)) < len(names):
        ((name, number),) = Counter(names).most_common(1)
        raise ValueError(f"{where} {name!r} {number} times")


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    _refuse_repeated("it has the column", file.schema_arrow.names)
    for batch in file.iter_batches(_ROWS):
        yield from batch.to_pylist(maps_as_pydicts="strict")


def write_records(
    path: Path,
    records: Sequence[dict[str, Any]],
    source: Path,
    separator: str | None = None,
    encoding: str | None = None,
) -> None:
    """Write records to a file that `read_records` reads, atomically.

    Values that a table or JSON lacks are written as texts. A character that the encoding lacks is
    written as an escape.

    Args:
        path: its suffix says how it is written, and compressed.
        records: those of `source`, all with the same further fields.
        source: a file of the same kind. The columns of Parquet keep their types.
        separator: of the values of a table; None is that of its suffix.
        encoding: of a table; None is UTF-8.

    Raises:
        UserError: the suffix of the file is unknown. OSError: it cannot be written.
    """
    suffix = suffix_of(path)
    sink = io.BytesIO()
    if suffix == ".parquet":
        from pyarrow import parquet

        columns = parquet.ParquetFile(source).read()
        for name in records[0]:
            if name not in columns.column_names:
                columns = columns.append_column(name, [[each[name] for each in records]])
        parquet.write_table(columns, sink)
    elif suffix in TABLES:
        import pandas as pd
        from pandas.io.common import infer_compression

        table = pd.DataFrame(records)
        # The writer of Python 3.11 quotes a carriage return only with all other values.
        table.to_csv(
            sink,
            sep=separator or TABLES[suffix],
            index=False,
            quoting=csv.QUOTE_ALL if "\r" in table.to_csv() else csv.QUOTE_MINIMAL,
            encoding=encoding,
            errors="backslashreplace",
            compression=infer_compression(path, "infer"),
        )
    else:
        indent = 1 if suffix == ".json" else None
        values = [list(records)] if indent else records
        text = "".join(
            json.dumps(each, ensure_ascii=False, indent=indent, default=str) + "\n"
            for each in values
        )
        sink.write(text.encode(errors="backslashreplace"))
    write_atomically(path, sink.getvalue())
