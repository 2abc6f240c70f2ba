from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import datasets
import numpy as np
import pytest
from assets import write_records
from golden_tasks import GOLDEN
from lezo_ds.data.records import MAX_CHARACTERS, load_records, sample_splits, with_demonstrations

from lezo_ds.errors import HubError, UserError
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Example

SQUAD, DROP, RECORD, COPA = TASKS["squad"], TASKS["drop"], TASKS["record"], TASKS["copa"]

TEXT, NUMBER = datasets.Value("string"), datasets.Value("int32")
# The features of the hub's data sets, and a record of each.
HUB_SCHEMAS = {
    "squad": (
        {
            **dict.fromkeys(("id", "title", "context", "question"), TEXT),
            "answers": datasets.Sequence({"text": TEXT, "answer_start": NUMBER}),
        },
        {
            **{"id": "5", "title": "Rain", "context": "Rain is wet.", "question": "What is?"},
            "answers": {"text": ["Rain", "rain"], "answer_start": [0, 0]},
        },
    ),
    "drop": (
        {
            **dict.fromkeys(("section_id", "query_id", "passage", "question"), TEXT),
            "answers_spans": datasets.Sequence({"spans": TEXT, "types": TEXT}),
        },
        {
            **{"section_id": "s", "query_id": "q", "passage": "Two ran.", "question": "How many?"},
            "answers_spans": {"spans": ["2"], "types": ["number"]},
        },
    ),
    "record": (
        {
            **{"passage": TEXT, "query": TEXT, "entities": datasets.Sequence(TEXT)},
            "entity_spans": datasets.Sequence({"text": TEXT, "start": NUMBER, "end": NUMBER}),
            **{"answers": datasets.Sequence(TEXT), "idx": {"passage": NUMBER, "query": NUMBER}},
        },
        {
            **{"passage": "Ann met Bo.", "query": "@placeholder ran", "entities": ["Ann", "Bo"]},
            "entity_spans": {"text": ["Ann", "Bo"], "start": [0, 8], "end": [3, 10]},
            **{"answers": ["Bo"], "idx": {"passage": 0, "query": 0}},
        },
    ),
}


def make_records(num_records):
    return [{"sentence": f"review {row} ", "label": row % 2} for row in range(num_records)]


def write_lines(directory, split, records):
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (directory / f"{split}.jsonl").write_text(text, encoding="utf-8")


def write_both(directory, train, validation):
    write_lines(directory, "train", train)
    write_lines(directory, "validation", validation)


def rows(examples):
    return [example.index for example in examples]


def test_json_lines_are_read_in_order(tmp_path):
    train = [*make_records(3), {"sentence": "caf\u00e9 \u2028 clich\u00e9s", "label": 1, "idx": 9}]
    write_both(tmp_path, train, make_records(2))
    assert load_records(TASKS["sst2"], tmp_path) == (train, make_records(2))


def test_parquet_parts_are_read_in_the_order_of_their_names(tmp_path):
    records = make_records(10)
    datasets.Dataset.from_list(records[6:]).to_parquet(tmp_path / "train-00001-of-00002.parquet")
    datasets.Dataset.from_list(records[:6]).to_parquet(tmp_path / "train-00000-of-00002.parquet")
    datasets.Dataset.from_list(records[:4]).to_parquet(tmp_path / "validation.parquet")
    assert load_records(TASKS["sst2"], tmp_path) == (records, records[:4])


@pytest.mark.parametrize("name", HUB_SCHEMAS)
def test_nested_records_are_the_same_from_the_hub_from_parquet_and_from_json_lines(
    tmp_path, monkeypatch, name
):
    features, record = HUB_SCHEMAS[name]
    table = datasets.Dataset.from_list([record] * 3, features=datasets.Features(features))
    hub, parquet, lines = (tmp_path / kind for kind in ("hub", "parquet", "lines"))
    for directory in (hub, parquet, lines):
        directory.mkdir()
    for directory in (hub, parquet):
        for split in ("train", "validation"):
            table.to_parquet(directory / f"{split}.parquet")
    write_both(lines, [record] * 3, [record] * 3)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    expected = ([record] * 3, [record] * 3)
    task = TASKS[name]
    assert load_records(task, parquet) == load_records(task, lines) == expected
    assert load_records(replace(task, hub_id=str(hub), hub_config=None), None) == expected


