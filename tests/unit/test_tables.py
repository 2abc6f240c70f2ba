"""Files as people have them: what is read in spite of its shape, and what is refused by name."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from lezo_ds.data.tables import read_source
from pyarrow import parquet

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
    assert caplog.messages == [f"{path.name}: the separator is {delimiter!r}"]


def test_rows_of_empty_cells_are_records_unless_nothing_follows_them(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text("text,label\n\na,b\n,\n\n" + '"",""\n' + "c,d\n,\n , \n")
    found = read_source("data.train", str(path))
    assert [list(record.values()) for _, record in found] == [
        ["a", "b"],
        ["", ""],
        ["", ""],
        ["c", "d"],
    ]
    assert [place for place, _ in found] == [f" ({path} line {line})" for line in (3, 4, 6, 7)]
    assert caplog.messages == ["t.csv: 2 rows of empty cells at the end are left out"]


def test_blank_lines_before_the_header_are_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\n\ntext,label\na,b\n")
    assert "line 1 lacks the names of columns" in refusal_of(path)


def test_a_table_in_another_encoding_than_it_is_read_in_is_named(tmp_path, caplog):
    path = tmp_path / "t.csv"
    for written, read, is_named in (
        ("utf-8", "cp1252", True),
        ("cp1252", "cp1252", False),
        ("utf-8", "utf-8", False),
        ("utf-8-sig", "utf-8", False),
        ("utf-16", "utf-16", False),
    ):
        path.write_text("text,label\ncaf\u00e9,x\n", encoding=written)
        caplog.clear()
        rows = read_source("data.train", str(path), read)
        assert rows[0][1]["text"] == ("caf\u00c3\u00a9" if is_named else "caf\u00e9")
        message = f"t.csv: it is read as {read}, and looks like UTF-8"
        assert caplog.messages == [message] * is_named
    path.write_text("text,label\na,b\n", encoding="utf-16-le")
    assert "fix: set data.encoding=utf-16-le" in refusal_of(path)


def test_spaces_after_separators_belong_to_them(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text('id, text, label\n1, "good, really", a\n2, so so, b\n')
    assert [list(record) for record in records_in(path)] == [["id", "text", "label"]] * 2
    assert [record["text"] for record in records_in(path)] == ["good, really", "so so"]
    assert caplog.messages == [f"{path.name}: the space after each separator is left out"]
    path.write_text("id,text\n1, so so\n")
    assert records_in(path) == [{"id": "1", "text": " so so"}]


def test_quotation_marks_of_a_tsv_are_text_if_each_line_is_a_row(tmp_path, caplog):
    path = tmp_path / "t.tsv"
    plain = ['"Great', "it is", 'so "nice', 'the end"', 'He said "no" twice', "last"]
    path.write_text("text\tlabel\n" + "".join(f"{text}\t1\n" for text in plain))
    assert [record["text"] for record in records_in(path)] == plain
    assert caplog.messages == [
        f"{path.name}: each line is a row, and quotation marks are part of the texts"
    ]
    path.with_suffix(".csv").write_text('text,label\n"Great,1\nit is,1\nthe end",1\n')
    assert len(records_in(path.with_suffix(".csv"))) == 1
    assert "opens in line 2 closes in line 4, and lines between them would be" in caplog.messages[1]
    quoted = 'text\tlabel\n"two\nlines"\t1\n"say ""no"""\t0\n'
    (tmp_path / "quoted.tsv").write_text(quoted)
    texts = [record["text"] for record in records_in(tmp_path / "quoted.tsv")]
    assert texts == ["two\nlines", 'say "no"']
    (tmp_path / "one_line.tsv").write_text('text\tlabel\n"say ""no"""\t0\n')
    assert records_in(tmp_path / "one_line.tsv")[0]["text"] == 'say "no"'


@pytest.mark.parametrize(
    "others",
    [(), ('8\t"two\n\nlines"\tgood',), ("8\tshort",), ('8\t"two\nlines"\tgood', "9\tshort")],
)
@pytest.mark.parametrize("first_line", ["", "sep=\t\n"])
def test_a_quotation_mark_that_joins_rows_of_a_tsv_is_refused_beside_other_rows(
    others, first_line, tmp_path
):
    rows = ["1\tfine\tgood", '2\t"Great, she said\tgood', "3\tfine\tbad", "4\tby a box\tbad"]
    rows += ["5\tshort", '6\tthe end"\tbad', *others]
    lines = "\n".join(["id\ttext\tlabel", *rows])
    (tmp_path / "t.tsv").write_text(first_line + lines)
    line = 4 if first_line else 3
    expected = f"the quotation mark that opens in line {line} closes in line {line + 4}, and"
    assert expected in refusal_of(tmp_path / "t.tsv")


