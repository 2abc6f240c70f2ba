"""Reading records, checking them, splitting them as MeZO's code does, and its demonstrations."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest
from assets import write_records
from golden_tasks import GOLDEN
from lezo_ds.data.tables import read_source
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.custom import Description, make_task

from lezo_ds.config import DataConfig
from lezo_ds.data.splits import draw_demonstrations, load_splits, with_demonstrations
from lezo_ds.errors import UserError

SST2 = TASKS["sst2"]
TICKETS = make_task(
    Description(prompt="{text} is about", label_field="topic", labels=["bug", "billing"])
)
SHIPPING = make_task(
    Description(prompt="{text}", label_field="topic", labels=["bug", "billing", "shipping"])
)
RECORDS = [{"text": f"text {row}, 007", "topic": ("bug", "billing")[row % 2]} for row in range(20)]


def reviews(num_records):
    return [{"sentence": f"review {row} ", "label": row % 2} for row in range(num_records)]


def write_both(directory, train, validation):
    for name, records in (("train", train), ("validation", validation)):
        write_records(directory / f"{name}.jsonl", records)


def load(directory, task=SST2, **keys):
    return load_splits(task, DataConfig(path=str(directory), **keys))


def load_own(path, task=TICKETS, **keys):
    return load_splits(task, DataConfig(train=str(path), **keys))


def rows(examples):
    return [example.index for example in examples]


def test_a_record_at_which_a_task_of_ones_own_fails_is_named(tmp_path, monkeypatch):
    write_records(tmp_path / "t.jsonl", RECORDS)
    monkeypatch.setattr(type(TICKETS), "build_example", lambda _, record: record["txt"])
    expected = (
        r"record 1 of .*t.jsonl line 1\) does not fit the task: KeyError: 'txt'.* build_example"
    )
    with pytest.raises(UserError, match=expected):
        load_own(tmp_path / "t.jsonl")


def golden_record(name):
    return next(golden.record for golden in GOLDEN if golden.task == name)


# Reading.


def test_a_test_file_beside_those_of_a_task_of_your_own_is_named(tmp_path, caplog):
    write_both(tmp_path, RECORDS, RECORDS[:4])
    write_records(tmp_path / "test.jsonl", RECORDS[4:6])
    splits = load(tmp_path, TICKETS, num_train=4, num_dev=2)
    assert len(splits.test) == 4
    assert "its test file is not read" in caplog.text
    caplog.clear()
    write_both(tmp_path, reviews(9), reviews(4))
    load(tmp_path, num_train=4, num_dev=2)
    assert caplog.text == ""


ENDINGS = ["csv", "tsv", "json", "jsonl", "parquet", "lines.json", "CSV", "TSV", "Jsonl", "PARQUET"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_kind_of_file_has_the_same_records(ending, tmp_path):
    path, table = tmp_path / f"data.{ending}", datasets.Dataset.from_list(RECORDS)
    if ending.lower() in ("csv", "tsv"):
        table.to_csv(path, sep="," if ending.lower() == "csv" else "\t", index=False)
    elif ending.lower() == "parquet":
        table.to_parquet(path)
    else:
        lines = [json.dumps(record) + "\n" for record in RECORDS]
        path.write_text(json.dumps(RECORDS) if ending == "json" else "\n".join(lines))
    assert [record for _, record in read_source("data.train", str(path))] == RECORDS


def test_tables_hold_text_only_and_lines_are_known(tmp_path):
    lines = ["\ufefftext;topic", '"a, b; c\n";bug', "  ", ";", "007;", "NA;true"]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    places, records = zip(*read_source("data.train", str(tmp_path / "t.csv")), strict=True)
    values = [tuple(record.values()) for record in records]
    assert values == [("a, b; c\n", "bug"), ("", ""), ("007", ""), ("NA", "true")]
    assert [place.rpartition(" ")[2] for place in places] == ["2)", "5)", "6)", "7)"]
    (tmp_path / "t.jsonl").write_text('\n{"a": "2020-01-01 00:00:00"}\n \n{"a": 1, "b": {}}\n')
    assert read_source("data.train", str(tmp_path / "t.jsonl")) == [
        (f" ({tmp_path}/t.jsonl line 2)", {"a": "2020-01-01 00:00:00"}),
        (f" ({tmp_path}/t.jsonl line 4)", {"a": 1, "b": {}}),
    ]


GERMAN = "Text;Abteilung\nIch möchte die Waschmaschine zurückgeben;Rückgabe\nGrüße;Lob\n"


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_a_table_of_another_encoding_is_read_with_it_and_refused_with_its_name(encoding, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(GERMAN, encoding=encoding)
    likely = encoding.replace("-", "_")
    with pytest.raises(UserError, match=f"set data.encoding={likely}.* --encoding {likely}"):
        read_source("data.train", str(path))
    rows = read_source("data.train", str(path), encoding)
    assert [record["Abteilung"] for _, record in rows] == ["Rückgabe", "Lob"]
    with pytest.raises(UserError, match="unknown encoding: cp1252x"):
        read_source("data.train", str(path), "cp1252x")
    # Whatever the encoding is said to be, the mark of UTF-8 counts.
    path.write_text(GERMAN, encoding="utf-8-sig")
    assert read_source("data.train", str(path), encoding) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,topic\nx,bug\n\xff\xfe,bug\n", "UnicodeDecodeError"),
        ("a.csv", b"text,topic\nx,bug\n\ny\n", "line 4. has 1 values for 2 columns"),
        ("a.csv", b'text,topic\n"x\ny",bug\ny,bug,z', "line 4. has 3 values for 2 columns"),
        ("a.csv", b'text,topic\n"x,bug', "unexpected end of data; fix: close the quoted value"),
        ("a.csv", b"text,topic,text\n", "several columns with the name 'text'; fix: rename one"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "line 2. is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n', "line 2. is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "cannot be read"),
        ("a.parquet", b"x", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_own(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_nested_records_are_the_same_from_the_hub_from_parquet_and_from_json_lines(
    tmp_path, monkeypatch
):
    record = {"id": "5", "title": "Rain", "context": "Rain is wet.", "question": "What is?"}
    record["answers"] = {"text": ["Rain", "rain"], "answer_start": [0, 0]}
    text = datasets.Value("string")
    features = dict.fromkeys(("id", "title", "context", "question"), text)
    features["answers"] = datasets.Sequence({"text": text, "answer_start": datasets.Value("int32")})
    table = datasets.Dataset.from_list([record] * 3, features=datasets.Features(features))
    hub, parquet, lines = (tmp_path / kind for kind in ("hub", "parquet", "lines"))
    for directory in (hub, parquet, lines):
        directory.mkdir()
    for name in ("train", "validation"):
        table.to_parquet(hub / f"{name}.parquet")
        for part in (0, 1):
            table.to_parquet(parquet / f"{name}-0000{part}.parquet")
    write_both(lines, [record] * 6, [record] * 6)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    sizes = {"num_train": 2, "num_dev": 1}
    squad = TASKS["squad"]
    local = [load(directory, squad, **sizes) for directory in (parquet, lines)]
    assert local[0] == local[1]
    on_hub = load_splits(replace(squad, hub_id=str(hub)), DataConfig(**sizes))
    assert [example.record for example in on_hub.pool] == [record] * 3


@pytest.mark.parametrize("ending", ["JSONL", "Parquet"])
def test_a_folder_may_have_files_whose_suffix_is_in_any_case(ending, tmp_path):
    for name in ("train", "validation"):
        if ending == "JSONL":
            write_records(tmp_path / f"{name}.{ending}", reviews(20))
        else:
            datasets.Dataset.from_list(reviews(20)).to_parquet(tmp_path / f"{name}-00000.{ending}")
    loaded = load(tmp_path, num_train=10, num_dev=5)
    assert [len(split) for split in (loaded.train, loaded.dev, loaded.test)] == [10, 5, 20]


# Checks of records.


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sst2", {"sentence": "half \ud83d of one"}, "field sentence .* has half of a character"),
        ("sst2", {"label": True}, "field label .* is True, not of type int"),
        (
            "squad",
            {"answers": {"text": ["Rain", None]}},
            r"answers\.text of record 2 .* type list\[str\]",
        ),
        ("squad", {"answers": ["Rain"]}, r"has no field answers\.text, only id, title"),
    ],
)
def test_a_record_that_cannot_be_used_is_one_line_with_its_file_and_number(
    name, change, message, tmp_path
):
    record = golden_record(name)
    write_both(tmp_path, [record, record | change], [record])
    with pytest.raises(UserError, match=message) as error:
        load(tmp_path, TASKS[name])
    assert re.search(
        rf"record 2 of the train split of {name} \(.*/train\.jsonl line 2\)", str(error.value)
    )
    assert len(str(error.value)) < 1000


def test_records_without_an_answer_are_left_out_with_one_warning_a_split(tmp_path, caplog):
    record = golden_record("squad")
    write_both(tmp_path, [record, record | {"answers": {"text": []}}, record], [record])
    loaded = load(tmp_path, TASKS["squad"], num_train=1, num_dev=1)
    assert [(example.index, example.record) for example in loaded.pool] == [
        (0, record),
        (1, record),
    ]
    assert len(caplog.messages) == 1


# Splits.


def test_splits_are_those_of_mezos_own_code(tmp_path):
    seed = 42
    write_both(tmp_path, reviews(2000), reviews(1500))
    np.random.seed(seed)
    drawn = np.random.permutation(2000).tolist()[:1500]
    np.random.seed(seed)
    scored = np.random.permutation(1500).tolist()[:1000]
    clean, mezo = (load(tmp_path, protocol=protocol, seed=seed) for protocol in ("clean", "mezo"))
    assert (rows(mezo.train), rows(mezo.dev), rows(mezo.test)) == (
        drawn[:-500],
        drawn[-500:],
        scored,
    )
    assert mezo == clean
    assert all(example.prompt == f"review {example.index} It was" for example in mezo.train)


@pytest.mark.parametrize(
    ("name", "num_train", "num_validation", "clean", "mezo"),
    [
        ("cb", 250, 56, (150, 100, 56), (150, 100, 56)),
        ("wsc", 554, 104, (454, 100, 104), (54, 500, 104)),
    ],
)
def test_tasks_get_their_published_sizes(
    name, num_train, num_validation, clean, mezo, tmp_path, caplog
):
    record = golden_record(name)
    write_both(tmp_path, [record] * num_train, [record] * num_validation)
    for protocol, sizes in (("clean", clean), ("mezo", mezo)):
        loaded = load(tmp_path, TASKS[name], protocol=protocol)
        assert (len(loaded.train), len(loaded.dev), len(loaded.test)) == sizes
    assert ("too few for 1000 + 500: MeZO's protocol trains on 54" in caplog.text) == (
        name == "wsc"
    )


def test_own_splits_are_drawn_by_seed_without_overlap(tmp_path):
    write_records(tmp_path / "t.jsonl", RECORDS * 5)
    loaded = load_own(tmp_path / "t.jsonl", seed=4)
    drawn = [set(rows(split)) for split in (loaded.train, loaded.dev, loaded.test)]
    assert [len(part) for part in drawn] == [60, 20, 20]
    assert set.union(*drawn) == set(range(100))
    assert (
        load_own(tmp_path / "t.jsonl", seed=4) == loaded != load_own(tmp_path / "t.jsonl", seed=5)
    )
    small = load_own(tmp_path / "t.jsonl", seed=4, num_train=1, num_dev=1)
    assert small.test == loaded.test  # an evaluation of a model asks for no training examples
    other = str(tmp_path / "t.jsonl")
    whole = load_own(tmp_path / "t.jsonl", validation=other, test=other)
    assert [len(split) for split in (whole.train, whole.dev, whole.test)] == [100] * 3


def texts_of(split):
    return [example.record["text"] for example in split]


def test_splits_have_the_labels_in_their_shares_whatever_the_seed(tmp_path):
    labels = 70 * ["bug"] + 20 * ["billing"] + 10 * ["shipping"]
    tickets = [{"text": f"ticket {n}", "topic": label} for n, label in enumerate(labels)]
    write_records(tmp_path / "t.jsonl", tickets)
    for seed in range(5):
        loaded = load_own(tmp_path / "t.jsonl", SHIPPING, seed=seed)
        counts = [Counter(e.record["topic"] for e in split) for split in (loaded.test, loaded.dev)]
        assert counts == [{"bug": 14, "billing": 4, "shipping": 2}] * 2
    random = load_own(tmp_path / "t.jsonl", SHIPPING, seed=4, splits="random")
    drawn = [tickets[row]["text"] for row in np.random.RandomState(4).permutation(100)]
    assert texts_of((*random.test, *random.dev, *random.train)) == drawn


def test_test_records_that_repeat_a_text_are_left_out_and_counted(tmp_path, caplog):
    tickets = [{"text": f"Ticket {n}", "topic": ("bug", "billing")[n % 2]} for n in range(30)]
    write_records(tmp_path / "t.jsonl", tickets)
    repeated = [{**ticket, "text": f" ticket  {n}"} for n, ticket in enumerate(tickets[:4])]
    new = {**tickets[0], "text": "Ticket of another kind"}
    write_records(tmp_path / "test.jsonl", [*repeated, new])
    files = {"test": str(tmp_path / "test.jsonl"), "num_train": 5}
    loaded = load_own(tmp_path / "t.jsonl", **files)
    assert texts_of(loaded.test) == [new["text"]]
    said = "4 of 5 test records repeat the text of training or validation records; 1 stay"
    assert said in caplog.text
    assert len(load_own(tmp_path / "t.jsonl", **files, splits="random").test) == 5


def test_one_file_for_all_splits_and_one_label_are_said(tmp_path, caplog):
    same = str(tmp_path / "t.jsonl")
    tickets = [{"text": f"ticket {n}", "topic": "bug"} for n in range(20)]
    write_records(tmp_path / "t.jsonl", tickets)
    loaded = load_own(tmp_path / "t.jsonl", validation=same, test=same)
    assert [len(split) for split in (loaded.train, loaded.dev, loaded.test)] == [20, 20, 20]
    assert caplog.messages == [
        "all 20 training records have the label bug",
        "20 of 20 validation records repeat the text of training records",
        "20 of 20 test records repeat the text of training or validation records; 20 stay",
    ]


# Demonstrations.


def mezo_draws(num_questions, num_records, count):
    """The rows that MeZO's sample_train_sets draws without a seed for each question."""
    np.random.seed(0)
    drawn = []
    for seed in np.random.randint(0, 10000, num_questions):
        np.random.seed(seed)
        drawn.append(tuple(np.random.permutation(num_records).tolist()[:count]))
    return drawn