@pytest.mark.parametrize(
    ("task", "empty"),
    [
        (SQUAD, {"answers": {"text": [], "answer_start": []}}),
        (DROP, {"answers_spans": {"spans": [], "types": []}}),
        (RECORD, {"answers": []}),
        (RECORD, {"entities": []}),
        (RECORD, {"answers": ["nobody"]}),
    ],
)
def test_records_without_an_answer_are_left_out_with_one_warning_a_split(tmp_path, caplog, task, empty):
    record = HUB_SCHEMAS[task.name][1]
    write_both(tmp_path, [record, record | empty, record, record | empty], [record])
    with caplog.at_level(logging.WARNING):
        assert load_records(task, tmp_path) == ([record, record], [record])
    assert [message.message for message in caplog.records] == [
        f"2 of 4 records of the train split of {task.name} have no right answer and are left out"
    ]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_field_a_task_reads_is_checked(tmp_path, task):
    class Reads(dict):
        """A record that knows what was asked of it."""

        def __init__(self, values, path=""):
            super().__init__(
                {k: Reads(v, f"{path}{k}.") if isinstance(v, dict) else v for k, v in values.items()}
            )
            self.path, self.names = path, set()

        def __getitem__(self, name):
            value = super().__getitem__(name)
            if not isinstance(value, Reads):
                self.names.add(self.path + name)
            return value

    golden = next(golden for golden in GOLDEN if golden.task == task.name)
    record = Reads(golden.record)
    task.build_example(record, 0)
    read = record.names.union(*(value.names for value in record.values() if isinstance(value, Reads)))
    assert read == task.fields.keys()


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        (SQUAD, {"answers": {}}, r"has no field answers\.text; got: no fields; expected: title, context"),
        (SQUAD, {"answers": {"texts": []}}, r"has no field answers\.text; got: texts;"),
        (SQUAD, {"answers": ["Rain"]}, r"has no field answers\.text; got: \['Rain'\]"),
        (
            SQUAD,
            {"answers": {"text": "Rain"}},
            r"answers\.text of record .* wrong type; got: Rain; .*list\[str\]",
        ),
        (SQUAD, {"answers": {"text": ["Rain", None]}}, r"answers\.text of record 2 .* wrong type"),
        (DROP, {"answers_spans": None}, r"has no field answers_spans\.spans;"),
        (
            DROP,
            {"answers_spans": {"spans": [2]}},
            r"answers_spans\.spans of record 2 .* wrong type; got: \[2\]",
        ),
        (RECORD, {"entities": "Ann"}, "field entities of record 2 .* wrong type; got: Ann"),
        (RECORD, {"answers": [["Ann"]]}, "field answers of record 2 .* wrong type"),
    ],
)
def test_nested_fields_and_lists_are_checked(tmp_path, task, change, message):
    record = HUB_SCHEMAS[task.name][1]
    write_both(tmp_path, [record, record | change], [record])
    with pytest.raises(UserError, match=message):
        load_records(task, tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        {"sentence": None, "label": 1},
        {"sentence": "fine", "label": "1"},
        {"sentence": "fine", "label": None},
        {"sentence": "fine", "label": True},
    ],
)
def test_a_field_of_the_wrong_type_is_refused(tmp_path, record):
    write_both(tmp_path, make_records(2), [record])
    with pytest.raises(
        UserError, match=r"field .* of record 1 of the validation split .* has the wrong type"
    ):
        load_records(TASKS["sst2"], tmp_path)


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_that_names_no_candidate_is_refused(tmp_path, label):
    write_both(tmp_path, make_records(2), [*make_records(1), {"sentence": "fine", "label": label}])
    with pytest.raises(
        UserError, match=f"record 2 of the validation .* no usable label; got: {label}; .*0 to 1"
    ):
        load_records(TASKS["sst2"], tmp_path)


