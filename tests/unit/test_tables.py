"""Files as people have them: what is read in spite of its shape, and what is refused by name."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from lezo_ds.data.tables import read_source
from lezo_ds.errors import UserError

RECORDS = [{"text": f'the "box {row}', "label": ("bad", "good")[row % 2]} for row in range(12)]


def records_in(path):
    return [record for _, record in read_source("data.train", str(path))]


def refusal_of(path):
    with pytest.raises(UserError) as error:
        read_source("data.train", str(path))
    return str(error.value)


# Tables.


@pytest.mark.parametrize(
    ("name", "delimiter", "first_line"),
    [
        ("t.csv", ";", "sep=;\n"),
        ("t.csv", "|", '"sep=|"\r\n'),
        ("t.csv", "\t", "sep=\t\n"),
        ("t.csv", ";", ""),
        ("t.csv", "\t", ""),
        ("t.csv", "|", ""),
        ("t.tsv", ",", ""),
    ],
)
def test_a_separator_that_is_not_that_of_the_suffix_is_found_and_said(
    name, delimiter, first_line, tmp_path, caplog
):
    path = tmp_path / name
    rows = [["text", "price"], ["one, two", "0,5"], ["a; b", "1"], ["c | d", "2,25"]]
    lines = [delimiter.join(f'"{value}"' for value in row) for row in rows]
    path.write_text(first_line + "\n".join(lines))
    for _ in range(2):
        found = read_source("data.train", str(path))
        assert [list(record.values()) for _, record in found] == rows[1:]
    header = 2 if first_line else 1
    assert found[0][0] == f" ({path} line {header + 1})"
    assert caplog.messages == [f"{path}: the separator is {delimiter!r}"]


def test_spaces_after_separators_belong_to_them(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text('id, text, label\n1, "good, really", a\n2, so so, b\n')
    assert [list(record) for record in records_in(path)] == [["id", "text", "label"]] * 2
    assert [record["text"] for record in records_in(path)] == ["good, really", "so so"]
    assert caplog.messages == [f"{path}: the space after each separator is left out"]
    path.write_text("id,text\n1, so so\n")
    assert records_in(path) == [{"id": "1", "text": " so so"}]


def test_quotation_marks_of_a_tsv_are_text_if_each_line_is_a_row(tmp_path, caplog):
    path = tmp_path / "t.tsv"
    plain = ['"Great', "it is", 'so "nice', 'the end"', 'He said "no" twice', "last"]
    path.write_text("text\tlabel\n" + "".join(f"{text}\t1\n" for text in plain))
    assert [record["text"] for record in records_in(path)] == plain
    assert caplog.messages == [
        f"{path}: each line is a row, and quotation marks are part of the texts"
    ]
    path.with_suffix(".csv").write_text('text,label\n"Great,1\nit is,1\nthe end",1\n')
    assert len(records_in(path.with_suffix(".csv"))) == 1
    assert "quotation marks join lines, each of which would be a row" in caplog.messages[1]
    quoted = 'text\tlabel\n"two\nlines"\t1\n"say ""no"""\t0\n'
    (tmp_path / "quoted.tsv").write_text(quoted)
    texts = [record["text"] for record in records_in(tmp_path / "quoted.tsv")]
    assert texts == ["two\nlines", 'say "no"']
    (tmp_path / "one_line.tsv").write_text('text\tlabel\n"say ""no"""\t0\n')
    assert records_in(tmp_path / "one_line.tsv")[0]["text"] == 'say "no"'


def test_a_table_whose_rows_are_all_refused_is_one_error(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("# export of May\ntext,label\na,b\n")
    assert refusal_of(path) == (
        f"{path} has no record: the first row ({path} line 2) has 2 values for 1 columns; "
        "fix: let line 1 name the columns, and remove what is before it"
    )


# JSON.


def lines_of(records, **options):
    return "".join(json.dumps(record, **options) + "\n" for record in records)


SHAPES = {
    "a list": json.dumps(RECORDS),
    "a list of several lines": json.dumps(RECORDS, indent=1),
    "lines": lines_of(RECORDS),
    "objects of several lines": lines_of(RECORDS, indent=2),
    "lines that end with commas": lines_of(RECORDS).replace("\n", ",\n"),
    "lines that end with a carriage return": lines_of(RECORDS).replace("\n", "\r"),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_json_is_read_in_any_shape_and_encoding(shape, encoding, tmp_path):
    for name in ("t.json", "t.jsonl"):
        (tmp_path / name).write_bytes(SHAPES[shape].encode(encoding))
        assert records_in(tmp_path / name) == RECORDS


def test_a_byte_that_is_no_text_is_an_error_of_its_record(tmp_path):
    for name, content in (
        ("t.jsonl", b'{"a": 1}\n{"a": "\xff"}\n'),
        ("t.json", b'[{"a": "\xff"},{}]'),
    ):
        (tmp_path / name).write_bytes(content)
        kinds = [type(record) for record in records_in(tmp_path / name)]
        assert sorted(kinds, key=str) == [ValueError, dict]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"version": "1", "data": RECORDS}, "holds the records in data; fix: write each of these"),
        ({"train": RECORDS, "test": RECORDS}, "holds the records in train, test"),
        (
            {"version": "2.0", "data": [{"title": "x", "paragraphs": [{"qas": []}]}] * 2},
            "has the nested layout of SQuAD in data; fix: write an object with question",
        ),
        ({"text": ["a", "b"], "label": [0, 1]}, "holds columns, not a list of records"),
        ({"text": {"0": "a", "1": "b"}, "label": {"0": 0, "1": 1}}, "holds columns, not a list"),
        ({"columns": ["text"], "index": [0, 1], "data": [["a"], ["b"]]}, "holds columns"),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_that_holds_records_is_named(document, message, indent, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(document, indent=indent))
    assert message in refusal_of(tmp_path / "t.json")


def test_one_conversation_is_a_record(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": turns, "tools": []}))
    assert len(records_in(tmp_path / "t.jsonl")) == 1


# Other files.


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.jsonl.gz", "t.parquet"])
def test_a_file_that_is_something_else_is_named(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert refusal_of(path) == f"{path} is compressed by gzip; fix: unpack it: gunzip"
    path.write_bytes(b"PK\x03\x04")
    assert "is an Excel workbook or a ZIP archive; fix: save it" in refusal_of(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert "is a pointer of Git LFS, without the content; fix: git lfs pull" in refusal_of(path)


def test_a_parquet_file_with_two_columns_of_a_name_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "t.parquet")
    assert "several columns with the name 'text'" in refusal_of(tmp_path / "t.parquet")