def test_the_demonstrations_of_each_question_are_those_of_mezos_code_without_its_own_answer():
    pool = [Example("", (), None, row) for row in range(554)]
    drawn = draw_demonstrations(0, pool[:1] * 100, pool[1:], 32)
    assert [tuple(rows(shown)) for shown in drawn] == [
        tuple(row + 1 for row in shown) for shown in mezo_draws(100, 553, 32)
    ]
    questions = pool[:5] * 12
    drawn = draw_demonstrations(0, questions, pool[:5], 4)
    for question, shown in zip(questions, drawn, strict=True):
        assert sorted([question.index, *rows(shown)]) == list(range(5))


def test_demonstrations_stand_before_dev_and_test_stripped_with_a_blank_line_after_each(tmp_path):
    write_both(tmp_path, reviews(24), reviews(12))
    data = DataConfig(path=str(tmp_path), num_train=12, num_dev=5, num_test=7, num_demonstrations=2)
    loaded = load_splits(SST2, data)

    def solved(examples):
        return "".join(f"{e.prompt + e.candidates[e.label]}".strip() + "\n\n" for e in examples)

    shown = with_demonstrations(data, loaded)
    assert shown.train == loaded.train
    assert {e.demonstrations for e in (*shown.dev, *shown.test)} == {solved(loaded.train[:2])}
    shown = with_demonstrations(replace(data, protocol="mezo"), loaded)
    for question, drawn in zip(shown.test, mezo_draws(7, 24, 2), strict=True):
        assert question.demonstrations == solved([SST2.example(reviews(24)[row]) for row in drawn])
    assert all(solved([question]) not in question.demonstrations for question in shown.dev)