@pytest.mark.parametrize(
    "line",
    [b'{"sentence": "a', b"\xff\xfe", b"[1]", b"[" * 100_000, b'{"sentence": "caf\xe9", "label": 1}'],
    ids=range(5),
)
def test_a_broken_line_is_named(tmp_path, line):
    write_both(tmp_path, make_records(2), make_records(2))
    with (tmp_path / "train.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match=r"train\.jsonl line 3 is not a JSON object"):
        load_records(TASKS["sst2"], tmp_path)


def test_blank_lines_and_a_byte_order_mark_are_no_records_and_lines_keep_their_numbers(tmp_path):
    lines = [json.dumps(record) for record in make_records(3)]
    write_lines(tmp_path, "validation", make_records(2))
    train = tmp_path / "train.jsonl"
    train.write_text("\ufeff" + "\r\n\n \n".join(lines) + "\n\n\n", encoding="utf-8")
    assert load_records(TASKS["sst2"], tmp_path)[0] == make_records(3)
    train.write_text("\n\n".join([*lines, '{"sentence": 1, "label": 1}']))
    with pytest.raises(
        UserError, match=r"field sentence of record 4 of the train .*train\.jsonl line 7\) has"
    ):
        load_records(TASKS["sst2"], tmp_path)


LONG = "x" * (MAX_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        (
            TASKS["sst2"],
            {"sentence": "half \ud83d of one"},
            r"half of a character .* got: 'half \\ud83d of one'",
        ),
        (RECORD, {"entities": ["Ann", "\udc00"]}, r"field entities .* half of a character"),
        (
            TASKS["sst2"],
            {"sentence": LONG},
            "field sentence .* too long; got: 1000001 characters; .* at most 1000000",
        ),
        (TASKS["sst2"], {"label": LONG}, "field label .* wrong type; got: xxx"),
        (TASKS["sst2"], {"label": 2}, "no usable label; got: 2; expected: 0 to 1"),
        (COPA, {"question": "why"}, "does not fit the task: field question is not valid; got: why;"),
        (TASKS["sst2"], {"sentence": None}, "field sentence .* wrong type; got: None"),
    ],
    ids=["surrogate", "surrogate in a list", "long", "long label", "label", "question", "no text"],
)
def test_a_record_that_cannot_be_used_is_one_line_with_its_file_and_number(tmp_path, task, change, message):
    record = HUB_SCHEMAS[task.name][1] if task.name in HUB_SCHEMAS else golden_record(task)
    for split in ("train", "validation"):
        write_records(tmp_path / f"{split}.jsonl", [record, record | change])  # surrogates are escaped
    with pytest.raises(UserError, match=message) as caught:
        load_records(task, tmp_path)
    where = rf"record 2 of the train split of {task.name} \(.*/train\.jsonl line 2\)"
    assert re.search(where, str(caught.value))
    assert len(str(caught.value)) < 1000


def test_a_row_of_parquet_is_named(tmp_path):
    records = make_records(3)
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "train-0.parquet")
    datasets.Dataset.from_list([*records, {"sentence": "fine", "label": 2}]).to_parquet(
        tmp_path / "train-1.parquet"
    )
    write_lines(tmp_path, "validation", records)
    with pytest.raises(UserError, match=r"record 7 of the train .*train-1\.parquet row 4\) has no usable"):
        load_records(TASKS["sst2"], tmp_path)


def golden_record(task):
    return next(golden.record for golden in GOLDEN if golden.task == task.name)


def test_broken_parquet_is_a_users_error(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"train\.parquet cannot be read as parquet"):
        load_records(TASKS["sst2"], tmp_path)


def test_an_unreachable_hub_is_a_users_error_that_offers_a_local_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    message = r"cannot load nyu-mll/glue \(sst2\).*fix: set data.path to a directory with train.jsonl"
    with pytest.raises(HubError, match=message):
        load_records(TASKS["sst2"], None)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1])
