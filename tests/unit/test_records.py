"""Records are what pandas, pyarrow, json and datasets read; what these would repair is refused."""

import gzip
import re

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from lezo_ds.data import records as module
from lezo_ds.data.records import read_hub, read_records, write_records
from lezo_ds.errors import HubError, UserError

RECORDS = [{"text": f'the "box, {row}\ná', "label": ("bad", "good")[row % 2]} for row in range(5)]


def read(path, *options):
    return list(read_records(str(path), *options))


def refusal_of(path, *options):
    with pytest.raises(UserError) as error:
        read(path, *options)
    assert "\n" not in str(error.value)
    return str(error.value)


ENDINGS = ["csv", "tsv", "CSV", "csv.gz", "tsv.zip", "json", "jsonl", "parquet"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_kind_of_file_has_the_same_records(ending, tmp_path):
    path = tmp_path / f"data.{ending}"
    table = pd.DataFrame(RECORDS)
    if "csv" in ending.lower() or "tsv" in ending:
        table.to_csv(path, sep="\t" if "tsv" in ending else ",", index=False)
    elif ending == "parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, orient="records", lines=ending == "jsonl")
    assert read(path) == RECORDS


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_written_is_read_again(ending, tmp_path):
    path = tmp_path / f"data.{ending}"
    pd.DataFrame(RECORDS).to_parquet(tmp_path / "source.parquet")
    for records in (RECORDS, [{"text": "a\rb, c", "label": '"'}]):  # a return alone ends a row
        if ending != "parquet":
            write_records(path, records, path)
            assert read(path) == records
    write_records(path, RECORDS, tmp_path / "source.parquet")
    assert read(path) == RECORDS
    if ending == "csv":
        write_records(path, [{"text": "über ☃", "x": "1;2"}], path, ";", "cp1252")
        assert read(path, ";", "cp1252") == [{"text": "über \\u2603", "x": "1;2"}]
        assert "cannot be read" in refusal_of(path, ";")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('text,label\n"Great" film,1\nSo "nice",0\n', [["Great film", "1"], ['So "nice"', "0"]]),
        ("text,label,,\na,b,,\n", [["a", "b", "", ""]]),  # of a spreadsheet
        ("\n\ntext,label\na,b\n\nc,d\n", [["a", "b"], ["c", "d"]]),
        ('text,label\n"two\nlines",b\n', [["two\nlines", "b"]]),
        ("text,label\nNA,007\n1.10,\n", [["NA", "007"], ["1.10", ""]]),
        ('\ufefftext,label\n"say ""no""",b\n', [['say "no"', "b"]]),
        ('text\na\n""\n""\nb\n', [["a"], [""], [""], ["b"]]),
    ],
)
def test_an_ordinary_table_has_the_rows_that_pandas_reads(content, expected, tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text(content)
    by_pandas = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False)
    assert read(path) == by_pandas.to_dict("records")
    assert [list(record.values()) for record in read(path)] == expected
    spans = "1 of 1 records span several lines, the first in row 1"
    assert (spans in caplog.text) == ("two\nlines" in content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\nx,bug\ny\n", "the row that ends in line 3 has 1 values for 2 columns"),
        ('text,label\n"x\ny",bug\ny\n', "ends in line 4 has 1 values for 2 columns"),
        ("text,label\nx,bug,z\n", "ends in line 2 has 3 values for 2 columns"),
        ("\na,text,text,,\nx,y,z,,\n", "the first line has the column 'text' 2 times"),
        ('text,label\nx,"bug\n', "EOF inside string"),
        (b"text,label\n\xff\xfe,bug\n", "can't decode byte 0xff"),
        ("text\na\n  \nb\n", "pandas reads 2 of its 3 rows"),
    ],
)
def test_a_table_that_pandas_would_repair_or_cannot_read_is_refused(content, message, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refusal = refusal_of(path)
    assert message in refusal
    assert refusal.startswith(f"{path} cannot be read: ")
    key = "data.encoding" if "decode" in message else "data.separator"
    assert key in refusal.partition("; fix: ")[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", '{"a": 1}\n\n{"a": 1, "b": {"c": 1, "c": 1}}', "line 3: an object has the key"),
        ("t.json", '[{"c": 2, "a": [], "c": 3}]', "an object has the key 'c' 2 times"),
        ("t.jsonl", '{"a": 1}\n{"a"\n', "line 2: Expecting"),
        ("t.jsonl", "\n", "t.jsonl has no records; fix: fill the file"),
        ("t.jsonl", "[1]\n", "line 1 does not hold an object"),
        ("t.json", '{"data": [{"a": 1}]}', "an object a line as .jsonl, in UTF-8"),
        ("t.json", "[" * 100_000, "cannot be read"),
        ("t.jsonl", "\u00e9".encode("latin-1"), "can't decode"),
        ("t.parquet", "x", "fix: write it again, with one column of each name"),
        ("t.csv.gz", gzip.compress(b"text,label\na,b\n", mtime=0)[:-9], "cannot be read"),
        ("t.csv.bak", "a\n1\n", "has no suffix of .csv, .tsv, .jsonl, .json, .parquet"),
        ("t.csv.json", "a\n1\n", "cannot be read"),
        ("t.xlsx", "x", "has no suffix of .csv, .tsv, .jsonl, .json, .parquet"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refusal_of(path)


def test_json_may_begin_with_a_mark_of_its_encoding(tmp_path):
    path = tmp_path / "a:b.jsonl"  # a path, and no name on the Hub
    path.write_text('\ufeff{"a": "2020-01-01"}\n\n {"a": null, "b": {"c": [1.0, true]}}\n')
    assert read(path) == [{"a": "2020-01-01"}, {"a": None, "b": {"c": [1.0, True]}}]
    assert "none.csv is not a file; fix: correct the path" in refusal_of(tmp_path / "none.csv")


def test_values_of_parquet_are_those_of_pyarrow_and_a_map_is_an_object(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    table = pa.table({"n": [1, None, 3], "turns": [[{"role": "user"}], [], None]})
    parquet.write_table(table, path)
    monkeypatch.setattr(module, "_ROWS", 2)
    assert read(path) == table.to_pylist()
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    parquet.write_table(twice, path)
    assert "it has the column 'a' 2 times" in refusal_of(path)


def test_columns_of_parquet_keep_their_types_and_bits(tmp_path):
    table = pa.table(
        {
            "map": pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
            "large": pa.array([2**63, 1], pa.uint64()),
            "time": pa.array([1, 2], pa.timestamp("ns")),
            "kind": pa.array(["x", "y"]).dictionary_encode(),
        }
    )
    source = tmp_path / "t.parquet"
    parquet.write_table(table, source)
    write_records(tmp_path / "o.parquet", [each | {"n": 1} for each in read(source)], source)
    expected = table.append_column("n", pa.array([1, 1]))
    assert parquet.read_table(tmp_path / "o.parquet").equals(expected)


def test_the_hub_has_the_records_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub").mkdir()
    record = {"id": "5", "answers": {"text": ["Rain", "rain"], "answer_start": [0, 0]}}
    record["image"] = {"bytes": b"no image", "path": None}
    rows = datasets.Dataset.from_list([record] * 3).cast_column("image", datasets.Image())
    rows.to_parquet(tmp_path / "hub" / "train.parquet")
    assert list(read_hub(str(tmp_path / "hub"), None, "train")) == [record] * 3
    for name, loaded in (("no/such:train[:9]", "default"), ("no/such/x:y", "x")):
        with pytest.raises(HubError, match=re.escape(f"cannot load no/such ({loaded}) from the H")):
            read(name)
    assert "or OWNER/NAME:SPLIT on the Hub" in refusal_of("no/such:")
