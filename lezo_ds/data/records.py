"""Read and write the records of a file."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from lezo_ds.files import write_atomically


def read_records(
    source: str, separator: str | None = None, encoding: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a file."""
    path = Path(source)
    if path.suffix in (".csv", ".tsv"):
        sep = separator or {".csv": ",", ".tsv": "\t"}[path.suffix]
        table = pd.read_csv(
            path,
            sep=sep,
            encoding=encoding or "utf-8-sig",
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
        )
        yield from table.to_dict("records")
    elif path.suffix == ".parquet":
        yield from parquet.read_table(path).to_pylist()
    elif path.suffix == ".json":
        yield from json.loads(path.read_text())
    else:
        yield from map(json.loads, path.read_text().splitlines())


def write_records(
    path: Path,
    records: Sequence[dict[str, Any]],
    separator: str | None = None,
    encoding: str | None = None,
) -> None:
    """Write records to a file of the kind that its suffix names."""
    if path.suffix == ".parquet":
        buffer = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(list(records)), buffer)
        write_atomically(path, buffer.getvalue())
        return
    if path.suffix in (".csv", ".tsv"):
        sep = separator or {".csv": ",", ".tsv": "\t"}[path.suffix]
        text = pd.DataFrame(records).to_csv(index=False, sep=sep)
        write_atomically(path, text.encode(encoding or "utf-8", "backslashreplace"))
    elif path.suffix == ".json":
        write_atomically(path, json.dumps(list(records), ensure_ascii=False) + "\n")
    else:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_atomically(path, "".join(lines))