def test_splits_are_those_of_mezos_own_code(seed):
    records, validation = make_records(2000), make_records(1500)
    np.random.seed(seed)
    drawn = np.random.permutation(len(records)).tolist()[:1500]
    np.random.seed(seed)
    scored = np.random.permutation(len(validation)).tolist()[:1000]

    splits = sample_splits(TASKS["sst2"], records, validation, "mezo", seed)
    assert rows(splits.train) == drawn[:-500]
    assert rows(splits.dev) == drawn[-500:]
    assert rows(splits.test) == scored
    assert splits == sample_splits(TASKS["sst2"], records, validation, "clean", seed)


def test_sampling_leaves_numpys_global_state_alone():
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    sample_splits(TASKS["sst2"], make_records(20), make_records(20), "clean", 3, 5, 5, 5)
    assert np.random.random() == expected


def test_examples_carry_the_row_and_text_of_their_record():
    splits = sample_splits(TASKS["sst2"], make_records(20), make_records(9), "clean", 0, 10, 5, 9)
    assert sorted(rows(splits.test)) == list(range(9))
    assert all(example.prompt == f"review {example.index} It was" for example in splits.train + splits.dev)
    assert not set(rows(splits.train)) & set(rows(splits.dev))


@pytest.mark.parametrize(
    ("name", "num_train", "num_validation", "clean", "mezo"),
    [
        ("rte", 2490, 277, (1000, 500, 277), (1000, 500, 277)),
        ("cb", 250, 56, (150, 100, 56), (150, 100, 56)),
        ("boolq", 9427, 3270, (1000, 500, 1000), (1000, 500, 1000)),
        ("wsc", 554, 104, (454, 100, 104), (54, 500, 104)),
        ("wic", 5428, 638, (1000, 500, 638), (1000, 500, 638)),
        ("copa", 400, 100, (300, 100, 100), (300, 100, 100)),
    ],
)
def test_tasks_get_their_published_sizes(name, num_train, num_validation, clean, mezo):
    record = next(golden.record for golden in GOLDEN if golden.task == name)
    for protocol, sizes in (("clean", clean), ("mezo", mezo)):
        splits = sample_splits(TASKS[name], [record] * num_train, [record] * num_validation, protocol, 0)
        assert (len(splits.train), len(splits.dev), len(splits.test)) == sizes


def test_mezo_says_that_it_shrinks_train(caplog):
    with caplog.at_level(logging.WARNING):
        sample_splits(TASKS["sst2"], make_records(554), make_records(104), "mezo", 0)
    assert "54 training examples instead of 1000" in caplog.text


@pytest.mark.parametrize(("protocol", "num_records"), [("clean", 1499), ("mezo", 500)])
def test_too_few_records_are_refused(protocol, num_records):
    with pytest.raises(
        UserError, match=rf"too few training records .* {num_records} records for 1000 \+ 500"
    ):
        sample_splits(TASKS["sst2"], make_records(num_records), make_records(10), protocol, 0)


def test_demonstrations_stand_before_the_question_stripped_with_blank_lines_between():
    shown = [Example(" a\n", ("Yes", "No"), 1, 0), Example("Answer:", (" Rome\n",), 0, 1)]
    asked = [Example("  b so ", ("x", "y"), 0, 2, ("z",), " so "), Example("c\n", ("Yes",), None, 3)]
    for example in asked:
        found = with_demonstrations(example, shown)
        assert found == replace(example, demonstrations="a\nNo\n\nAnswer: Rome\n\n")


def test_as_many_demonstrations_are_the_first_training_examples_of_any_size():
    records = make_records(200)
    few = sample_splits(TASKS["sst2"], records, records, "clean", 3, num_train=32, num_dev=0, num_test=0)
    many = sample_splits(TASKS["sst2"], records, records, "clean", 3, num_train=100, num_dev=50, num_test=0)
    assert many.train[:32] == few.train