@pytest.mark.parametrize(
    ("rows", "line"), [(["1\tfine", '2\t"Great" she said'], 3), (['1\t"open', "2\tfine", "3"], 2)]
)
def test_a_quotation_mark_that_fits_no_rule_is_refused_by_line(rows, line, tmp_path):
    (tmp_path / "t.tsv").write_text("\n".join(["id\ttext", *rows, "4\tlast\tone"]))
    refusal = refusal_of(tmp_path / "t.tsv")
    assert f"Error: line {line}: " in refusal and "; fix: close the quoted value in this" in refusal


def test_quoted_values_of_a_tsv_may_have_any_lines(tmp_path, caplog):
    values = ["two\nlines", "a\n\nb", 'say "no"\n', "def f():\n\tx = 1\t# one\n\treturn x", "a\tb"]
    for names in (["id", "text", "label"], ["text", "id", "label"], ["id", "label", "text"]):
        rows = [{"id": "1", "label": "good", "text": value} for value in values]
        with (tmp_path / "t.tsv").open("w", newline="") as file:
            writer = csv.DictWriter(file, names, delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        assert records_in(tmp_path / "t.tsv") == rows
    assert not caplog.messages


def test_a_table_whose_rows_are_all_refused_is_one_error(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("# export of May\ntext,label\na,b\n")
    assert refusal_of(path) == (
        f"{path} has no record: the first row ({path} line 2) has 2 values for 1 columns; "
        "fix: let line 1 name all columns, remove what is before it, and quote texts that have the "
        "separator"
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


SQUAD = {"title": "x", "paragraphs": [{"context": "c", "qas": [{"question": "q"}]}]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"version": "1", "data": RECORDS}, "holds the records in data; fix: write each of these"),
        ({"train": RECORDS, "test": RECORDS}, "holds the records in train, test"),
        (
            {"version": "2.0", "data": [{"title": "x", "paragraphs": [{"qas": []}]}] * 2},
            "has the nested layout of SQuAD in data; fix: write an object with question",
        ),
        ({"version": "2.0", "data": [SQUAD]}, "has the nested layout of SQuAD in data"),
        (SQUAD, "has the nested layout of SQuAD in paragraphs; fix: write an object with question"),
        ({"data": RECORDS[:1]}, "holds the records in data"),
        ({"train": RECORDS[:1], "test": RECORDS[:1]}, "holds the records in train, test"),
        ({"text": ["a", "b"], "label": [0, 1]}, "holds columns, not a list of records"),
        ({"text": {"0": "a", "1": "b"}, "label": {"0": 0, "1": 1}}, "holds columns, not a list"),
        ({"columns": ["text"], "index": [0, 1], "data": [["a"], ["b"]]}, "holds columns"),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_that_holds_records_is_named(document, message, indent, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(document, indent=indent))
    assert message in refusal_of(tmp_path / "t.json")


def test_articles_of_squad_are_named(tmp_path):
    (tmp_path / "t.jsonl").write_text(lines_of([SQUAD] * 2))
    assert "the first of which has the nested layout of SQuAD" in refusal_of(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").write_text('{"question": "q", "answers": [{"text": "a"}]}')
    assert len(records_in(tmp_path / "t.jsonl")) == 1


@pytest.mark.parametrize("text", ['{"a": 1, "b": {"c": 1, "c": 1}}', '{"c": 2, "a": [], "c": 3}'])
@pytest.mark.parametrize("others", [[], ['{"a": 1}']])
def test_a_key_that_an_object_repeats_is_an_error_of_its_record(text, others, tmp_path):
    for name, content in (
        ("t.jsonl", "\n".join([text, *others])),
        ("t.json", f"[{','.join([text, *others])}]"),
    ):
        (tmp_path / name).write_text(content)
        first, *rest = records_in(tmp_path / name)
        assert str(first) == "has the key 'c' 2 times in one object"
        assert rest == list(map(json.loads, others))


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


def test_floats_of_parquet_have_the_digits_that_they_were_written_with(tmp_path):
    numbers = [0.1, 1e-7, 3.0, None]
    inner = pa.struct([("n", pa.float32())])
    columns = {
        "single": pa.array(numbers, pa.float32()),
        "half": pa.array(np.array([0.1, 0.25, 3, 0.3], np.float16)),
        "double": pa.array(numbers),
        "lists": pa.array([[n] for n in numbers], pa.list_(pa.float32())),
        "structs": pa.array([[{"n": n}] for n in numbers], pa.list_(inner)),
        "text": pa.array(["a", None, "b", "c"]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    records = records_in(tmp_path / "t.parquet")
    for number, half, record in zip(numbers, [0.1, 0.25, 3.0, 0.3], records, strict=True):
        assert record["single"] == record["double"] == number and record["half"] == half
        assert (record["lists"], record["structs"]) == ([number], [{"n": number}])
    assert [record["text"] for record in records] == ["a", None, "b", "c"]
